//! Random content without cost per request: pools are filled once and sliced at random offsets without copying.
//!
//! Two requests carry the same rows only if they draw the same offset, with a probability of one in millions.

use bytes::Bytes;
use rand::{Rng, RngExt as _};
use rand_distr::{Distribution as _, Exp1, StandardNormal};

use expertd_types::reuse::ReuseSequence;
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

/// Routing of rows: `k` distinct experts per row.
#[derive(Clone, Debug)]
pub struct RoutingPool {
    k: usize,
    ids: Bytes,
    weights: Bytes,
    /// Whether rows of the pool are tokens of one sequence, in order.
    is_sequence: bool,
}

impl RoutingPool {
    /// Creates a pool for one layer, whose rows are drawn without replacement with Zipf probabilities. The order of the experts'
    /// popularity is a random permutation for each layer, so that the load of one layer does not predict that of the next.
    pub fn zipf(experts: u32, k: u32, exponent: f64, largest: usize, rng: &mut impl Rng) -> RoutingPool {
        let (experts, k) = (experts as usize, k as usize);
        let popularity = (1..=experts).map(|rank| (rank as f64).powf(-exponent));
        let mut probability: Vec<(f64, i32)> = popularity.zip(0..).collect();
        let mut id: Vec<i32> = (0..experts as i32).collect();
        rand::seq::SliceRandom::shuffle(id.as_mut_slice(), rng);
        for (entry, id) in probability.iter_mut().zip(id) {
            entry.1 = id;
        }
        let mut race: Vec<(f64, i32)> = Vec::with_capacity(experts);
        let rows = ROUTING_OFFSETS + largest;
        let mut pool = RoutingPool::fill(k, rows, rng, |ids, rng| {
            // The first k arrivals of independent exponential clocks are a sample without replacement (Efraimidis and
            // Spirakis, 2006).
            race.clear();
            race.extend(probability.iter().map(|&(rate, id)| {
                let waited: f64 = Exp1.sample(rng);
                (waited / rate, id)
            }));
            race.select_nth_unstable_by(k - 1, |a, b| a.0.total_cmp(&b.0));
            ids.extend(race[..k].iter().map(|entry| entry.1));
        });
        pool.is_sequence = false;
        pool
    }

    /// Creates a pool for one layer of a sequence that tends to use experts again that it has used recently.
    pub fn reuse(experts: u32, k: u32, rng: &mut impl Rng) -> RoutingPool {
        let mut sequence = ReuseSequence::new(experts as usize, || rng.random());
        RoutingPool::fill(k as usize, ROUTING_OFFSETS, rng, |ids, rng| {
            ids.extend(sequence.next_token(k as usize, || rng.random()).iter().map(|&id| id as i32));
        })
    }

    /// Rows with random weights; `row` appends the ids of one.
    fn fill<R: Rng>(
        k: usize,
        rows: usize,
        rng: &mut R,
        mut row: impl FnMut(&mut Vec<i32>, &mut R),
    ) -> RoutingPool {
        let (mut ids, mut weights) = (Vec::with_capacity(rows * k), Vec::with_capacity(rows * k * 4));
        for _ in 0..rows {
            row(&mut ids, rng);
            let raw: Vec<f32> = (0..k).map(|_| rng.random_range(0.1_f32..1.0)).collect();
            let sum: f32 = raw.iter().sum();
            weights.extend(raw.iter().flat_map(|weight| (weight / sum).to_le_bytes()));
        }
        RoutingPool { k, ids: rows::encode_i32(&ids), weights: weights.into(), is_sequence: true }
    }

    /// Draws the ids and weights of `rows` rows. `sequences` are the caller's places in this pool: if it is a sequence, each row of a
    /// request continues one that began at a random place.
    pub fn draw(&self, rows: usize, sequences: &mut Vec<usize>, rng: &mut impl Rng) -> (Bytes, Bytes) {
        let size = self.k * 4;
        if !self.is_sequence {
            let mut slice = |from: &Bytes| {
                let first = rng.random_range(0..ROUTING_OFFSETS) * size;
                from.slice(first..first + rows * size)
            };
            return (slice(&self.ids), slice(&self.weights));
        }
        while sequences.len() < rows {
            sequences.push(rng.random_range(0..ROUTING_OFFSETS));
        }
        let (mut ids, mut weights) = (Vec::with_capacity(rows * size), Vec::with_capacity(rows * size));
        for place in &mut sequences[..rows] {
            let row = *place * size..(*place + 1) * size;
            ids.extend_from_slice(&self.ids[row.clone()]);
            weights.extend_from_slice(&self.weights[row]);
            *place = (*place + 1) % ROUTING_OFFSETS;
        }
        (ids.into(), weights.into())
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
            let pool = RoutingPool::zipf(16, 3, exponent, 64, &mut rng);
            let mut counts = [0_u32; 16];
            for _ in 0..400 {
                let (drawn, weights) = pool.draw(64, &mut Vec::new(), &mut rng);
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
    #[test]
    fn each_row_of_a_request_continues_a_sequence() {
        let mut rng = SmallRng::seed_from_u64(3);
        let pool = RoutingPool::reuse(64, 4, &mut rng);
        let mut sequences = Vec::new();
        let (first, _) = pool.draw(3, &mut sequences, &mut rng);
        let places = sequences.clone();
        let (second, weights) = pool.draw(5, &mut sequences, &mut rng);
        assert_eq!((first.len(), second.len(), weights.len()), (48, 80, 80));
        let row = |place: usize| &pool.ids[place % ROUTING_OFFSETS * 16..][..16];
        for (at, &place) in places.iter().enumerate() {
            assert_eq!(
                (row(place + ROUTING_OFFSETS - 1), row(place)),
                (&first[at * 16..][..16], &second[at * 16..][..16])
            );
        }
    }
}
