//! A token bucket: a rate in bytes per second, and a burst in bytes.

use std::time::Duration;

/// The burst is at least what the rate gives in this time.
const BURST_MILLISECONDS: u64 = 10;

/// Bytes that may be moved now.
#[derive(Debug)]
pub(super) struct Bucket {
    /// Bytes per second.
    rate: u64,
    /// Most bytes.
    burst: u64,
    /// Bytes × nanoseconds per second, so that nothing is rounded.
    credit: u128,
    /// The latest time of [`fill`](Self::fill).
    filled: Option<Duration>,
}

const SECOND: u128 = Duration::from_secs(1).as_nanos();

impl Bucket {
    /// A full bucket that takes at least `smallest_burst` bytes, unless `rate` is 0: then it is empty for ever.
    pub(super) fn new(rate: u64, smallest_burst: u64) -> Bucket {
        let burst = match rate {
            0 => 0,
            _ => smallest_burst.max(rate / 1000 * BURST_MILLISECONDS),
        };
        Bucket { rate, burst, credit: u128::from(burst) * SECOND, filled: None }
    }

    pub(super) fn burst(&self) -> u64 {
        self.burst
    }

    /// Adds what the time since the last call gives. Time does not go back.
    pub(super) fn fill(&mut self, now: Duration) {
        let elapsed = now.saturating_sub(self.filled.unwrap_or(now));
        let gained = elapsed.as_nanos().saturating_mul(self.rate.into());
        self.credit = self.credit.saturating_add(gained).min(u128::from(self.burst) * SECOND);
        self.filled = self.filled.max(Some(now));
    }

    /// Whether there are `bytes`.
    pub(super) fn has(&self, bytes: u64) -> bool {
        u128::from(bytes) * SECOND <= self.credit
    }

    /// Takes `bytes` if the bucket holds that many.
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        let left = self.credit.checked_sub(u128::from(bytes) * SECOND);
        self.credit = left.unwrap_or(self.credit);
        left.is_some()
    }
}
