//! Rows per expert: what ranks have counted, its imbalance, and its metrics.

use std::collections::VecDeque;
use std::io;
use std::sync::Weak;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use expertd_telemetry::names;
use expertd_types::LayerId;

use crate::tier_rows::TierStatus;

/// Interval at which metrics are set.
const EXPORT_INTERVAL: Duration = Duration::from_secs(5);
/// Number of intervals over which the imbalance is computed.
const WINDOW: usize = 12;

/// The rows that experts have computed since the service started, over all generations and weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRows {
    /// One entry for each served layer with an MoE block, ascending.
    pub layers: Vec<LayerRows>,
}

/// The rows of one layer's experts: one for each token and chosen expert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRows {
    /// The layer.
    pub layer: LayerId,
    /// `[ranks][experts]`: rows that each expert has computed on each rank.
    pub ranks: Vec<Vec<u64>>,
    /// Number of the layer's experts that the source rank of a mixed group owns; `None` in other groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_experts: Option<usize>,
}

impl ExpertRows {
    /// Reads rows from JSON.
    ///
    /// # Errors
    /// If the text is something else, or its numbers cannot be those of one service.
    pub fn from_json(text: &str) -> Result<ExpertRows, String> {
        let rows: ExpertRows = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let mut total = 0_u64;
        for layer in &rows.layers {
            let experts = layer.ranks.first().map_or(0, Vec::len);
            if let Some(other) = layer.ranks.iter().find(|rank| rank.len() != experts) {
                let found = other.len();
                return Err(format!(
                    "layer {} has {experts} experts on rank 0 and {found} on another rank, expected as many on every rank",
                    layer.layer
                ));
            }
            for &rows in layer.ranks.iter().flatten() {
                total = total.checked_add(rows).ok_or("the rows of all experts together exceed 64 bits")?;
            }
        }
        Ok(rows)
    }

    /// The largest imbalance of any layer and that layer; `None` if no layer has rows.
    pub fn largest_imbalance(&self) -> Option<(LayerId, f64)> {
        let layers = self.layers.iter().filter_map(|layer| Some((layer.layer, layer.imbalance()?)));
        layers.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The mean imbalance of the layers that have rows, weighted by their rows; `None` if none has.
    pub fn mean_imbalance(&self) -> Option<f64> {
        let rows = |layer: &LayerRows| layer.of_ranks().iter().sum::<u64>() as f64;
        let total: f64 = self.layers.iter().map(rows).sum();
        let weighted = self.layers.iter().filter_map(|layer| Some(layer.imbalance()? * rows(layer)));
        (total > 0.0).then(|| weighted.sum::<f64>() / total)
    }
}

impl LayerRows {
    /// `[experts]`: rows of each expert, all ranks together.
    pub fn of_experts(&self) -> Vec<u64> {
        let experts = self.ranks.first().map_or(0, Vec::len);
        (0..experts).map(|expert| self.ranks.iter().map(|rank| rank[expert]).sum()).collect()
    }

    /// `[ranks]`: rows of each rank.
    pub fn of_ranks(&self) -> Vec<u64> {
        self.ranks.iter().map(|rank| rank.iter().sum()).collect()
    }

    /// Rows of the rank with the most, divided by the mean over ranks; `None` without rows.
    pub fn imbalance(&self) -> Option<f64> {
        imbalance(&self.of_ranks())
    }
}

fn imbalance(ranks: &[u64]) -> Option<f64> {
    let (most, sum) = (ranks.iter().max()?, ranks.iter().sum::<u64>());
    (sum > 0).then(|| *most as f64 * ranks.len() as f64 / sum as f64)
}

/// The imbalance of each layer over the last [`WINDOW`] samples.
#[derive(Default)]
struct RecentRows {
    /// `[layers][ranks]` of each sample, oldest first.
    samples: VecDeque<Vec<Vec<u64>>>,
}

impl RecentRows {
    /// Takes in a sample. Returns the imbalance of each layer that had rows since the oldest sample.
    fn push(&mut self, rows: &ExpertRows) -> Vec<(LayerId, f64)> {
        let sample: Vec<_> = rows.layers.iter().map(LayerRows::of_ranks).collect();
        let oldest = self.samples.front().unwrap_or(&sample);
        let since = |now: &[u64], then: &[u64]| -> Vec<u64> {
            now.iter().zip(then).map(|(now, then)| now.saturating_sub(*then)).collect()
        };
        let found = rows.layers.iter().zip(sample.iter().zip(oldest));
        let found = found
            .filter_map(|(layer, (now, then))| Some((layer.layer, imbalance(&since(now, then))?)))
            .collect();
        self.samples.push_back(sample);
        if self.samples.len() > WINDOW {
            self.samples.pop_front();
        }
        found
    }
}

/// Sets the metrics of rows per expert, and in a mixed group those of its rows, from a thread that ends with the service. `per_expert`
/// adds a counter for each expert.
///
/// # Errors
/// If the thread cannot be started.
pub(crate) fn export<T: Send + Sync + 'static>(
    service: Weak<T>,
    per_expert: bool,
    read: fn(&T) -> ExpertRows,
    tier: fn(&T) -> Option<TierStatus>,
) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("expert-rows".into());
    let mut recent = RecentRows::default();
    thread
        .spawn(move || {
            while let Some(service) = service.upgrade() {
                let (rows, tier) = (read(&service), tier(&service));
                drop(service);
                for (layer, imbalance) in recent.push(&rows) {
                    metrics::gauge!(names::LAYER_IMBALANCE, "layer" => layer.to_string()).set(imbalance);
                }
                if per_expert {
                    count(&rows);
                }
                if let Some(tier) = tier {
                    count_tier(&tier);
                }
                std::thread::sleep(EXPORT_INTERVAL);
            }
        })
        .map(drop)
}

fn count(rows: &ExpertRows) {
    for layer in &rows.layers {
        let name = layer.layer.to_string();
        for (expert, rows) in layer.of_experts().into_iter().enumerate() {
            let labels = [("layer", name.clone()), ("expert", expert.to_string())];
            metrics::counter!(names::EXPERT_ROWS_TOTAL, &labels).absolute(rows);
        }
    }
}

fn count_tier(tier: &TierStatus) {
    for (layer, rows) in &tier.layers {
        for (by, rows) in [("source", rows.source), ("copy", rows.copied), ("cpu", rows.cpu)] {
            let labels = [("layer", layer.to_string()), ("by", by.to_owned())];
            metrics::counter!(names::TIER_ROWS_TOTAL, &labels).absolute(rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(layers: [[[u64; 2]; 2]; 2]) -> ExpertRows {
        let layer = |(id, ranks): (u32, [[u64; 2]; 2])| LayerRows {
            layer: LayerId(id),
            ranks: ranks.map(|rank| rank.to_vec()).to_vec(),
            source_experts: None,
        };
        ExpertRows { layers: (3..).zip(layers).map(layer).collect() }
    }

    #[test]
    fn imbalance_is_the_largest_rank_over_the_mean() {
        let none = rows([[[0; 2]; 2]; 2]);
        assert_eq!((none.largest_imbalance(), none.mean_imbalance()), (None, None));
        let some = rows([[[5, 0], [0, 5]], [[9, 9], [0, 12]]]);
        assert_eq!(some.layers[1].of_experts(), [9, 21]);
        assert_eq!(some.layers[1].of_ranks(), [18, 12]);
        assert_eq!(some.layers[0].imbalance(), Some(1.0));
        assert_eq!(some.largest_imbalance(), Some((LayerId(4), 1.2)));
        assert_eq!(some.mean_imbalance(), Some((10.0 + 1.2 * 30.0) / 40.0));
    }

    #[test]
    fn rows_that_no_service_has_are_refused() {
        let read =
            |ranks: &str| ExpertRows::from_json(&format!(r#"{{"layers":[{{"layer":3,"ranks":{ranks}}}]}}"#));
        let layer =
            LayerRows { layer: LayerId(3), ranks: vec![vec![1, 2], vec![3, 4]], source_experts: None };
        assert_eq!(read("[[1,2],[3,4]]"), Ok(ExpertRows { layers: vec![layer] }));
        assert!(
            read("[[1,2],[3]]").is_err_and(|error| error.contains("layer 3 has 2 experts on rank 0 and 1"))
        );
        assert!(read("[[18446744073709551615],[1]]").is_err_and(|error| error.contains("exceed 64 bits")));
    }

    #[test]
    fn the_window_forgets_old_rows() {
        let mut recent = RecentRows::default();
        assert!(
            recent.push(&rows([[[100, 0], [0, 0]], [[0; 2]; 2]])).is_empty(),
            "one sample has no difference"
        );
        let now = rows([[[100, 10], [0, 30]], [[0; 2]; 2]]);
        assert_eq!(recent.push(&now), [(LayerId(3), 1.5)]);
        for _ in 0..WINDOW - 2 {
            assert_eq!(recent.push(&now), [(LayerId(3), 1.5)]);
        }
        assert_eq!(recent.push(&now), [(LayerId(3), 1.5)]);
        assert!(recent.push(&now).is_empty(), "the window holds no sample without these rows");
    }
}
