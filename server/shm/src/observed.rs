//! Time limits that a pause of this process does not use up.

use std::time::{Duration, Instant};

/// The most that counts between two looks.
const STEP: Duration = Duration::from_millis(500);

/// Time during which this process has looked at something. Of a pause of the process half a second counts.
#[derive(Clone, Copy, Debug)]
pub struct ObservedTime {
    looked: Instant,
    total: Duration,
}

impl ObservedTime {
    /// Starts at zero.
    #[must_use]
    pub const fn start(now: Instant) -> ObservedTime {
        ObservedTime { looked: now, total: Duration::ZERO }
    }

    /// Looks, and returns the time since the start.
    pub fn look(&mut self, now: Instant) -> Duration {
        self.total += now.saturating_duration_since(self.looked).min(STEP);
        self.looked = now;
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_counts_as_one_step() {
        let begun = Instant::now();
        let mut time = ObservedTime::start(begun);
        let at = |millis| begun + Duration::from_millis(millis);
        assert_eq!(time.look(at(100)), Duration::from_millis(100));
        assert_eq!(time.look(at(60_100)), Duration::from_millis(600));
        assert_eq!(time.look(at(60_150)), Duration::from_millis(650));
    }
}
