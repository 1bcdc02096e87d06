//! Random content without cost per request: pools are filled once and sliced at random offsets without copying.
//!
//! Two requests carry the same rows only if they draw the same offset, with a probability of one in millions.

use bytes::Bytes;
use rand::{Rng, RngExt as _};
use rand_distr::{Distribution as _, Exp1, StandardNormal};

use expertd_types::{DType, rows};

/// Number of offsets at which a slice of rows can begin.
const ROW_OFFSETS: usize = 4 << 20;
/// Number of offsets at which a slice of routing can begin.
const ROUTING_OFFSETS: usize = 4096;

/// Normally distributed elements.
#[derive(Clone, Debug)]
pub struct RowPool {
    elements: Bytes,
    dtype: DType,
}

impl RowPool {
    /// Creates a pool from which up to `largest` elements can be drawn at once.
    pub fn new(dtype: DType, largest: usize, rng: &mut impl Rng) -> RowPool {
        let values: Vec<f32> = StandardNormal.sample_iter(rng).take(ROW_OFFSETS + largest).collect();
        RowPool { elements: rows::encode(&values, dtype), dtype }
    }

    /// Draws `count` elements from a random offset on.
    pub fn draw(&self, count: usize, rng: &mut impl Rng) -> Bytes {
        let first = rng.random_range(0..ROW_OFFSETS) * self.dtype.size();
        self.elements.slice(first..first + count * self.dtype.size())
    }
}

/// Routing of rows: `k` distinct experts per row, drawn without replacement with Zipf probabilities.
#[derive(Clone, Debug)]
pub struct RoutingPool {
    k: usize,
    ids: Bytes,
    weights: Bytes,
}

impl RoutingPool {
    /// Creates a pool for one layer. The order of the experts' popularity is a random permutation for each layer, so
    /// that the load of one layer does not predict that of the next.
    pub fn new(experts: u32, k: u32, exponent: f64, largest: usize, rng: &mut impl Rng) -> RoutingPool {
        let (experts, k) = (experts as usize, k as usize);
        let popularity = (1..=experts).map(|rank| (rank as f64).powf(-exponent));
        let mut probability: Vec<(f64, i32)> = popularity.zip(0..).collect();
        let mut id: Vec<i32> = (0..experts as i32).collect();
        rand::seq::SliceRandom::shuffle(id.as_mut_slice(), rng);
        for (entry, id) in probability.iter_mut().zip(id) {
            entry.1 = id;
        }
        let rows = ROUTING_OFFSETS + largest;
        let (mut ids, mut weights) = (Vec::with_capacity(rows * k * 4), Vec::with_capacity(rows * k * 4));
        let mut race: Vec<(f64, i32)> = Vec::with_capacity(experts);
        for _ in 0..rows {
            // The first k arrivals of independent exponential clocks are a sample without replacement (Efraimidis and
            // Spirakis, 2006).
            race.clear();
            race.extend(probability.iter().map(|&(rate, id)| {
                let waited: f64 = Exp1.sample(rng);
                (waited / rate, id)
            }));
            race.select_nth_unstable_by(k - 1, |a, b| a.0.total_cmp(&b.0));
            let raw: Vec<f32> = (0..k).map(|_| rng.random_range(0.1_f32..1.0)).collect();
            let sum: f32 = raw.iter().sum();
            for (entry, weight) in race[..k].iter().zip(raw) {
                ids.extend_from_slice(&entry.1.to_le_bytes());
                weights.extend_from_slice(&(weight / sum).to_le_bytes());
            }
        }
        RoutingPool { k, ids: ids.into(), weights: weights.into() }
    }

    /// Draws the ids and weights of `rows` rows.
    pub fn draw(&self, rows: usize, rng: &mut impl Rng) -> (Bytes, Bytes) {
        let mut slice = |from: &Bytes| {
            let first = rng.random_range(0..ROUTING_OFFSETS) * self.k * 4;
            from.slice(first..first + rows * self.k * 4)
        };
        (slice(&self.ids), slice(&self.weights))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::SeedableRng as _;
    use rand::rngs::SmallRng;

    use super::*;

    fn ids(bytes: &[u8]) -> Vec<i32> {
        bytes.as_chunks::<4>().0.iter().map(|&word| i32::from_le_bytes(word)).collect()
    }

    #[test]
    fn rows_differ_between_draws_and_are_finite() {
        let mut rng = SmallRng::seed_from_u64(1);
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            let pool = RowPool::new(dtype, 4096, &mut rng);
            let drawn = (0..200).map(|_| pool.draw(256, &mut rng)).collect::<HashSet<_>>();
            assert_eq!(drawn.len(), 200);
            for bytes in drawn {
                let values = rows::decode(&bytes, dtype);
                assert_eq!(values.len(), 256);
                assert!(values.iter().all(|value| value.abs() < 10.0));
            }
        }
    }

    #[test]
    fn routing_is_valid_and_has_the_requested_skew() {
        let mut rng = SmallRng::seed_from_u64(2);
        for (exponent, skewed) in [(0.0, false), (1.0, true)] {
            let pool = RoutingPool::new(16, 3, exponent, 64, &mut rng);
            let mut counts = [0_u32; 16];
            for _ in 0..400 {
                let (drawn, weights) = pool.draw(64, &mut rng);
                let weights = rows::decode(&weights, DType::F32);
                for (row, weights) in ids(&drawn).chunks(3).zip(weights.chunks(3)) {
                    assert_eq!(row.iter().collect::<HashSet<_>>().len(), 3, "{row:?}");
                    assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
                    for &id in row {
                        counts[id as usize] += 1;
                    }
                }
            }
            counts.sort_unstable();
            let ratio = f64::from(counts[15]) / f64::from(counts[0].max(1));
            assert_eq!(ratio > 4.0, skewed, "exponent {exponent}: {counts:?}");
            assert!(skewed || ratio < 1.3, "exponent {exponent}: {counts:?}");
        }
    }
}
