//! What both relays share: an endpoint, the calls that have no completion yet, and how long a thread waits for what comes next.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use expertd_session::wire::RequestRecord;

use crate::endpoint::Endpoint;
use crate::library::NetworkError;
use crate::wire::{Place, Places, Record, encode};

/// Pauses between two polls of the network, with the time since the last event from which they hold. A transport has no descriptor to
/// sleep on.
const PAUSES: [(Duration, Duration); 3] = [
    (Duration::from_secs(1), Duration::from_millis(1)),
    (Duration::from_millis(10), Duration::from_micros(100)),
    (Duration::ZERO, Duration::from_micros(20)),
];

/// An endpoint, with the calls in flight.
#[derive(Debug)]
pub struct Relay {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// How the places of calls are found.
    pub places: Places,
    /// Requests in flight, by their numbers.
    pub calls: HashMap<u64, RequestRecord>,
    message: Vec<u8>,
}

impl Relay {
    /// A relay for rows of `hidden` elements.
    #[must_use]
    pub fn new(endpoint: Endpoint, hidden: u32) -> Self {
        let places = Places { hidden: hidden as usize, rows_bytes: endpoint.rows().len() };
        Relay { endpoint, places, calls: HashMap::new(), message: Vec::new() }
    }

    /// Sends a record with the bytes of its places.
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn send<R: Record>(&mut self, record: &R, places: &[Place]) -> Result<(), NetworkError> {
        let apart = encode(record, self.endpoint.rows(), places, &mut self.message);
        self.endpoint.send(apart, &self.message)
    }
}

/// How long a relay's thread waits.
#[derive(Debug)]
pub struct Waiting {
    spin: Duration,
    last: Instant,
}

impl Waiting {
    /// A thread, the calling one, that spins for `spin` after each event.
    #[must_use]
    pub fn new(spin: Duration) -> Self {
        // Sleeps of 20 µs would last four times as long with the default slack of timers. Without the permission they do.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
        Waiting { spin, last: Instant::now() }
    }

    /// Notes an event.
    pub fn restart(&mut self) {
        self.last = Instant::now();
    }

    /// How long to sleep before the next poll; `None` to poll at once.
    #[must_use]
    pub fn pause(&self, is_sending: bool) -> Option<Duration> {
        let quiet = self.last.elapsed();
        if quiet < self.spin {
            std::hint::spin_loop();
            return None;
        }
        if is_sending {
            // The transport moves bytes only while it is polled.
            std::thread::yield_now();
            return None;
        }
        PAUSES.iter().find(|(from, _)| quiet >= *from).map(|(_, pause)| *pause)
    }
}
