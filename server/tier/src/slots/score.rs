//! Expected use of experts in the next step: recent use, with a frequency term.

// Half-lives, share and margin were chosen by the hit rates of `tests/reuse.rs`. Longer half-lives and larger margins cost hits where
// many sequences share a step, and save uploads.
/// Steps after which a use counts half in the recent term.
const RECENT_HALF_LIFE: f32 = 5.0;
/// Steps after which a use counts half in the frequency term.
const FREQUENT_HALF_LIFE: f32 = 128.0;
/// Weight of the frequency term; the recent one has the rest.
const FREQUENT_SHARE: f32 = 0.2;
/// Smaller terms are zero, so that arithmetic meets no subnormal numbers.
const SMALLEST: f32 = 1e-20;

/// Decayed means of use per step, `[experts]`.
#[derive(Debug)]
pub(super) struct Scores {
    recent: Vec<f32>,
    frequent: Vec<f32>,
    keep_recent: f32,
    keep_frequent: f32,
}

impl Scores {
    pub(super) fn new(experts: usize) -> Scores {
        let keep = |half_life: f32| 0.5_f32.powf(1.0 / half_life);
        Scores {
            recent: vec![0.0; experts],
            frequent: vec![0.0; experts],
            keep_recent: keep(RECENT_HALF_LIFE),
            keep_frequent: keep(FREQUENT_HALF_LIFE),
        }
    }

    pub(super) fn of(&self, expert: usize) -> f32 {
        FREQUENT_SHARE * self.frequent[expert] + (1.0 - FREQUENT_SHARE) * self.recent[expert]
    }

    pub(super) fn observe(&mut self, rows: impl Iterator<Item = u32>) {
        for ((recent, frequent), rows) in self.recent.iter_mut().zip(&mut self.frequent).zip(rows) {
            let step = |mean: &mut f32, keep: f32| {
                *mean = *mean * keep + (1.0 - keep) * rows as f32;
                if *mean < SMALLEST {
                    *mean = 0.0;
                }
            };
            step(recent, self.keep_recent);
            step(frequent, self.keep_frequent);
        }
    }

    /// Sets the frequency term to what a service would have found after many steps in which the most used expert had one row.
    pub(super) fn seed(&mut self, rows: impl Iterator<Item = u64> + Clone) {
        let most = rows.clone().max().unwrap_or(0).max(1) as f32;
        self.frequent.iter_mut().zip(rows).for_each(|(frequent, rows)| *frequent = rows as f32 / most);
        self.recent.fill(0.0);
    }
}
