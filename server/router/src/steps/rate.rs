//! The service's recent throughput.

use std::time::{Duration, Instant};

/// Time in steps after which there is a rate.
const WINDOW: Duration = Duration::from_millis(100);

/// Rows per second of late, over the time in which there were steps: steps overlap, and no moment counts twice.
#[derive(Debug, Default)]
pub(super) struct Rate {
    tokens: usize,
    busy: Duration,
    last_end: Option<Instant>,
}

impl Rate {
    /// Adds a step; the rate, whenever there is enough to tell.
    pub(super) fn add(&mut self, tokens: usize, formed: Instant, end: Instant) -> Option<f64> {
        let alone_since = self.last_end.map_or(formed, |last| last.max(formed));
        self.last_end = Some(end);
        self.tokens += tokens;
        self.busy += end.saturating_duration_since(alone_since);
        if self.busy <= WINDOW {
            return None;
        }
        let rate = self.tokens as f64 / self.busy.as_secs_f64();
        (self.tokens, self.busy) = (0, Duration::ZERO);
        Some(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_steps_overlap_counts_once() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rate = Rate::default();
        // Each is formed when the one before begins to compute, and takes 40 ms of computing.
        assert_eq!(rate.add(100, at(0), at(40)), None);
        assert_eq!(rate.add(100, at(0), at(80)), None);
        assert_eq!(rate.add(100, at(40), at(120)), Some(2500.0));
        // A pause between steps does not count.
        assert_eq!(rate.add(100, at(1000), at(1200)), Some(500.0));
    }
}
