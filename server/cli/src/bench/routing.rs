//! Random routing that the benchmark uses instead of the model's gate.

use std::str::FromStr;

use rand::RngExt as _;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;

use expertd_router::backend::GivenRouting;
use expertd_types::rows;

/// Value of `--routing`: how the experts of a step are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RoutingArg {
    /// By the layer's gate.
    Gate,
    /// At random, all experts with equal probability.
    Uniform,
    /// At random; the r-th most popular expert has weight `r^-exponent`. The order of popularity changes with every step.
    Zipf(f64),
    /// At random among the experts of rank 0 (and further ones if it has fewer than k), with equal probability.
    OneRank,
}

impl FromStr for RoutingArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "gate" => Ok(RoutingArg::Gate),
            None if text == "uniform" => Ok(RoutingArg::Uniform),
            None if text == "one-rank" => Ok(RoutingArg::OneRank),
            Some(("zipf", exponent)) => match exponent.parse::<f64>() {
                Ok(exponent) if exponent.is_finite() && exponent >= 0.0 => Ok(RoutingArg::Zipf(exponent)),
                _ => Err(format!(
                    "`{exponent}` is not an exponent: zipf:S takes a number of at least 0, such as zipf:1.0"
                )),
            },
            _ => Err(format!("expected gate, uniform, zipf:S or one-rank, found `{text}`")),
        }
    }
}

impl RoutingArg {
    /// Draws the routing of `tokens` rows over `experts` experts, of which rank 0 owns the first `first_rank`. All weights
    /// are equal. Returns `None` for the gate.
    pub(super) fn draw(
        self,
        tokens: usize,
        experts: usize,
        first_rank: usize,
        k: usize,
        random: &mut SmallRng,
    ) -> Option<GivenRouting> {
        let weight = |rank: usize| match self {
            RoutingArg::Gate | RoutingArg::Uniform => 1.0,
            RoutingArg::Zipf(exponent) => (rank as f64 + 1.0).powf(-exponent),
            RoutingArg::OneRank => {
                if rank < first_rank.max(k) {
                    1.0
                } else {
                    0.0
                }
            }
        };
        if self == RoutingArg::Gate {
            return None;
        }
        let mut order: Vec<usize> = (0..experts).collect();
        if self != RoutingArg::OneRank {
            order.shuffle(random);
        }
        // The k largest of ln(weight) + Gumbel noise are k draws without replacement.
        let logs: Vec<f64> = (0..experts).map(|rank| weight(rank).ln()).collect();
        let mut keys: Vec<(f64, usize)> = Vec::with_capacity(experts);
        let mut ids = Vec::with_capacity(tokens * k);
        for _ in 0..tokens {
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
        let share = (1.0 / k as f32).to_le_bytes();
        Some(GivenRouting {
            ids: rows::encode_i32(&ids),
            weights: share.iter().copied().cycle().take(tokens * k * 4).collect(),
            k,
            as_given: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    fn counts(routing: RoutingArg) -> Vec<usize> {
        let mut random = SmallRng::seed_from_u64(7);
        let mut counts = vec![0; 16];
        for _ in 0..50 {
            let drawn = routing.draw(40, 16, 5, 3, &mut random).expect("not the gate's");
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
        assert!(counts(RoutingArg::Uniform).iter().all(|n| (250..500).contains(n)));
        let one = counts(RoutingArg::OneRank);
        assert!(one[..5].iter().all(|&n| n > 1000) && one[5..].iter().all(|&n| n == 0), "{one:?}");
    }

    #[test]
    fn zipf_is_skewed_within_a_step() {
        let mut random = SmallRng::seed_from_u64(3);
        let drawn = RoutingArg::Zipf(2.0).draw(200, 64, 16, 1, &mut random).expect("not the gate's");
        let mut counts = [0; 64];
        rows::decode_i32(&drawn.ids).iter().for_each(|&id| counts[id as usize] += 1);
        counts.sort_unstable();
        assert!(counts[63] > 80 && counts[62] < counts[63] / 2, "{counts:?}");
    }

    #[test]
    fn the_gate_draws_nothing_and_invalid_values_are_refused() {
        assert!(RoutingArg::Gate.draw(1, 4, 2, 2, &mut SmallRng::seed_from_u64(1)).is_none());
        assert_eq!("zipf:1.5".parse(), Ok(RoutingArg::Zipf(1.5)));
        assert!("zipf:-1".parse::<RoutingArg>().is_err());
        assert!("zip".parse::<RoutingArg>().is_err());
    }
}
