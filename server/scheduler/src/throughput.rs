//! The service's recent throughput.

use std::time::Duration;

use crate::Time;

/// Length of a measurement, counting only time with steps under way.
const WINDOW: Duration = Duration::from_millis(100);

/// Measures rows per second over the time in which steps were under way. Time in which steps overlap counts once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Throughput {
    tokens: usize,
    busy: Duration,
    last_end: Option<Time>,
    tokens_per_second: f64,
}

impl Throughput {
    /// Adds a completed step.
    pub(crate) fn add(&mut self, tokens: usize, formed: Time, end: Time) {
        let begin = self.last_end.map_or(formed, |last| last.max(formed));
        self.last_end = Some(end);
        self.tokens += tokens;
        self.busy += end.since(begin);
        if self.busy > WINDOW {
            self.tokens_per_second = self.tokens as f64 / self.busy.as_secs_f64();
            (self.tokens, self.busy) = (0, Duration::ZERO);
        }
    }

    /// The rate of the last complete window; 0 before there is one.
    pub(crate) const fn tokens_per_second(&self) -> f64 {
        self.tokens_per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_steps_overlap_counts_once() {
        let at = |millis: u64| Time(millis * 1_000_000);
        let mut throughput = Throughput::default();
        // Each step is formed when the previous one begins to compute, and computes for 40 ms.
        throughput.add(100, at(0), at(40));
        throughput.add(100, at(0), at(80));
        assert_eq!(throughput.tokens_per_second(), 0.0);
        throughput.add(100, at(40), at(120));
        assert_eq!(throughput.tokens_per_second(), 2500.0);
        // A pause between steps does not count.
        throughput.add(100, at(1000), at(1200));
        assert_eq!(throughput.tokens_per_second(), 500.0);
    }
}
