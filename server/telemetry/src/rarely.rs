//! Rate limit for log lines that peers can cause at will.

use std::time::{Duration, Instant};

/// Shortest time between two lines.
const PAUSE: Duration = Duration::from_secs(10);

/// Limits how often an event is logged.
#[derive(Debug, Default)]
pub struct Rarely {
    logged: Option<Instant>,
    times: u64,
}

impl Rarely {
    /// Counts the event. If it should be logged now, returns its count since it was last logged.
    pub fn now(&mut self) -> Option<u64> {
        self.times += 1;
        if self.logged.is_some_and(|logged| logged.elapsed() < PAUSE) {
            return None;
        }
        self.logged = Some(Instant::now());
        Some(std::mem::take(&mut self.times))
    }
}
