//! When a failed call is tried again.

use std::time::Duration;

use expertd_proto::retry_delay;
use tonic::{Code, Status};

/// Limits on retries of a failed call. The computation is pure, so a retry is always safe.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// Largest number of attempts, the first one included.
    pub max_attempts: u32,
    /// Upper bound of one pause, whatever delay the service states.
    pub max_pause: Duration,
    /// Time after which no further attempt starts but the second one: a first attempt may have taken longer, for example because this
    /// process was stopped.
    pub max_elapsed: Duration,
}

impl Default for RetryPolicy {
    fn default() -> RetryPolicy {
        RetryPolicy {
            max_attempts: 8,
            max_pause: Duration::from_secs(2),
            max_elapsed: Duration::from_secs(30),
        }
    }
}

impl RetryPolicy {
    /// The pause before attempt `attempt + 1`, or `None` if `status` is final or the limits are reached.
    ///
    /// The pause is the delay in the service's RetryInfo; without RetryInfo it starts at 50 ms and doubles.
    #[must_use]
    pub fn pause(&self, status: &Status, attempt: u32, elapsed: Duration) -> Option<Duration> {
        if !matches!(status.code(), Code::Unavailable | Code::ResourceExhausted)
            || attempt >= self.max_attempts
        {
            return None;
        }
        let pause = retry_delay(status)
            .unwrap_or_else(|| Duration::from_millis(50).saturating_mul(1 << (attempt.max(1) - 1).min(10)))
            .min(self.max_pause);
        (attempt == 1 || elapsed + pause <= self.max_elapsed).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use tonic_types::{ErrorDetails, StatusExt as _};

    use super::*;

    fn busy(delay: Duration) -> Status {
        let details = ErrorDetails::with_retry_info(Some(delay));
        Status::with_error_details(Code::ResourceExhausted, "busy", details)
    }

    #[test]
    fn retry_info_is_used_within_limits() {
        let policy = RetryPolicy { max_attempts: 3, ..RetryPolicy::default() };
        let asked = Duration::from_millis(120);
        assert_eq!(policy.pause(&busy(asked), 1, Duration::ZERO), Some(asked));
        assert_eq!(policy.pause(&busy(Duration::from_secs(60)), 1, Duration::ZERO), Some(policy.max_pause));
        assert_eq!(policy.pause(&busy(asked), 3, Duration::ZERO), None, "attempts are used up");
        assert_eq!(policy.pause(&busy(asked), 2, policy.max_elapsed), None, "time is used up");
        assert_eq!(
            policy.pause(&busy(asked), 1, 2 * policy.max_elapsed),
            Some(asked),
            "the first attempt took long"
        );
    }

    #[test]
    fn only_temporary_errors_are_retried() {
        let policy = RetryPolicy::default();
        assert_eq!(
            policy.pause(&Status::unavailable("gone"), 1, Duration::ZERO),
            Some(Duration::from_millis(50))
        );
        assert_eq!(
            policy.pause(&Status::unavailable("gone"), 3, Duration::ZERO),
            Some(Duration::from_millis(200))
        );
        for status in
            [Status::invalid_argument("no"), Status::deadline_exceeded("late"), Status::internal("bug")]
        {
            assert_eq!(policy.pause(&status, 1, Duration::ZERO), None);
        }
    }
}
