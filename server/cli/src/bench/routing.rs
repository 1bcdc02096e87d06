//! Random routing that the benchmark uses instead of the model's gate.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use expertd_core::backend::{ExpertRows, GivenRouting};
use expertd_types::reuse::ReuseSequence;
use expertd_types::{LayerId, rows};

/// Seed of the order of popularity of [`RoutingRule::Hot`].
const ORDER_SEED: u64 = 1;

/// Value of `--routing`: how the experts of a step are chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum RoutingRule {
    /// By the layer's gate.
    Gate,
    /// At random, all experts with equal probability.
    Uniform,
    /// At random; the r-th most popular expert has weight `r^-exponent`. The order of popularity changes with every step.
    Zipf(f64),
    /// As [`Zipf`](Self::Zipf), but the order of popularity is the same in every step and layer.
    Hot(f64),
    /// Each row of a step continues a sequence of its own, which tends to use experts again that it has used recently.
    Reuse,
    /// At random; each expert of a layer has the weight of the rows that it has computed by these counts.
    Counted(Arc<BTreeMap<LayerId, Vec<u64>>>),
    /// Every expert gets equally many rows, or one row more than others.
    Even,
    /// At random among the experts of rank 0 (and further ones if it has fewer than k), with equal probability.
    OneRank,
}

impl FromStr for RoutingRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "gate" => Ok(RoutingRule::Gate),
            None if text == "uniform" => Ok(RoutingRule::Uniform),
            None if text == "one-rank" => Ok(RoutingRule::OneRank),
            None if text == "even" => Ok(RoutingRule::Even),
            None if text == "reuse" => Ok(RoutingRule::Reuse),
            Some((kind @ ("zipf" | "hot"), exponent)) => match exponent.parse::<f64>() {
                Ok(exponent) if exponent.is_finite() && exponent >= 0.0 => {
                    Ok(if kind == "zipf" { RoutingRule::Zipf(exponent) } else { RoutingRule::Hot(exponent) })
                }
                _ => Err(format!(
                    "`{exponent}` is not an exponent: {kind}:S takes a number of at least 0, such as {kind}:1.0"
                )),
            },
            Some(("rows", path)) => counted(Path::new(path)),
            _ => Err(format!(
                "expected gate, uniform, zipf:S, hot:S, reuse, rows:FILE, even or one-rank, found `{text}`"
            )),
        }
    }
}

/// Reads what `expertd status --expert-rows` or `bench --expert-rows` wrote.
fn counted(path: &Path) -> Result<RoutingRule, String> {
    let failed = |error: String| format!("{}: {error}; expected rows of experts as JSON", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let rows = ExpertRows::from_json(&text).map_err(failed)?;
    let layers = rows.layers.iter().map(|layer| (layer.layer, layer.of_experts()));
    Ok(RoutingRule::Counted(Arc::new(layers.collect())))
}

/// The state of the draws, apart from the rule.
#[derive(Debug)]
pub(super) struct Draws {
    pub(super) random: SmallRng,
    /// The sequences of [`RoutingRule::Reuse`], one for each row of a step.
    sequences: BTreeMap<LayerId, Vec<ReuseSequence>>,
}

impl Draws {
    pub(super) fn new(random: SmallRng) -> Draws {
        Draws { random, sequences: BTreeMap::new() }
    }

    /// The next token of the first `tokens` sequences of a layer.
    fn next_tokens(&mut self, layer: LayerId, tokens: usize, experts: usize, k: usize) -> Vec<i32> {
        let Draws { random, sequences } = self;
        let mut uniform = || random.random::<f64>();
        let sequences = sequences.entry(layer).or_default();
        while sequences.len() < tokens {
            sequences.push(ReuseSequence::new(experts, &mut uniform));
        }
        let mut ids = Vec::with_capacity(tokens * k);
        for sequence in sequences.iter_mut().take(tokens) {
            ids.extend(sequence.next_token(k, &mut uniform).iter().map(|&id| id as i32));
        }
        ids
    }
}

/// The experts `ids [rows, k]` with equal weights.
fn evenly_weighted(ids: &[i32], k: usize) -> GivenRouting {
    let share = (1.0 / k as f32).to_le_bytes();
    GivenRouting {
        ids: rows::encode_i32(ids),
        weights: share.iter().copied().cycle().take(ids.len() * 4).collect(),
        k,
        as_given: None,
    }
}

impl RoutingRule {
    /// Draws the routing of `tokens` rows over a layer's `experts` experts, of which rank 0 owns the first `first_rank`. All weights
    /// are equal. Returns `None` for the gate.
    pub(super) fn draw(
        &self,
        layer: LayerId,
        tokens: usize,
        experts: usize,
        first_rank: usize,
        k: usize,
        draws: &mut Draws,
    ) -> Option<GivenRouting> {
        match self {
            RoutingRule::Gate => return None,
            RoutingRule::Reuse => {
                return Some(evenly_weighted(&draws.next_tokens(layer, tokens, experts, k), k));
            }
            _ => {}
        }
        let random = &mut draws.random;
        let counted = match self {
            RoutingRule::Counted(layers) => layers.get(&layer).map_or(&[][..], Vec::as_slice),
            _ => &[],
        };
        let weight = |rank: usize| match *self {
            RoutingRule::Gate | RoutingRule::Reuse | RoutingRule::Uniform | RoutingRule::Even => 1.0,
            RoutingRule::Zipf(exponent) | RoutingRule::Hot(exponent) => (rank as f64 + 1.0).powf(-exponent),
            // An expert without rows is chosen only if fewer than k others are left.
            RoutingRule::Counted(_) => counted.get(rank).map_or(0.0, |&rows| rows as f64).max(1e-3),
            RoutingRule::OneRank => {
                if rank < first_rank.max(k) {
                    1.0
                } else {
                    0.0
                }
            }
        };
        let mut order: Vec<usize> = (0..experts).collect();
        match self {
            RoutingRule::OneRank | RoutingRule::Counted(_) => {}
            RoutingRule::Hot(_) => order.shuffle(&mut SmallRng::seed_from_u64(ORDER_SEED)),
            _ => order.shuffle(random),
        }
        // The k largest of ln(weight) + Gumbel noise are k draws without replacement.
        let logs: Vec<f64> = (0..experts).map(|rank| weight(rank).ln()).collect();
        let mut keys: Vec<(f64, usize)> = Vec::with_capacity(experts);
        let mut ids = Vec::with_capacity(tokens * k);
        for token in 0..tokens {
            if *self == RoutingRule::Even {
                ids.extend((token * k..token * k + k).map(|at| order[at % experts] as i32));
                continue;
            }
            keys.clear();
            keys.extend(logs.iter().zip(&order).map(|(log, &expert)| {
                let uniform: f64 = random.random_range(f64::MIN_POSITIVE..1.0);
                (log - (-uniform.ln()).ln(), expert)
            }));
            if k < experts {
                keys.select_nth_unstable_by(k, |a, b| b.0.total_cmp(&a.0));
            }
            ids.extend(keys[..k].iter().map(|&(_, expert)| expert as i32));
        }
        Some(evenly_weighted(&ids, k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: LayerId = LayerId(3);

    fn draws(seed: u64) -> Draws {
        Draws::new(SmallRng::seed_from_u64(seed))
    }

    fn counts(routing: &RoutingRule) -> Vec<usize> {
        let mut random = draws(7);
        let mut counts = vec![0; 16];
        for _ in 0..50 {
            let drawn = routing.draw(LAYER, 40, 16, 5, 3, &mut random).expect("not the gate's");
            assert_eq!(drawn.weights.len(), 40 * 3 * 4);
            let ids = rows::decode_i32(&drawn.ids);
            for row in ids.chunks_exact(3) {
                assert!(row[0] != row[1] && row[1] != row[2] && row[0] != row[2], "{row:?}");
            }
            ids.iter().for_each(|&id| counts[id as usize] += 1);
        }
        counts
    }

    #[test]
    fn uniform_uses_all_experts_and_one_rank_those_of_rank_0() {
        assert!(counts(&RoutingRule::Uniform).iter().all(|n| (250..500).contains(n)));
        let one = counts(&RoutingRule::OneRank);
        assert!(one[..5].iter().all(|&n| n > 1000) && one[5..].iter().all(|&n| n == 0), "{one:?}");
    }

    #[test]
    fn zipf_is_skewed_within_a_step() {
        let mut random = draws(3);
        let drawn = RoutingRule::Zipf(2.0).draw(LAYER, 200, 64, 16, 1, &mut random).expect("not the gate's");
        let mut counts = [0; 64];
        rows::decode_i32(&drawn.ids).iter().for_each(|&id| counts[id as usize] += 1);
        counts.sort_unstable();
        assert!(counts[63] > 80 && counts[62] < counts[63] / 2, "{counts:?}");
    }

    #[test]
    fn even_rows_are_even_and_hot_experts_stay() {
        let (even, hot) = (counts(&RoutingRule::Even), counts(&RoutingRule::Hot(1.5)));
        assert!(even.iter().all(|n| even[0].abs_diff(*n) <= 50), "{even:?}");
        // 50 steps: with another order in each, no expert would be in nearly every row.
        assert!(hot.iter().any(|&n| n > 1200), "{hot:?}");
    }

    #[test]
    fn sequences_use_their_experts_again() {
        let mut random = draws(5);
        let mut last: Option<Vec<i32>> = None;
        let mut again = 0;
        for _ in 0..400 {
            let drawn = RoutingRule::Reuse.draw(LAYER, 2, 256, 64, 8, &mut random).expect("not the gate's");
            let ids = rows::decode_i32(&drawn.ids);
            assert_eq!((ids.len(), drawn.weights.len()), (16, 64));
            if let Some(last) = last {
                again += (0..16).filter(|&at| last[at / 8 * 8..at / 8 * 8 + 8].contains(&ids[at])).count();
            }
            last = Some(ids);
        }
        // Without reuse 3 % of the experts would be among the eight of the row before.
        assert!(again > 399 * 16 / 5, "{again}");
    }

    #[test]
    fn counted_rows_are_drawn_again() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut rows = vec![1; 16];
        rows[9] = 40;
        let zeros = vec![0_u64; 16];
        let text = serde_json::json!({"layers": [{"layer": LAYER, "ranks": [zeros, rows]}]}).to_string();
        std::fs::write(file.path(), text).expect("written");
        let routing: RoutingRule = format!("rows:{}", file.path().display()).parse().expect("rows");
        let counts = counts(&routing);
        // 2000 rows choose three experts each: the ninth has weight 40 of 55.
        assert!(counts[9] > 1700 && counts.iter().all(|&n| n > 100), "{counts:?}");
        let error = "rows:/nowhere".parse::<RoutingRule>().expect_err("no file");
        assert!(error.contains("/nowhere"), "{error}");
    }

    #[test]
    fn the_gate_draws_nothing_and_invalid_values_are_refused() {
        assert!(RoutingRule::Gate.draw(LAYER, 1, 4, 2, 2, &mut draws(1)).is_none());
        assert_eq!("zipf:1.5".parse(), Ok(RoutingRule::Zipf(1.5)));
        assert_eq!("hot:0".parse(), Ok(RoutingRule::Hot(0.0)));
        assert!("zipf:-1".parse::<RoutingRule>().is_err());
        assert!("zip".parse::<RoutingRule>().is_err());
    }
}
