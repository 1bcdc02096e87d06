//! The setting that says which layers a service holds.

use expertd_model::LayerChoice;
use expertd_types::{LayerId, LayerRange};

/// Parses `FIRST-LAST`, one layer's number, `ordinal/SHARES` or `all`. `host_name` is called for `ordinal/SHARES` only.
///
/// # Errors
/// The text found, and the form expected.
pub(crate) fn parse(text: &str, host_name: impl FnOnce() -> String) -> Result<LayerChoice, String> {
    if text == "all" {
        return Ok(LayerChoice::All);
    }
    let expected =
        || format!("is `{text}`, expected FIRST-LAST such as 0-15, or ordinal/SHARES such as ordinal/4");
    if let Some(shares) = text.strip_prefix("ordinal/") {
        let of = shares.parse::<u32>().ok().filter(|&of| of > 0).ok_or_else(expected)?;
        return Ok(LayerChoice::Share { index: ordinal(&host_name())? % of, of });
    }
    let number = |text: &str| text.trim().parse().map(LayerId).map_err(|_| expected());
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (number(first)?, number(last)?);
    if first > last {
        return Err(format!("is `{text}`, expected the first layer before the last"));
    }
    Ok(LayerChoice::Range(LayerRange { first, last }))
}

/// The number at the end of a host name: that of a pod in a StatefulSet.
fn ordinal(host_name: &str) -> Result<u32, String> {
    let digits = host_name.len() - host_name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    host_name[host_name.len() - digits..].parse().map_err(|_| {
        format!(
            "the host name `{host_name}` does not end in a number as pods of a StatefulSet do; give FIRST-LAST instead"
        )
    })
}

/// The name of this host; empty if the system does not say.
pub(crate) fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<LayerChoice, String> {
        parse(text, || "expertd-layers-13".to_owned())
    }

    #[test]
    fn ranges_and_shares_are_parsed() {
        let range =
            |first, last| LayerChoice::Range(LayerRange { first: LayerId(first), last: LayerId(last) });
        assert_eq!(parsed("0-15"), Ok(range(0, 15)));
        assert_eq!(parsed("7"), Ok(range(7, 7)));
        assert_eq!(parsed("all"), Ok(LayerChoice::All));
        assert_eq!(parsed("ordinal/20"), Ok(LayerChoice::Share { index: 13, of: 20 }));
        // More pods than shares are replicas.
        assert_eq!(parsed("ordinal/4"), Ok(LayerChoice::Share { index: 1, of: 4 }));
        for wrong in ["", "a-b", "3-", "-3", "ordinal/0", "ordinal/x", "1,2", "9-3"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_host_without_a_number_is_named() {
        let error = parse("ordinal/4", || "builder".to_owned()).expect_err("no number");
        assert!(error.contains("`builder`"), "{error}");
        assert!(parse("0-1", || unreachable!("only an ordinal needs the host's name")).is_ok());
    }
}
