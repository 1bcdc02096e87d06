//! The state of one connection: the bytes that it holds, its progress, and whether the service ends it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::budget::Budget;
use crate::backend::ClientKey;

/// Length of the HTTP/2 client preface. After it, keep-alive detects dead peers.
const PREFACE_BYTES: u64 = 24;
/// Message bytes that a connection may always leave in the transport.
const UNREAD_BYTES: i64 = 1 << 20;
/// A connection whose calls read no bytes for this many milliseconds makes no progress.
const TAKEN_WITHIN_MS: u64 = 250;

/// Sums over all connections of one peer address, one user of this host or one authenticated client.
#[derive(Debug, Default)]
pub(in crate::api) struct Owner {
    /// Charged bytes.
    pub(in crate::api) held: AtomicUsize,
    /// The part of `held` that is charged to the reserve for small messages.
    pub(in crate::api) small: AtomicUsize,
    /// Authenticated connections of a client; 0 for addresses.
    pub(in crate::api) connections: AtomicUsize,
}

/// Stage of a message between its first byte and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum Stage {
    /// Its bytes are being received.
    Arriving,
    /// It is queued or in a step.
    Working,
    /// Its answer is being sent.
    Leaving,
}

#[derive(Clone, Copy, Debug)]
struct Tracked {
    stage: Stage,
    since: Instant,
    /// Bytes received so far.
    bytes: usize,
}

/// Time limits of a connection; the service ends connections that exceed them.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionTimeouts {
    /// From accept to the HTTP/2 preface, TLS handshake included. If credentials are required: to the first authenticated
    /// call.
    pub silent: Duration,
    /// For the transfer of a message or an answer, in addition to `bytes / min_bytes_per_second`.
    pub stalled: Duration,
    /// Replaces `stalled` while other requests wait for room.
    pub stalled_when_short: Duration,
    /// The lowest transfer rate that counts as progress.
    pub min_bytes_per_second: usize,
    /// Without a message or a new call. The connection is then closed (GOAWAY), and ended `silent` later.
    pub idle: Duration,
    /// Age at which a connection is closed (GOAWAY). Its calls finish.
    pub max_age: Duration,
}

impl Default for ConnectionTimeouts {
    fn default() -> ConnectionTimeouts {
        ConnectionTimeouts {
            silent: Duration::from_secs(10),
            stalled: Duration::from_secs(30),
            stalled_when_short: Duration::from_secs(2),
            min_bytes_per_second: 1 << 20,
            idle: Duration::from_secs(300),
            max_age: Duration::from_secs(3600),
        }
    }
}

impl ConnectionTimeouts {
    fn allows(&self, tracked: &Tracked, short: bool) -> bool {
        let grace = if short { self.stalled_when_short } else { self.stalled };
        let transfer = Duration::from_secs_f64(tracked.bytes as f64 / self.min_bytes_per_second as f64);
        tracked.stage == Stage::Working || tracked.since.elapsed() <= grace + transfer
    }
}

/// Decision about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum Verdict {
    /// The connection stays.
    Keep,
    /// The connection takes no new calls and finishes those in flight. Holds the reason.
    Close(&'static str),
    /// The connection ends at once. Holds the reason.
    End(&'static str),
}

/// State of one connection.
pub(in crate::api) struct Connection {
    pub(in crate::api) key: ClientKey,
    /// Ends the connection at once.
    pub(in crate::api) end: CancellationToken,
    /// Ends the connection once its calls have finished.
    pub(in crate::api) close: CancellationToken,
    /// The peer's address or user; it is charged for calls without an authenticated client.
    pub(in crate::api) peer: Arc<Owner>,
    pub(super) held: AtomicUsize,
    pub(super) waiting: AtomicUsize,
    opened: Instant,
    read_bytes: AtomicU64,
    /// Milliseconds since `opened`, plus one, at which the socket stopped accepting bytes; 0 while it accepts them.
    blocked_at: AtomicU64,
    /// Milliseconds since `opened` of the last call or message.
    active_at: AtomicU64,
    /// Milliseconds since `opened` at which a call last read bytes from the transport.
    taken_at: AtomicU64,
    /// Message bytes that no call has read yet; approximate while several calls are in flight.
    unread: AtomicI64,
    /// Request bodies in flight.
    bodies: AtomicUsize,
    authenticated: AtomicBool,
    misbehaved: AtomicBool,
    next_ticket: AtomicU64,
    tickets: Mutex<HashMap<u64, Tracked>>,
}

impl Connection {
    pub(in crate::api) fn new(key: ClientKey, peer: Arc<Owner>, end: CancellationToken) -> Arc<Connection> {
        Arc::new(Connection {
            key,
            end,
            close: CancellationToken::new(),
            peer,
            held: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            opened: Instant::now(),
            read_bytes: AtomicU64::new(0),
            blocked_at: AtomicU64::new(0),
            active_at: AtomicU64::new(0),
            taken_at: AtomicU64::new(0),
            unread: AtomicI64::new(0),
            bodies: AtomicUsize::new(0),
            authenticated: AtomicBool::new(false),
            misbehaved: AtomicBool::new(false),
            next_ticket: AtomicU64::new(0),
            tickets: Mutex::default(),
        })
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }

    /// Time since the connection was accepted.
    pub(in crate::api) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Notes a call or a message. The connection is then not idle.
    pub(in crate::api) fn note_activity(&self) {
        self.active_at.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Whether no call is in flight.
    pub(in crate::api) fn is_idle(&self) -> bool {
        self.bodies.load(Ordering::Relaxed) == 0 && self.tracked().is_empty()
    }

    /// Notes that a call on this connection had valid credentials. Returns whether it is the first such call.
    pub(in crate::api) fn authenticate(&self) -> bool {
        !self.is_authenticated() && !self.authenticated.swap(true, Ordering::Relaxed)
    }

    /// Whether a call on this connection had valid credentials.
    pub(in crate::api) fn is_authenticated(&self) -> bool {
        self.authenticated.load(Ordering::Relaxed)
    }

    /// Notes that the connection ends because the peer broke the protocol or flooded the service.
    pub(in crate::api) fn misbehave(&self) {
        self.misbehaved.store(true, Ordering::Relaxed);
    }

    /// Whether the connection ends because of the peer's behaviour.
    pub(in crate::api) fn misbehaved(&self) -> bool {
        self.misbehaved.load(Ordering::Relaxed)
    }

    /// Notes bytes from the socket.
    pub(in crate::api) fn note_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Notes whether the socket accepts bytes.
    pub(in crate::api) fn note_write(&self, blocked: bool) {
        let was = self.blocked_at.load(Ordering::Relaxed);
        if blocked && was == 0 {
            self.blocked_at.store(self.now_ms() + 1, Ordering::Relaxed);
        } else if !blocked && was != 0 {
            self.blocked_at.store(0, Ordering::Relaxed);
        }
    }

    /// Notes message bytes that entered the transport. Ends a connection that leaves many of them there while the service is
    /// short of room and its calls read none.
    pub(in crate::api) fn note_data(&self, bytes: usize, budget: &Budget) {
        if self.bodies.load(Ordering::Relaxed) == 0 {
            // No call reads them; the transport discards them.
            self.forget_unread(budget);
            return;
        }
        let bytes = bytes as i64;
        let mine = self.unread.fetch_add(bytes, Ordering::Relaxed) + bytes;
        budget.add_unread(bytes);
        if mine > UNREAD_BYTES && budget.too_much_unread() {
            let taken_ago = self.now_ms().saturating_sub(self.taken_at.load(Ordering::Relaxed));
            if taken_ago > TAKEN_WITHIN_MS {
                tracing::info!(
                    connection = self.key.0,
                    unread_bytes = mine,
                    "ending a connection whose messages are not read"
                );
                self.end.cancel();
            }
        }
    }

    /// Notes bytes that a call read from the transport.
    pub(in crate::api) fn note_taken(&self, bytes: usize, budget: &Budget) {
        self.unread.fetch_sub(bytes as i64, Ordering::Relaxed);
        budget.add_unread(-(bytes as i64));
        self.taken_at.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Notes the start of a request body.
    pub(in crate::api) fn body_begins(&self) {
        self.bodies.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes the end of a request body. The transport discards the bytes that it left unread.
    pub(in crate::api) fn body_ends(&self, budget: &Budget) {
        if self.bodies.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.forget_unread(budget);
        }
    }

    /// Message bytes in the transport.
    pub(in crate::api) fn unread(&self) -> i64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Subtracts this connection's unread bytes from the sum of all connections.
    pub(in crate::api) fn forget_unread(&self, budget: &Budget) {
        let unread = self.unread.swap(0, Ordering::Relaxed);
        if unread != 0 {
            budget.add_unread(-unread);
        }
    }

    /// Decides about the connection. If `must_authenticate` is set, it ends unless a call had valid credentials in time.
    pub(in crate::api) fn verdict(
        &self,
        timeouts: &ConnectionTimeouts,
        short: bool,
        must_authenticate: bool,
    ) -> Verdict {
        let age = self.opened.elapsed();
        if self.read_bytes.load(Ordering::Relaxed) < PREFACE_BYTES && age > timeouts.silent {
            return Verdict::End("silent");
        }
        if must_authenticate && !self.is_authenticated() && age > timeouts.silent {
            return Verdict::End("unauthenticated");
        }
        let blocked = self.blocked_at.load(Ordering::Relaxed);
        if blocked != 0 && age > Duration::from_millis(blocked - 1) + timeouts.stalled {
            return Verdict::End("stalled_write");
        }
        let tracked = self.tracked();
        if let Some(late) = tracked.values().find(|tracked| !timeouts.allows(tracked, short)) {
            return Verdict::End(match late.stage {
                Stage::Leaving => "stalled_answer",
                Stage::Arriving | Stage::Working => "stalled_request",
            });
        }
        let busy = !tracked.is_empty();
        drop(tracked);
        let quiet = age.saturating_sub(Duration::from_millis(self.active_at.load(Ordering::Relaxed)));
        if !busy && quiet > timeouts.idle {
            // Calls without messages, such as a silent stream, do not keep a closed connection open.
            let over = quiet > timeouts.idle + timeouts.silent;
            return if over { Verdict::End("idle") } else { Verdict::Close("idle") };
        }
        // Spread over an eighth of the age, so that connections opened together do not reconnect together.
        let spread = timeouts.max_age / 8 * (self.key.0 % 8) as u32 / 8;
        if age > timeouts.max_age + spread {
            return Verdict::Close("age");
        }
        Verdict::Keep
    }

    /// Starts to track a message and returns its number.
    pub(super) fn track(&self) -> u64 {
        let number = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let tracked = Tracked { stage: Stage::Arriving, since: Instant::now(), bytes: 0 };
        self.tracked().insert(number, tracked);
        self.note_activity();
        number
    }

    /// Notes received bytes of a message.
    pub(super) fn note_arrival(&self, number: u64, bytes: usize) {
        if let Some(tracked) = self.tracked().get_mut(&number) {
            tracked.bytes += bytes;
        }
    }

    /// Notes that a message entered a stage.
    pub(super) fn enter(&self, number: u64, stage: Stage) {
        if let Some(tracked) = self.tracked().get_mut(&number) {
            tracked.stage = stage;
            tracked.since = Instant::now();
        }
    }

    /// Stops tracking a message.
    pub(super) fn forget(&self, number: u64) {
        self.tracked().remove(&number);
        self.note_activity();
    }

    fn tracked(&self) -> MutexGuard<'_, HashMap<u64, Tracked>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_only_answers_pings_is_closed_and_then_ended() {
        let timeouts = ConnectionTimeouts {
            idle: Duration::from_millis(5),
            silent: Duration::from_millis(40),
            ..ConnectionTimeouts::default()
        };
        let connection = Connection::new(ClientKey(0), Arc::default(), CancellationToken::new());
        connection.note_read(1000);
        connection.note_activity();
        assert_eq!(connection.verdict(&timeouts, false, false), Verdict::Keep);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(connection.verdict(&timeouts, false, false), Verdict::Close("idle"));
        assert_eq!(connection.verdict(&timeouts, false, true), Verdict::Close("idle"));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(connection.verdict(&timeouts, false, false), Verdict::End("idle"));
        assert_eq!(connection.verdict(&timeouts, false, true), Verdict::End("unauthenticated"));
        connection.authenticate();
        connection.note_activity();
        assert_eq!(connection.verdict(&timeouts, false, true), Verdict::Keep);
    }

    #[test]
    fn an_old_connection_is_closed() {
        let timeouts =
            ConnectionTimeouts { max_age: Duration::from_millis(5), ..ConnectionTimeouts::default() };
        let connection = Connection::new(ClientKey(8), Arc::default(), CancellationToken::new());
        connection.note_read(1000);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(connection.verdict(&timeouts, false, false), Verdict::Close("age"));
    }

    #[test]
    fn unread_bytes_are_forgotten_with_the_last_body() {
        let budget = Budget::new(1 << 20, 1 << 10);
        let connection = Connection::new(ClientKey(0), Arc::default(), CancellationToken::new());
        connection.note_data(100, &budget);
        assert_eq!(connection.unread(), 0, "no call takes them");
        connection.body_begins();
        connection.note_data(100, &budget);
        connection.note_taken(30, &budget);
        assert_eq!((connection.unread(), budget.add_unread(0)), (70, 70));
        connection.body_ends(&budget);
        assert_eq!((connection.unread(), budget.add_unread(0)), (0, 0));
    }

    #[test]
    fn a_connection_that_leaves_too_much_in_the_transport_is_ended() {
        let budget = Budget::new(4 << 20, 1 << 10);
        let connection = Connection::new(ClientKey(0), Arc::default(), CancellationToken::new());
        connection.body_begins();
        std::thread::sleep(Duration::from_millis(TAKEN_WITHIN_MS + 50));
        connection.note_data(64 << 20, &budget);
        assert!(!connection.end.is_cancelled());
        connection.note_data(2 << 20, &budget);
        assert!(connection.end.is_cancelled());
    }
}
