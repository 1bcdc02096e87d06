//! The setting that says which CPU cores a service uses.

/// Parses a list of cores such as `0-3,8`.
///
/// # Errors
/// If the text is not such a list, or contains a core twice.
pub(super) fn parse(text: &str) -> Result<Vec<usize>, String> {
    let number =
        |s: &str| s.trim().parse::<usize>().map_err(|_| format!("`{s}` in `{text}` is not a core number"));
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last || last >= 4096 {
            return Err(format!("`{part}` is not a range of cores; expected FIRST-LAST, below 4096"));
        }
        cores.extend(first..=last);
    }
    let mut unique = cores.clone();
    unique.sort_unstable();
    unique.dedup();
    if unique.len() != cores.len() {
        return Err(format!("`{text}` contains a core twice"));
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_lists_are_parsed() {
        assert_eq!(parse("0-2,5").unwrap(), [0, 1, 2, 5]);
        assert!(parse("3-1").is_err());
        assert!(parse("a").is_err());
        assert!(parse("1,1").is_err());
        assert!(parse("0-99999").is_err());
    }
}
