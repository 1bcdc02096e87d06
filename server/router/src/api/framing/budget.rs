//! The bound on request bytes that the service holds at once, and what it knows about each connection.
//!
//! A message is charged when its length is known and before its bytes are taken out of the transport, all at once, so
//! that no two half-arrived messages can wait for each other. The charge is given back when both its rows are dropped
//! and its answer has left for the socket.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, TryAcquireError};
use tokio_util::sync::CancellationToken;

use crate::backend::ClientKey;

/// What a message costs on top of its own bytes: its place in tables and queues.
const OVERHEAD_BYTES: usize = 1 << 10;
/// How long a message waits for room before it is refused.
pub(in crate::api) const WAIT_FOR_ROOM: Duration = Duration::from_millis(100);
/// What every HTTP/2 client sends first. Keep-alive watches over a connection from then on.
const PREFACE_BYTES: u64 = 24;
/// How long after a refusal the service counts as short of room.
const PRESSURE: Duration = Duration::from_secs(1);

/// Bytes that may be in flight, over all connections.
pub(in crate::api) struct Budget {
    room: Semaphore,
    total: usize,
    per_connection: usize,
    epoch: Instant,
    /// Milliseconds since `epoch` of the last time somebody had to wait, plus one; 0 if never.
    short_at: AtomicU64,
}

impl Budget {
    /// `total` bytes in all; one connection may hold half of it, or one largest message.
    pub(in crate::api) fn new(total: usize, largest_message: usize) -> Arc<Budget> {
        let largest = largest_message + OVERHEAD_BYTES;
        let total = total.max(largest).min(Semaphore::MAX_PERMITS);
        Arc::new(Budget {
            room: Semaphore::new(total),
            total,
            per_connection: (total / 2).max(largest),
            epoch: Instant::now(),
            short_at: AtomicU64::new(0),
        })
    }

    /// The bound itself.
    pub(in crate::api) fn total(&self) -> usize {
        self.total
    }

    /// Bytes charged now.
    pub(in crate::api) fn held(&self) -> usize {
        self.total - self.room.available_permits().min(self.total)
    }

    /// Whether somebody had to wait for room just now.
    pub(in crate::api) fn is_short(&self) -> bool {
        let at = self.short_at.load(Ordering::Relaxed);
        at != 0 && self.epoch.elapsed() < Duration::from_millis(at - 1) + PRESSURE
    }

    fn note_shortage(&self) {
        let now = u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.short_at.store(now + 1, Ordering::Relaxed);
    }

    /// Charges a message without waiting.
    pub(in crate::api) fn try_charge(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        message: usize,
    ) -> Option<Ticket> {
        let bytes = message + OVERHEAD_BYTES;
        if !connection.reserve(bytes, self.per_connection) {
            return None;
        }
        let permits = u32::try_from(bytes).ok()?;
        match self.room.try_acquire_many(permits) {
            Ok(permit) => {
                permit.forget();
                Some(Ticket::new(self, connection, bytes))
            }
            Err(TryAcquireError::NoPermits | TryAcquireError::Closed) => {
                connection.unreserve(bytes);
                None
            }
        }
    }

    /// Charges a message, waiting a little for room; `None` if there is none.
    pub(in crate::api) async fn charge(
        self: Arc<Self>,
        connection: Arc<Connection>,
        message: usize,
    ) -> Option<Ticket> {
        self.note_shortage();
        let bytes = message + OVERHEAD_BYTES;
        let permits = u32::try_from(bytes).ok()?;
        let deadline = tokio::time::Instant::now() + WAIT_FOR_ROOM;
        // The connection's own share first: somebody who waits for himself must not stand in the common queue.
        while !connection.reserve(bytes, self.per_connection) {
            if tokio::time::Instant::now() >= deadline {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let reservation = Reservation { connection: &connection, bytes };
        let permit = tokio::time::timeout_at(deadline, self.room.acquire_many(permits)).await.ok()?.ok()?;
        permit.forget();
        std::mem::forget(reservation);
        Some(Ticket::new(&self, &connection, bytes))
    }
}

/// Gives a connection's reservation back if the wait for room ends or is dropped without a ticket.
struct Reservation<'a> {
    connection: &'a Connection,
    bytes: usize,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.connection.unreserve(self.bytes);
    }
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
    bytes: usize,
}

/// A charge. Clones share it; the last one to go gives it back.
#[derive(Clone)]
pub(in crate::api) struct Ticket(Arc<Charge>);

struct Charge {
    budget: Arc<Budget>,
    connection: Arc<Connection>,
    number: u64,
    bytes: usize,
}

impl Ticket {
    fn new(budget: &Arc<Budget>, connection: &Arc<Connection>, bytes: usize) -> Ticket {
        let number = connection.track(bytes);
        Ticket(Arc::new(Charge {
            budget: Arc::clone(budget),
            connection: Arc::clone(connection),
            number,
            bytes,
        }))
    }

    /// Notes where the message is now.
    pub(in crate::api) fn enter(&self, stage: Stage) {
        if let Some(tracked) = self.0.connection.tracked().get_mut(&self.0.number) {
            tracked.stage = stage;
            tracked.since = Instant::now();
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.connection.tracked().remove(&self.number);
        self.connection.unreserve(self.bytes);
        self.budget.room.add_permits(self.bytes);
    }
}

/// How long a connection may leave things undone before the service ends it.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// From accepting until the HTTP/2 preface is there.
    pub silent: Duration,
    /// For a message to arrive or an answer to leave, on top of `bytes / min_bytes_per_second`.
    pub stalled: Duration,
    /// The same while others wait for room.
    pub stalled_when_short: Duration,
    /// The least speed that counts as progress.
    pub min_bytes_per_second: usize,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            silent: Duration::from_secs(10),
            stalled: Duration::from_secs(30),
            stalled_when_short: Duration::from_secs(2),
            min_bytes_per_second: 1 << 20,
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

/// What is known about one connection.
pub(in crate::api) struct Connection {
    pub(in crate::api) key: ClientKey,
    /// Ends the connection at once.
    pub(in crate::api) end: CancellationToken,
    opened: Instant,
    held: AtomicUsize,
    read_bytes: AtomicU64,
    /// Milliseconds since `opened`, plus one, at which the socket took no more bytes; 0 while it does.
    blocked_at: AtomicU64,
    next_ticket: AtomicU64,
    tickets: Mutex<HashMap<u64, Tracked>>,
}

impl Connection {
    pub(in crate::api) fn new(key: ClientKey, end: CancellationToken) -> Arc<Connection> {
        Arc::new(Connection {
            key,
            end,
            opened: Instant::now(),
            held: AtomicUsize::new(0),
            read_bytes: AtomicU64::new(0),
            blocked_at: AtomicU64::new(0),
            next_ticket: AtomicU64::new(0),
            tickets: Mutex::default(),
        })
    }

    pub(in crate::api) fn note_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Notes whether the socket takes bytes.
    pub(in crate::api) fn note_write(&self, blocked: bool) {
        let was = self.blocked_at.load(Ordering::Relaxed);
        if blocked && was == 0 {
            let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
            self.blocked_at.store(now + 1, Ordering::Relaxed);
        } else if !blocked && was != 0 {
            self.blocked_at.store(0, Ordering::Relaxed);
        }
    }

    /// Why the connection should be ended, if it should.
    pub(in crate::api) fn overdue(&self, patience: &Patience, short: bool) -> Option<&'static str> {
        if self.read_bytes.load(Ordering::Relaxed) < PREFACE_BYTES && self.opened.elapsed() > patience.silent
        {
            return Some("silent");
        }
        let blocked = self.blocked_at.load(Ordering::Relaxed);
        if blocked != 0 && self.opened.elapsed() > Duration::from_millis(blocked - 1) + patience.stalled {
            return Some("stalled_write");
        }
        self.tracked().values().find(|tracked| !patience.allows(tracked, short)).map(|tracked| match tracked
            .stage
        {
            Stage::Leaving => "stalled_answer",
            Stage::Arriving | Stage::Working => "stalled_request",
        })
    }

    fn reserve(&self, bytes: usize, limit: usize) -> bool {
        self.held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                held.checked_add(bytes).filter(|&sum| sum <= limit)
            })
            .is_ok()
    }

    fn unreserve(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn track(&self, bytes: usize) -> u64 {
        let number = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        self.tracked().insert(number, Tracked { stage: Stage::Arriving, since: Instant::now(), bytes });
        number
    }

    fn tracked(&self) -> MutexGuard<'_, HashMap<u64, Tracked>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(number: u64) -> Arc<Connection> {
        Connection::new(ClientKey(number), CancellationToken::new())
    }

    #[test]
    fn charges_come_back_when_the_last_clone_goes() {
        let budget = Budget::new(1 << 20, 1 << 10);
        let one = connection(1);
        let ticket = budget.try_charge(&one, 1000).expect("there is room");
        assert_eq!(budget.held(), 1000 + OVERHEAD_BYTES);
        let clone = ticket.clone();
        drop(ticket);
        assert_eq!(budget.held(), 1000 + OVERHEAD_BYTES);
        drop(clone);
        assert_eq!(budget.held(), 0);
        assert_eq!(one.held.load(Ordering::Relaxed), 0);
        assert!(one.tracked().is_empty());
    }

    #[test]
    fn one_connection_gets_half() {
        let budget = Budget::new(1 << 20, 1 << 10);
        let greedy = connection(1);
        let mut tickets = Vec::new();
        while let Some(ticket) = budget.try_charge(&greedy, 50_000) {
            tickets.push(ticket);
        }
        assert!(budget.held() <= 1 << 19);
        assert!(budget.held() > (1 << 19) - 60_000);
        assert!(budget.try_charge(&connection(2), 50_000).is_some(), "others still have room");
    }

    #[test]
    fn the_largest_message_always_fits_an_idle_service() {
        let budget = Budget::new(10, 1 << 20);
        assert!(budget.try_charge(&connection(1), 1 << 20).is_some());
    }

    #[tokio::test]
    async fn waiting_for_room_ends_and_leaves_nothing_behind() {
        let budget = Budget::new(100_000, 90_000);
        let (one, two) = (connection(1), connection(2));
        let held = budget.try_charge(&one, 90_000).expect("there is room");
        assert!(!budget.is_short());
        assert!(Arc::clone(&budget).charge(Arc::clone(&two), 90_000).await.is_none());
        assert!(budget.is_short());
        assert_eq!(two.held.load(Ordering::Relaxed), 0);

        let waiting = tokio::spawn(Arc::clone(&budget).charge(Arc::clone(&two), 90_000));
        tokio::task::yield_now().await;
        drop(held);
        assert!(waiting.await.expect("no panic").is_some(), "room that comes back in time is used");
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn stalled_transfers_are_overdue_and_work_is_not() {
        let patience = Patience {
            silent: Duration::from_secs(100),
            stalled: Duration::from_secs(100),
            stalled_when_short: Duration::ZERO,
            min_bytes_per_second: usize::MAX,
        };
        let budget = Budget::new(1 << 20, 1 << 10);
        let one = connection(1);
        let ticket = budget.try_charge(&one, 10).expect("there is room");
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(one.overdue(&patience, true), Some("stalled_request"));
        assert_eq!(one.overdue(&patience, false), None);
        ticket.enter(Stage::Working);
        assert_eq!(one.overdue(&patience, true), None);
        ticket.enter(Stage::Leaving);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(one.overdue(&patience, true), Some("stalled_answer"));
    }
}
