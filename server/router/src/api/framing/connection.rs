//! What the service knows about one connection: what it holds, when it last made progress, and when to end it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::budget::Budget;
use crate::backend::ClientKey;

/// What every HTTP/2 client sends first. Keep-alive watches over a connection from then on.
const PREFACE_BYTES: u64 = 24;
/// A connection may always leave this many bytes of messages in the transport.
const UNREAD_BYTES: i64 = 1 << 20;
/// A connection whose calls took no bytes for this long makes no progress, milliseconds.
const TAKEN_WITHIN_MS: u64 = 250;

/// What all connections of one peer address, of one user of this host or of one authenticated client hold together.
#[derive(Debug, Default)]
pub(in crate::api) struct Owner {
    /// Bytes charged.
    pub(in crate::api) held: AtomicUsize,
    /// Those of them that are from the part kept for small messages.
    pub(in crate::api) small: AtomicUsize,
    /// Connections on which the owner has authenticated itself; 0 for addresses.
    pub(in crate::api) connections: AtomicUsize,
}

/// Where the message of a ticket is.
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
    /// Bytes that have arrived.
    bytes: usize,
}

/// How long a connection may leave things undone before the service ends it.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// From accepting until the HTTP/2 preface is there, TLS handshake included; where credentials are required, until
    /// the first authenticated call.
    pub silent: Duration,
    /// For a message to arrive or an answer to leave, on top of `bytes / min_bytes_per_second`.
    pub stalled: Duration,
    /// The same while other requests wait for room.
    pub stalled_when_short: Duration,
    /// The least speed that counts as progress.
    pub min_bytes_per_second: usize,
    /// A connection without a message or a new call for this long is closed (GOAWAY), and ended a little later.
    pub idle: Duration,
    /// A connection of this age is closed (GOAWAY); its calls finish.
    pub max_age: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            silent: Duration::from_secs(10),
            stalled: Duration::from_secs(30),
            stalled_when_short: Duration::from_secs(2),
            min_bytes_per_second: 1 << 20,
            idle: Duration::from_secs(300),
            max_age: Duration::from_secs(3600),
        }
    }
}

impl Patience {
    fn allows(&self, tracked: &Tracked, short: bool) -> bool {
        let grace = if short { self.stalled_when_short } else { self.stalled };
        let transfer = Duration::from_secs_f64(tracked.bytes as f64 / self.min_bytes_per_second as f64);
        tracked.stage == Stage::Working || tracked.since.elapsed() <= grace + transfer
    }
}

/// What is to be done with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum Verdict {
    /// Nothing.
    Keep,
    /// No new calls; those under way finish.
    Close(&'static str),
    /// It ends at once.
    End(&'static str),
}

/// What is known about one connection.
pub(in crate::api) struct Connection {
    pub(in crate::api) key: ClientKey,
    /// Ends the connection at once.
    pub(in crate::api) end: CancellationToken,
    /// Ends the connection once its calls have finished.
    pub(in crate::api) close: CancellationToken,
    /// The peer address or user, which holds what no authenticated client does.
    pub(in crate::api) peer: Arc<Owner>,
    pub(super) held: AtomicUsize,
    pub(super) waiting: AtomicUsize,
    opened: Instant,
    read_bytes: AtomicU64,
    /// Milliseconds since `opened`, plus one, at which the socket took no more bytes; 0 while it does.
    blocked_at: AtomicU64,
    /// Milliseconds since `opened` of the last call or message.
    active_at: AtomicU64,
    /// Milliseconds since `opened` at which a call last took bytes out of the transport.
    taken_at: AtomicU64,
    /// Bytes of messages that no call has taken yet; approximate while several calls are under way.
    unread: AtomicI64,
    /// Request bodies under way.
    bodies: AtomicUsize,
    authenticated: AtomicU64,
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
            authenticated: AtomicU64::new(0),
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

    /// Notes a call or a message, which keeps the connection from being idle.
    pub(in crate::api) fn note_activity(&self) {
        self.active_at.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Whether no call is under way.
    pub(in crate::api) fn is_idle(&self) -> bool {
        self.bodies.load(Ordering::Relaxed) == 0 && self.tracked().is_empty()
    }

    /// Notes that a call on this connection had valid credentials.
    pub(in crate::api) fn authenticate(&self) {
        self.authenticated.store(1, Ordering::Relaxed);
    }

    /// Whether a call on this connection had valid credentials.
    pub(in crate::api) fn is_authenticated(&self) -> bool {
        self.authenticated.load(Ordering::Relaxed) != 0
    }

    /// Notes bytes from the socket.
    pub(in crate::api) fn note_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Notes whether the socket takes bytes.
    pub(in crate::api) fn note_write(&self, blocked: bool) {
        let was = self.blocked_at.load(Ordering::Relaxed);
        if blocked && was == 0 {
            self.blocked_at.store(self.now_ms() + 1, Ordering::Relaxed);
        } else if !blocked && was != 0 {
            self.blocked_at.store(0, Ordering::Relaxed);
        }
    }

    /// Notes bytes of messages that lie in the transport from now on. A connection that leaves many there while the
    /// service has little room, and whose calls take none, is ended.
    pub(in crate::api) fn note_data(&self, bytes: usize, budget: &Budget) {
        if self.bodies.load(Ordering::Relaxed) == 0 {
            // No call takes them: the transport throws them away.
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
                    "ending a connection whose messages are not taken"
                );
                self.end.cancel();
            }
        }
    }

    /// Notes bytes that a call took out of the transport.
    pub(in crate::api) fn note_taken(&self, bytes: usize, budget: &Budget) {
        self.unread.fetch_sub(bytes as i64, Ordering::Relaxed);
        budget.add_unread(-(bytes as i64));
        self.taken_at.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Notes the start of a request body.
    pub(in crate::api) fn body_begins(&self) {
        self.bodies.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes the end of a request body. What it left in the transport is thrown away.
    pub(in crate::api) fn body_ends(&self, budget: &Budget) {
        if self.bodies.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.forget_unread(budget);
        }
    }

    /// Bytes of messages in the transport.
    pub(in crate::api) fn unread(&self) -> i64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Takes this connection's part off the sum of bytes in the transport.
    pub(in crate::api) fn forget_unread(&self, budget: &Budget) {
        let unread = self.unread.swap(0, Ordering::Relaxed);
        if unread != 0 {
            budget.add_unread(-unread);
        }
    }

    /// What is to be done with the connection. `must_authenticate`: it is ended if it stays without credentials.
    pub(in crate::api) fn verdict(
        &self,
        patience: &Patience,
        short: bool,
        must_authenticate: bool,
    ) -> Verdict {
        let age = self.opened.elapsed();
        if self.read_bytes.load(Ordering::Relaxed) < PREFACE_BYTES && age > patience.silent {
            return Verdict::End("silent");
        }
        if must_authenticate && !self.is_authenticated() && age > patience.silent {
            return Verdict::End("unauthenticated");
        }
        let blocked = self.blocked_at.load(Ordering::Relaxed);
        if blocked != 0 && age > Duration::from_millis(blocked - 1) + patience.stalled {
            return Verdict::End("stalled_write");
        }
        let tracked = self.tracked();
        if let Some(late) = tracked.values().find(|tracked| !patience.allows(tracked, short)) {
            return Verdict::End(match late.stage {
                Stage::Leaving => "stalled_answer",
                Stage::Arriving | Stage::Working => "stalled_request",
            });
        }
        let busy = !tracked.is_empty();
        drop(tracked);
        let quiet = age.saturating_sub(Duration::from_millis(self.active_at.load(Ordering::Relaxed)));
        if !busy && quiet > patience.idle {
            // Calls without messages, such as a stream that sends nothing, do not keep a closed connection.
            let over = quiet > patience.idle + patience.silent;
            return if over { Verdict::End("idle") } else { Verdict::Close("idle") };
        }
        // A spread of an eighth, so that connections that were opened together do not all come back together.
        let spread = patience.max_age / 8 * (self.key.0 % 8) as u32 / 8;
        if age > patience.max_age + spread {
            return Verdict::Close("age");
        }
        Verdict::Keep
    }

    /// Begins to watch over a message; its number.
    pub(super) fn track(&self) -> u64 {
        let number = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let tracked = Tracked { stage: Stage::Arriving, since: Instant::now(), bytes: 0 };
        self.tracked().insert(number, tracked);
        self.note_activity();
        number
    }

    /// Notes that bytes of a message have arrived.
    pub(super) fn note_arrival(&self, number: u64, bytes: usize) {
        if let Some(tracked) = self.tracked().get_mut(&number) {
            tracked.bytes += bytes;
        }
    }

    /// Notes where a message is now.
    pub(super) fn enter(&self, number: u64, stage: Stage) {
        if let Some(tracked) = self.tracked().get_mut(&number) {
            tracked.stage = stage;
            tracked.since = Instant::now();
        }
    }

    /// Ends the watch over a message.
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
        let patience = Patience {
            idle: Duration::from_millis(5),
            silent: Duration::from_millis(40),
            ..Patience::default()
        };
        let connection = Connection::new(ClientKey(0), Arc::default(), CancellationToken::new());
        connection.note_read(1000);
        connection.note_activity();
        assert_eq!(connection.verdict(&patience, false, false), Verdict::Keep);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(connection.verdict(&patience, false, false), Verdict::Close("idle"));
        assert_eq!(connection.verdict(&patience, false, true), Verdict::Close("idle"));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(connection.verdict(&patience, false, false), Verdict::End("idle"));
        assert_eq!(connection.verdict(&patience, false, true), Verdict::End("unauthenticated"));
        connection.authenticate();
        connection.note_activity();
        assert_eq!(connection.verdict(&patience, false, true), Verdict::Keep);
    }

    #[test]
    fn an_old_connection_is_closed() {
        let patience = Patience { max_age: Duration::from_millis(5), ..Patience::default() };
        let connection = Connection::new(ClientKey(8), Arc::default(), CancellationToken::new());
        connection.note_read(1000);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(connection.verdict(&patience, false, false), Verdict::Close("age"));
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
