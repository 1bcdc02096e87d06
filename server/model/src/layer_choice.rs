//! The choice of the decoder layers that are opened.

use std::fmt;

use expertd_types::{LayerId, LayerRange};
use serde::{Deserialize, Serialize};

/// The decoder layers of a checkpoint that are checked, loaded and served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerChoice {
    /// All layers.
    #[default]
    All,
    /// The layers of a range.
    Range(LayerRange),
    /// One of several shares with consecutive layers and, within one, equally many MoE blocks.
    Share {
        /// The number of the share, `0..of`.
        index: u32,
        /// The number of shares, at least 1.
        of: u32,
    },
}

impl fmt::Display for LayerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerChoice::All => f.write_str("all"),
            LayerChoice::Range(range) => range.fmt(f),
            LayerChoice::Share { index, of } => write!(f, "share {index} of {of}"),
        }
    }
}

impl LayerChoice {
    /// The chosen range of a model with `num_layers` decoder layers, of which those in `moe` (ascending) have an MoE
    /// block.
    ///
    /// # Errors
    /// What was found and expected, if the range exceeds the model or has no MoE block.
    pub(super) fn range(self, num_layers: usize, moe: &[usize]) -> Result<LayerRange, String> {
        let whole = LayerRange::whole(num_layers);
        let range = match self {
            LayerChoice::All => whole,
            LayerChoice::Range(range) => range,
            LayerChoice::Share { index, of } => return share(index as usize, of as usize, moe),
        };
        if range.first > range.last {
            return Err(format!("{range} ends before it begins; expected the first layer before the last"));
        }
        if range.last > whole.last {
            return Err(format!("the model has the layers {whole}, expected a range within them"));
        }
        if !moe.iter().any(|&layer| range.contains(id(layer))) {
            let (first, last) = (moe.first().copied().unwrap_or(0), moe.last().copied().unwrap_or(0));
            return Err(format!(
                "none of them has an MoE block; the first layer that has one is {first}, the last is {last}"
            ));
        }
        Ok(range)
    }
}

/// Share `index` of `of`: the first shares have one MoE block more than the others if the division leaves a remainder.
fn share(index: usize, of: usize, moe: &[usize]) -> Result<LayerRange, String> {
    if index >= of || of > moe.len() {
        return Err(format!(
            "expected a share below the number of shares, and at most {} shares, one for each MoE block",
            moe.len()
        ));
    }
    let (size, extra) = (moe.len() / of, moe.len() % of);
    let start = index * size + index.min(extra);
    let end = start + size + usize::from(index < extra);
    Ok(LayerRange { first: id(moe[start]), last: id(moe[end - 1]) })
}

fn id(layer: usize) -> LayerId {
    LayerId(u32::try_from(layer).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_every_block_once() {
        for blocks in 1..30usize {
            // The first two layers are dense, and so is every seventh.
            let moe: Vec<usize> = (2..).filter(|layer| layer % 7 != 0).take(blocks).collect();
            for of in 1..=blocks {
                let held = |index| {
                    let range = share(index, of, &moe).expect("a share for each block at least");
                    moe.iter().copied().filter(move |&layer| range.contains(id(layer)))
                };
                let all: Vec<usize> = (0..of).flat_map(held).collect();
                assert_eq!(all, moe, "{blocks} blocks in {of} shares");
            }
            assert!(share(0, blocks + 1, &moe).is_err());
            assert!(share(blocks, blocks, &moe).is_err());
        }
    }

    #[test]
    fn ranges_must_lie_in_the_model_and_have_a_block() {
        let range =
            |first, last| LayerChoice::Range(LayerRange { first: LayerId(first), last: LayerId(last) });
        let moe = [2, 3, 4];
        assert_eq!(range(0, 2).range(6, &moe), Ok(LayerRange { first: LayerId(0), last: LayerId(2) }));
        assert_eq!(LayerChoice::All.range(6, &moe), Ok(LayerRange::whole(6)));
        let error = range(4, 6).range(6, &moe).expect_err("layer 6 does not exist");
        assert!(error.contains("0-5"), "{error}");
        assert!(range(3, 2).range(6, &moe).is_err());
        let error = range(5, 5).range(6, &moe).expect_err("layer 5 is dense");
        assert!(error.contains("the last is 4"), "{error}");
    }
}
