//! Measures the parts of a rank's set-up.

use std::fmt;
use std::time::{Duration, Instant};

/// Measures consecutive parts of a rank's set-up, or of a loader's work.
pub struct SetupClock {
    last: Instant,
    parts: Vec<(&'static str, Duration)>,
}

impl SetupClock {
    /// Starts a clock, whose first part begins now.
    #[must_use]
    pub fn start() -> Self {
        SetupClock { last: Instant::now(), parts: Vec::new() }
    }

    /// Ends the part called `name`, which began at the previous call.
    pub fn end(&mut self, name: &'static str) {
        let now = Instant::now();
        self.parts.push((name, now - self.last));
        self.last = now;
    }
}

impl fmt::Display for SetupClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, time)) in self.parts.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{name} {:.1} ms", time.as_secs_f64() * 1e3)?;
        }
        Ok(())
    }
}
