//! Routing of a sequence that uses recently used experts again, for tests and benchmarks of tiers.
//!
//! llama.cpp's discussion 27861 reports such routing for a model with 256 experts: no expert is popular for long, yet a cache of the
//! 64 experts that were used last has 67 % of the next token's experts, and one of 128 has 81 %. [`ReuseSequence`] draws experts by
//! the order of their last use: the share of draws that fall on the d experts used last is (d / experts)^[`EXPONENT`], less what
//! is drawn again because a token's experts differ.

/// Exponent of the distribution over the order of last use.
pub const EXPONENT: f64 = 0.205;
/// After so many draws of a place that is taken, the next free place is used, so that a draw of nearly all experts ends.
const TRIES: usize = 64;

/// The experts of one sequence in one layer.
#[derive(Clone, Debug)]
pub struct ReuseSequence {
    /// The expert used last comes first.
    order: Vec<u32>,
    /// Places in `order` that are drawn for a token.
    places: Vec<usize>,
}

impl ReuseSequence {
    /// A sequence over `experts` experts, at first in a random order. `uniform` draws numbers of at least 0 and below 1.
    pub fn new(experts: usize, mut uniform: impl FnMut() -> f64) -> ReuseSequence {
        let mut order: Vec<u32> = (0..experts as u32).collect();
        for last in (1..experts).rev() {
            order.swap(last, place(last + 1, uniform()));
        }
        ReuseSequence { order, places: Vec::new() }
    }

    /// Draws the next token's experts: `k` different ones, or all if there are fewer.
    pub fn next_token(&mut self, k: usize, mut uniform: impl FnMut() -> f64) -> &[u32] {
        let experts = self.order.len();
        let k = k.min(experts);
        self.places.clear();
        while self.places.len() < k {
            let mut draw = || place(experts, uniform().powf(1.0 / EXPONENT));
            let mut drawn = draw();
            for _ in 0..TRIES {
                if !self.places.contains(&drawn) {
                    break;
                }
                drawn = draw();
            }
            while self.places.contains(&drawn) {
                drawn = (drawn + 1) % experts;
            }
            self.places.push(drawn);
        }
        self.places.sort_unstable();
        for (first, &place) in self.places.iter().enumerate() {
            self.order[first..=place].rotate_right(1);
        }
        &self.order[..k]
    }
}

/// The place at the share `at` of `places` places.
fn place(places: usize, at: f64) -> usize {
    ((at * places as f64) as usize).min(places - 1)
}
