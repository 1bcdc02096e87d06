//! The fingerprint of a set of weights.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How much of the weights a fingerprint covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Coverage {
    /// Evenly spaced samples of the bytes; names, shapes and types of every tensor.
    #[default]
    Sampled,
    /// Every byte.
    Whole,
}

impl Coverage {
    const fn prefix(self) -> &'static str {
        match self {
            Coverage::Sampled => "sampled",
            Coverage::Whole => "whole",
        }
    }
}

/// A digest of the contents of a set of weights: the same on every host and in every folder, and another one for other
/// weights. Fingerprints of different coverage differ.
///
/// Its text is `sampled:` or `whole:`, followed by 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WeightFingerprint {
    /// How much of the weights the digest covers.
    pub coverage: Coverage,
    /// The digest.
    pub digest: [u8; 16],
}

impl fmt::Display for WeightFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:032x}", self.coverage.prefix(), u128::from_be_bytes(self.digest))
    }
}

impl From<WeightFingerprint> for String {
    fn from(fingerprint: WeightFingerprint) -> String {
        fingerprint.to_string()
    }
}

/// A text that is no fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected `sampled:` or `whole:` and 32 hexadecimal digits, found {0:?}")]
pub struct NoFingerprint(String);

impl FromStr for WeightFingerprint {
    type Err = NoFingerprint;

    fn from_str(text: &str) -> Result<Self, NoFingerprint> {
        let no = || NoFingerprint(text.chars().take(64).collect());
        let (prefix, digits) = text.split_once(':').ok_or_else(no)?;
        let coverage = [Coverage::Sampled, Coverage::Whole].into_iter().find(|c| c.prefix() == prefix);
        let coverage = coverage.ok_or_else(no)?;
        if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(no());
        }
        let digest = u128::from_str_radix(digits, 16).map_err(|_| no())?.to_be_bytes();
        Ok(WeightFingerprint { coverage, digest })
    }
}

impl TryFrom<String> for WeightFingerprint {
    type Error = NoFingerprint;

    fn try_from(text: String) -> Result<Self, NoFingerprint> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_read_back() {
        let mut digest = [0; 16];
        digest[1] = 0xab;
        let fingerprint = WeightFingerprint { coverage: Coverage::Whole, digest };
        assert_eq!(fingerprint.to_string(), "whole:00ab0000000000000000000000000000");
        assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
        let long = format!("sampled:{}", "0".repeat(33));
        for text in [
            "",
            "whole:",
            "half:00ab0000000000000000000000000000",
            "sampled:+0ab000000000000000000000000000",
            &long,
        ] {
            assert!(text.parse::<WeightFingerprint>().is_err(), "{text}");
        }
    }
}
