//! Log lines about what peers may cause as often as they like.

use std::time::{Duration, Instant};

/// The least time between two lines.
const PAUSE: Duration = Duration::from_secs(10);

/// Lets an event be logged now and then.
#[derive(Debug, Default)]
pub(crate) struct Rarely {
    logged: Option<Instant>,
    times: u64,
}

impl Rarely {
    /// Notes the event; if it is to be logged now, how often it has happened since it was logged last.
    pub(crate) fn now(&mut self) -> Option<u64> {
        self.times += 1;
        if self.logged.is_some_and(|logged| logged.elapsed() < PAUSE) {
            return None;
        }
        self.logged = Some(Instant::now());
        Some(std::mem::take(&mut self.times))
    }
}
