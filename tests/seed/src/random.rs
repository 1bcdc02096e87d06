//! Random numbers of simulated schedules.

/// SplitMix64, which is small, fast, and equal on all platforms.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number in `low..=high`.
    pub const fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// A number below `end`.
    pub const fn below(&mut self, end: usize) -> usize {
        self.between(0, end as u64 - 1) as usize
    }

    /// Returns true in `percent` of 100 cases.
    pub const fn chance(&mut self, percent: u64) -> bool {
        self.between(1, 100) <= percent
    }

    /// One of `choices`.
    pub fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}
