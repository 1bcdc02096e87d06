//! The times at which the load starts, is measured and ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::args::Bounds;

/// The bounds of a load in time and number of requests.
#[derive(Debug)]
pub struct LoadPeriod {
    /// Start of the first request.
    pub start: Instant,
    /// Start of the measurement.
    pub measured: Instant,
    /// Time after which no request begins.
    pub stop: Instant,
    /// Time after which an unanswered request counts as lost.
    pub give_up: Duration,
    limit: u64,
    begun: AtomicU64,
}

impl LoadPeriod {
    /// Starts the load now.
    #[must_use]
    pub fn open(bounds: &Bounds, deadline_ms: Option<u32>) -> LoadPeriod {
        let unbounded = if bounds.requests.is_some() { 600.0 } else { 10.0 };
        let start = Instant::now();
        let measured = start + Duration::from_secs_f64(bounds.warm_up);
        LoadPeriod {
            start,
            measured,
            stop: measured + Duration::from_secs_f64(bounds.duration.unwrap_or(unbounded)),
            give_up: Duration::from_secs_f64(bounds.give_up)
                + Duration::from_millis(deadline_ms.unwrap_or(0).into()),
            limit: bounds.requests.unwrap_or(u64::MAX),
            begun: AtomicU64::new(0),
        }
    }

    /// Whether a request may begin at `when`: `None` if not, otherwise whether it is measured.
    pub fn admit(&self, when: Instant) -> Option<bool> {
        if when >= self.stop {
            return None;
        }
        if when < self.measured {
            return Some(false);
        }
        (self.begun.fetch_add(1, Ordering::Relaxed) < self.limit).then_some(true)
    }

    /// Whether no more requests may begin.
    #[must_use]
    pub fn over(&self) -> bool {
        Instant::now() >= self.stop || self.begun.load(Ordering::Relaxed) >= self.limit
    }

    /// Number of measured requests begun, and their limit.
    #[must_use]
    pub fn counted(&self) -> (u64, Option<u64>) {
        let begun = self.begun.load(Ordering::Relaxed).min(self.limit);
        (begun, (self.limit != u64::MAX).then_some(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(warm_up: f64, duration: Option<f64>, requests: Option<u64>) -> Bounds {
        Bounds { warm_up, duration, requests, give_up: 1.0 }
    }

    #[test]
    fn warm_up_is_not_measured_and_nothing_begins_after_the_end() {
        let period = LoadPeriod::open(&bounds(1.0, Some(2.0), None), None);
        let at = |seconds| period.start + Duration::from_secs_f64(seconds);
        assert_eq!(period.admit(at(0.5)), Some(false));
        assert_eq!(period.admit(at(1.5)), Some(true));
        assert_eq!(period.admit(at(3.1)), None);
    }

    #[test]
    fn only_measured_requests_count() {
        let period = LoadPeriod::open(&bounds(1.0, None, Some(2)), Some(500));
        let at = |seconds| period.start + Duration::from_secs_f64(seconds);
        assert_eq!(period.give_up, Duration::from_millis(1500));
        for _ in 0..5 {
            assert_eq!(period.admit(at(0.1)), Some(false));
        }
        assert_eq!([1.1, 1.2, 1.3].map(|when| period.admit(at(when))), [Some(true), Some(true), None]);
        assert!(period.over());
        assert_eq!(period.counted(), (2, Some(2)));
    }
}
