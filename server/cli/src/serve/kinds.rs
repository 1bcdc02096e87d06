//! Kinds and numbers of ranks, and sizes of memory, as settings state them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

use crate::predict::MemoryRates;
use expertd_ipc::control::DeviceKind;

/// The device of all ranks, or in a mixed group that of its source rank and `cpu` for the others: `cuda`, `cuda,cpu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds {
    /// Device of the ranks that get the rows of steps.
    pub first: DeviceKind,
    /// Whether CPU ranks hold further experts.
    pub is_mixed: bool,
}

/// Numbers of ranks: of one kind, or in a mixed group of the first kind and of CPU ranks: `4`, `1,2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankNumbers {
    /// Ranks of the first kind.
    pub first: u32,
    /// CPU ranks of a mixed group.
    pub second: Option<u32>,
}

/// A size in bytes: a number, or one with a unit of 1024, 1024², 1024³ bytes: `K`, `M`, `G`, or `KiB`, `MiB`, `GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySize(pub u64);

impl From<DeviceKind> for Kinds {
    fn from(first: DeviceKind) -> Self {
        Kinds { first, is_mixed: false }
    }
}

impl From<u32> for RankNumbers {
    fn from(first: u32) -> Self {
        RankNumbers { first, second: None }
    }
}

impl FromStr for Kinds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kinds: Vec<&str> = text.split(',').map(str::trim).collect();
        let first = match kinds[0] {
            "cpu" => DeviceKind::Cpu,
            "cuda" => DeviceKind::Cuda,
            _ => return Err(format!("`{text}` is not a device; expected cpu, cuda, or cuda,cpu")),
        };
        match kinds[1..] {
            [] => Ok(first.into()),
            ["cpu"] => Ok(Kinds { first, is_mixed: true }),
            _ => Err(format!(
                "`{text}` is not a pair of devices; expected cuda,cpu: a GPU rank, then CPU ranks"
            )),
        }
    }
}

impl FromStr for RankNumbers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            let problem = || {
                format!(
                    "`{text}` is not a number of ranks; expected one such as 2, or two such as 1,2 for --device cuda,cpu"
                )
            };
            part.trim().parse::<u32>().map_err(|_| problem())
        };
        match text.split_once(',') {
            None => Ok(number(text)?.into()),
            Some((first, second)) => Ok(RankNumbers { first: number(first)?, second: Some(number(second)?) }),
        }
    }
}

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem =
            || format!("`{text}` is not a size; expected bytes, or units of 1024 as in 600MiB and 40GiB");
        let digits = text.trim().trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match text.trim()[digits.len()..].trim() {
            "" | "B" => 0,
            "K" | "KiB" => 10,
            "M" | "MiB" => 20,
            "G" | "GiB" => 30,
            _ => return Err(problem()),
        };
        let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        number.map(MemorySize).ok_or_else(problem)
    }
}

impl fmt::Display for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.first, if self.is_mixed { ",cpu" } else { "" })
    }
}

impl fmt::Display for RankNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.second {
            None => write!(f, "{}", self.first),
            Some(second) => write!(f, "{},{second}", self.first),
        }
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A number or a text of a configuration file.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(u64),
    Text(String),
}

fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(deserializer: D) -> Result<T, D::Error> {
    let text = match NumberOrText::deserialize(deserializer)? {
        NumberOrText::Number(number) => number.to_string(),
        NumberOrText::Text(text) => text,
    };
    text.parse().map_err(serde::de::Error::custom)
}

macro_rules! deserialize_parsed {
    ($($ty:ty),*) => { $(
        impl<'de> Deserialize<'de> for $ty {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                parsed(deserializer)
            }
        }
    )* };
}
deserialize_parsed!(Kinds, RankNumbers, MemorySize, MemoryRates);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_numbers_are_read_as_they_are_shown() {
        for text in ["cpu", "cuda", "cuda,cpu", "cpu,cpu"] {
            assert_eq!(text.parse::<Kinds>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cpu,cuda", "cuda,cpu,cpu"] {
            assert!(text.parse::<Kinds>().unwrap_err().contains("expected"), "{text}");
        }
        for text in ["2", "1,3"] {
            assert_eq!(text.parse::<RankNumbers>().unwrap().to_string(), text);
        }
        for text in ["", "-1", "1,", "1,2,3", "one"] {
            assert!(text.parse::<RankNumbers>().unwrap_err().contains("expected"), "{text}");
        }
    }

    #[test]
    fn sizes_have_units_or_none() {
        for (text, bytes) in
            [("0", 0), ("512", 512), ("3K", 3 << 10), ("2 MiB", 2 << 20), ("40GiB", 40 << 30)]
        {
            assert_eq!(text.parse(), Ok(MemorySize(bytes)), "{text}");
        }
        for text in ["", "G", "1.5G", "40TB", "-1", "99999999999G"] {
            assert!(text.parse::<MemorySize>().unwrap_err().contains("units of 1024"), "{text}");
        }
    }

    #[test]
    fn files_may_have_numbers() {
        #[derive(Deserialize)]
        struct File {
            ranks: RankNumbers,
            mixed: RankNumbers,
            device: Kinds,
            size: MemorySize,
        }
        let text = "ranks = 3\nmixed = \"1,2\"\ndevice = \"cuda,cpu\"\nsize = \"1GiB\"\n";
        let file: File = toml::from_str(text).unwrap();
        assert_eq!((file.ranks, file.mixed), (3.into(), RankNumbers { first: 1, second: Some(2) }));
        assert_eq!(
            (file.device, file.size),
            (Kinds { first: DeviceKind::Cuda, is_mixed: true }, MemorySize(1 << 30))
        );
        assert!(toml::from_str::<File>("ranks = -1").is_err());
    }
}
