//! The decoder layers that one service holds.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::LayerId;

/// Consecutive decoder layers, both ends included, numbered as in the checkpoint's tensor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerRange {
    /// The first layer.
    pub first: LayerId,
    /// The last layer, at least `first`.
    pub last: LayerId,
}

impl LayerRange {
    /// All layers of a model with `num_layers >= 1` decoder layers.
    #[must_use]
    pub fn whole(num_layers: usize) -> Self {
        let last = u32::try_from(num_layers.saturating_sub(1)).unwrap_or(u32::MAX);
        LayerRange { first: LayerId(0), last: LayerId(last) }
    }

    /// Whether the range has this layer.
    #[must_use]
    pub fn contains(self, layer: LayerId) -> bool {
        (self.first..=self.last).contains(&layer)
    }
}

/// `FIRST-LAST`, or the layer's number if there is only one.
impl fmt::Display for LayerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { self.first.fmt(f) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}
