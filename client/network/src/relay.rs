//! What both relays share: an endpoint, the calls that have no completion yet, and how long a thread waits for what comes next.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_shm::region::SharedSlice;

use crate::endpoint::Endpoint;
use crate::library::NetworkError;
use crate::wire::{ALIVE_MESSAGE, COMING_MESSAGE, Place, Places, Record, are_missing, decode, encode, store};

/// Shortest pause between two polls of the network. A transport has no descriptor to sleep on.
const SHORT_PAUSE: Duration = Duration::from_micros(20);
/// Longest pause within a second of an event: a transport moves the bytes of large calls only while it is polled.
pub const LONG_PAUSE: Duration = Duration::from_micros(100);
/// A pause is this part of the time since the last event, so that a call takes at most so much longer for it.
const PART: u32 = 8;
const RECENT: Duration = Duration::from_secs(1);
/// How often a client without calls asks for a sign of life. It notices a broken connection before its next call, and keeps the state that
/// firewalls have of the connection.
const IDLE_ASK: Duration = Duration::from_secs(10);
/// The pause after that.
const RARE_PAUSE: Duration = Duration::from_millis(1);

/// How long a thread polls without a pause while many bytes are under way, in either direction.
const MOVING: Duration = Duration::from_millis(10);

/// An endpoint, with the calls in flight.
#[derive(Debug)]
pub struct Relay {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// How the places of calls are found.
    pub places: Places,
    /// Requests in flight, by their numbers.
    pub calls: HashMap<u64, RequestRecord>,
    /// Whether the peer is writing many bytes.
    pub is_receiving: bool,
    message: Vec<u8>,
}

impl Relay {
    /// A relay for rows of `hidden` elements.
    #[must_use]
    pub fn new(endpoint: Endpoint, hidden: u32) -> Self {
        let places = Places { hidden: hidden as usize, rows_bytes: endpoint.rows().len() };
        Relay { endpoint, places, calls: HashMap::new(), is_receiving: false, message: Vec::new() }
    }

    /// Sends a record with the bytes of its places.
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn send<R: Record>(&mut self, record: &R, places: &[Place]) -> Result<(), NetworkError> {
        let apart = encode(record, self.endpoint.rows(), places, &mut self.message);
        if !apart.is_empty() {
            self.endpoint.send(&[], bytemuck::bytes_of(&COMING_MESSAGE))?;
        }
        self.endpoint.send(apart, &self.message)
    }

    /// Whether many bytes are under way.
    pub fn is_moving(&self) -> bool {
        self.is_receiving || self.endpoint.is_sending()
    }

    /// Sends a message that asks nothing; fails as [`Endpoint::send`].
    ///
    /// # Errors
    /// If the peer is gone.
    pub fn send_alive(&mut self) -> Result<(), NetworkError> {
        self.endpoint.send(&[], bytemuck::bytes_of(&ALIVE_MESSAGE))
    }
}

/// Whether a message says that many bytes are being written.
pub fn is_coming(message: &[u8]) -> bool {
    message == bytemuck::bytes_of(&COMING_MESSAGE)
}

/// Takes a client's message: stores the bytes of a request, and notes the call. `most` calls may be in flight. `None` if it asks nothing.
///
/// # Errors
/// If it is anything else, or a call too many.
pub fn accept_request(
    message: &[u8],
    rows: &SharedSlice<u8>,
    places: &Places,
    calls: &mut HashMap<u64, RequestRecord>,
    most: u32,
) -> Result<Option<RequestRecord>, NetworkError> {
    if message == bytemuck::bytes_of(&ALIVE_MESSAGE) {
        return Ok(None);
    }
    let (request, bytes) = decode::<RequestRecord>(message)?;
    if calls.len() >= most as usize || calls.contains_key(&request.call) {
        let text = format!("call {} with {} calls in flight, or its number twice", request.call, calls.len());
        return Err(NetworkError::Protocol(text));
    }
    let own = places.of_request(&request).filter(|_| places.of_answer(&request).is_some());
    let own = own.ok_or_else(|| {
        NetworkError::Protocol(format!("call {} with places outside its rows", request.call))
    })?;
    store(rows, &own, bytes)?;
    calls.insert(request.call, request);
    Ok(Some(request))
}

/// Takes a message that must be a completion: stores its bytes at the places of its call. `None` if no call waits for it, which is the
/// service's mistake and answers nothing.
///
/// # Errors
/// If it is anything else.
pub fn accept_completion(
    message: &[u8],
    rows: &SharedSlice<u8>,
    places: &Places,
    calls: &mut HashMap<u64, RequestRecord>,
) -> Result<Option<CompletionRecord>, NetworkError> {
    let (completion, bytes) = decode::<CompletionRecord>(message)?;
    let Some(request) = calls.remove(&completion.call) else { return Ok(None) };
    let own = if completion.code == 0 { places.of_answer(&request) } else { None };
    let own = own.unwrap_or_default();
    if are_missing(&own, bytes) {
        return Err(NetworkError::Protocol(format!("call {} was answered without its output", request.call)));
    }
    store(rows, &own, bytes)?;
    Ok(Some(completion))
}

/// How long a relay's thread waits.
#[derive(Debug)]
pub struct Waiting {
    spin: Spin,
    last: Instant,
    asked: Instant,
}

/// How long a relay's thread spins after an event.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    /// While calls are in flight: the cores may be busy with them.
    pub computing: Duration,
    /// While none is, and the next one may come soon.
    pub between: Duration,
}

impl Waiting {
    /// A thread, the calling one.
    #[must_use]
    pub fn new(spin: Spin) -> Self {
        // Sleeps of 20 µs would last four times as long with the default slack of timers. Without the permission they do.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
        let now = Instant::now();
        Waiting { spin, last: now, asked: now }
    }

    /// Notes an event.
    pub fn restart(&mut self) {
        self.last = Instant::now();
    }

    /// Whether to ask for a sign of life: while there is no event once a second, or, if no call is in flight, every ten seconds.
    pub fn asks(&mut self, is_expecting: bool) -> bool {
        let period = if is_expecting { RECENT } else { IDLE_ASK };
        let asks = self.last.elapsed() >= period && self.asked.elapsed() >= period;
        if asks {
            self.asked = Instant::now();
        }
        asks
    }

    /// How long to sleep before the next poll; `None` to poll at once.
    #[must_use]
    pub fn pause(&self, is_moving: bool, is_computing: bool) -> Option<Duration> {
        let quiet = self.last.elapsed();
        if quiet < if is_computing { self.spin.computing } else { self.spin.between } {
            std::hint::spin_loop();
            return None;
        }
        // The transport moves bytes only while it is polled. A peer that does not read costs no core.
        if is_moving && quiet < MOVING {
            std::thread::yield_now();
            return None;
        }
        Some(if quiet >= RECENT { RARE_PAUSE } else { (quiet / PART).clamp(SHORT_PAUSE, LONG_PAUSE) })
    }
}
