//! Whether steps go on while requests wait for them.

use std::time::{Duration, Instant};

/// Longest time that requests wait without any progress of steps.
const STANDSTILL: Duration = Duration::from_secs(2);

/// The latest event of the step loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepActivity {
    /// When a step began or ended last.
    pub(super) at: Instant,
    /// Whether a step is in flight since then.
    pub(super) in_flight: bool,
}

impl StepActivity {
    /// How long requests that have waited since `waiting_since` have had no step. `None`: a step began or ended recently, or one is in
    /// flight for at most `step_timeout`. Requests may wait `max_wait` for others.
    pub(super) fn standstill(
        self,
        waiting_since: Instant,
        now: Instant,
        step_timeout: Duration,
        max_wait: Duration,
    ) -> Option<Duration> {
        let limit = if self.in_flight { step_timeout.max(STANDSTILL) } else { STANDSTILL + max_wait };
        let age =
            now.saturating_duration_since(if self.in_flight { self.at } else { self.at.max(waiting_since) });
        (age > limit).then_some(age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_waiting_without_steps_is_a_standstill() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let found = |activity: StepActivity, waiting_since, now, max_wait| {
            let max_wait = Duration::from_secs(max_wait);
            activity.standstill(at(waiting_since), at(now), Duration::from_secs(60), max_wait)
        };
        let idle = StepActivity { at: begun, in_flight: false };
        assert_eq!(found(idle, 1000, 1002, 0), None, "idleness does not count");
        assert_eq!(found(idle, 1000, 1003, 0), Some(Duration::from_secs(3)));
        assert_eq!(found(idle, 1000, 1003, 1), None, "the request waits for others");
        let steps = StepActivity { at: at(1002), in_flight: false };
        assert_eq!(found(steps, 1000, 1003, 0), None, "a step has just ended");
        let long = StepActivity { at: at(1000), in_flight: true };
        assert_eq!(found(long, 1000, 1060, 0), None, "a long step is legal");
        assert_eq!(found(long, 1000, 1061, 0), Some(Duration::from_secs(61)));
    }
}
