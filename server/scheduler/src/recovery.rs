//! Decides when the next generation may form and when to give up, and estimates when it will serve.

use std::time::Duration;

use crate::Time;

/// The shortest time in which an overdue generation is expected.
const MIN_WAIT: Duration = Duration::from_millis(20);

/// Rules for forming generations again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryPolicy {
    /// A generation is short-lived if it serves for less than this time or never serves.
    pub short_life: Duration,
    /// Pause before the next generation after the second short-lived one in a row; it doubles with each further one.
    /// After the first there is no pause.
    pub first_backoff: Duration,
    /// The longest pause.
    pub max_backoff: Duration,
    /// Number of consecutive generations that end before they serve after which the service gives up.
    pub max_unready: u32,
    /// Number of consecutive generations that end before they complete a step after which the service gives up. Generations that
    /// a poisoned request ended do not count.
    pub max_fruitless: u32,
    /// Number of poisoned requests of one layer, without a complete step of that layer in between, after which one row of zeros is
    /// tried. The service gives up if two such trials end their generations.
    pub max_poisoned_per_layer: u32,
    /// Expected time from the start of a generation's processes until it serves, before any such time was measured.
    pub first_estimate: Duration,
}

impl Default for RecoveryPolicy {
    fn default() -> Self {
        RecoveryPolicy {
            short_life: Duration::from_secs(60),
            first_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            max_unready: 5,
            max_fruitless: 10,
            max_poisoned_per_layer: 5,
            first_estimate: Duration::from_secs(1),
        }
    }
}

/// The life of one generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    /// Time at which it began to serve.
    pub(crate) ready: Option<Time>,
    /// Whether it completed a step.
    pub(crate) completed_a_step: bool,
}

/// Why no further generation is formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GiveUp {
    Unready(u32),
    Fruitless(u32),
}

#[derive(Clone, Debug)]
pub(crate) struct Recovery {
    policy: RecoveryPolicy,
    unready: u32,
    fruitless: u32,
    short_lived: u32,
    next_attempt: Time,
    /// Time from the start of processes until ready.
    estimate: Duration,
    /// Number of generations that became ready.
    measured: u64,
}

impl Recovery {
    pub(crate) const fn new(policy: RecoveryPolicy) -> Self {
        let estimate = policy.first_estimate;
        Recovery {
            policy,
            unready: 0,
            fruitless: 0,
            short_lived: 0,
            next_attempt: Time(0),
            estimate,
            measured: 0,
        }
    }

    pub(crate) const fn policy(&self) -> &RecoveryPolicy {
        &self.policy
    }

    /// Time at which the next generation may form.
    pub(crate) const fn next_attempt(&self) -> Time {
        self.next_attempt
    }

    /// Number of further generations that may end before they serve.
    pub(crate) const fn tries_left(&self) -> u32 {
        self.policy.max_unready.saturating_sub(self.unready)
    }

    /// Notes that a generation serves whose processes started at `started`.
    pub(crate) fn ready(&mut self, started: Time, now: Time) {
        let sample = now.since(started);
        self.estimate = if self.measured == 0 { sample } else { (self.estimate * 3 + sample) / 4 };
        self.measured += 1;
        self.unready = 0;
    }

    /// Notes a complete step.
    pub(crate) const fn step_done(&mut self) {
        self.fruitless = 0;
    }

    /// Notes that one request explains the last ends of generations.
    pub(crate) const fn explained(&mut self) {
        self.fruitless = 0;
    }

    /// A generation has ended because the next one is to serve other weights: that is no fault.
    pub(crate) const fn replaced(&mut self, now: Time) {
        self.next_attempt = now;
    }

    /// Notes the end of a generation.
    pub(crate) fn ended(&mut self, now: Time, life: Life) -> Result<(), GiveUp> {
        let lived = life.ready.map_or(Duration::ZERO, |ready| now.since(ready));
        if life.ready.is_none() {
            self.unready += 1;
        }
        if lived >= self.policy.short_life {
            (self.short_lived, self.fruitless) = (0, 0);
            self.next_attempt = now;
            return Ok(());
        }
        self.short_lived += 1;
        if !life.completed_a_step {
            self.fruitless += 1;
        }
        self.next_attempt = now + self.backoff();
        if self.unready >= self.policy.max_unready {
            return Err(GiveUp::Unready(self.unready));
        }
        if self.fruitless >= self.policy.max_fruitless {
            return Err(GiveUp::Fruitless(self.fruitless));
        }
        Ok(())
    }

    fn backoff(&self) -> Duration {
        match self.short_lived {
            0 | 1 => Duration::ZERO,
            ends => {
                let doubled = self.policy.first_backoff.saturating_mul(1 << (ends - 2).min(20));
                doubled.min(self.policy.max_backoff)
            }
        }
    }

    /// Time at which the generation that has been forming since `forming`, or else the next one, is expected to serve.
    pub(crate) fn expected_ready(&self, forming: Option<Time>, now: Time) -> Time {
        let ready = forming.unwrap_or(self.next_attempt.max(now)) + self.estimate;
        // An overdue generation is expected soon; the expected time is never in the past.
        if ready > now { ready } else { now + (self.estimate / 4).max(MIN_WAIT) }
    }
}

/// Lengthens `wait` by up to a half, so that callers that were refused at the same time do not retry at the same time. `state` is the
/// state of the random numbers.
pub fn jittered(wait: Duration, state: &mut u64) -> Duration {
    // SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *state;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    let fraction = (bits >> 40) as f64 / (1u64 << 24) as f64;
    wait.mul_f64(1.0 + fraction / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_lengthens_by_up_to_a_half() {
        let wait = Duration::from_millis(100);
        let mut state = 7;
        let waits: Vec<Duration> = (0..200).map(|_| jittered(wait, &mut state)).collect();
        assert!(waits.iter().all(|w| *w >= wait && *w < wait * 3 / 2));
        assert!(waits.iter().any(|w| *w < wait * 11 / 10) && waits.iter().any(|w| *w > wait * 14 / 10));
    }

    #[test]
    fn pauses_grow_with_short_lives_that_served_and_end_with_a_long_one() {
        let mut recovery = Recovery::new(RecoveryPolicy::default());
        let mut now = Time(0);
        let mut live = |recovery: &mut Recovery, lived: Duration| {
            let life = Life { ready: Some(now), completed_a_step: true };
            now = now + lived;
            recovery.ended(now, life).expect("steps were complete");
            let pause = recovery.next_attempt().since(now);
            now = recovery.next_attempt();
            pause.as_millis()
        };
        let second = Duration::from_secs(1);
        let pauses: Vec<u128> = (0..9).map(|_| live(&mut recovery, second)).collect();
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(live(&mut recovery, second * 60), 0);
        assert_eq!(live(&mut recovery, second), 0);
        assert_eq!(live(&mut recovery, second), 100);
    }
}
