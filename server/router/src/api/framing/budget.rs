//! The bound on request bytes that the service holds at once.
//!
//! A message is charged for the bytes of it that have arrived, never for the length that it announces. The charge is
//! released when both its rows are dropped and its answer has left for the socket. A message without room for its next
//! bytes waits a short time and is then refused, which releases its charge; so incomplete messages never block each other
//! for long.
//!
//! Part of the bound is reserved for small messages. One owner (a peer address or an authenticated client) may hold only a
//! share of each part. A connection has a share, too, and its messages are charged against it by their announced lengths:
//! some of its messages then arrive completely instead of all of them partly, and announcements cost only the
//! connection itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::connection::{Connection, Owner, Stage};
use crate::api::memory::transport_bytes;

/// Charge of a message in addition to its bytes, for its entries in tables and queues.
pub(in crate::api) const MESSAGE_BYTES: usize = 1 << 10;
/// Charge of a call in addition to its messages and headers, for its task and buffers.
pub(in crate::api) const CALL_BYTES: usize = 16 << 10;
/// Longest time that a message waits for room before it is refused.
pub(in crate::api) const WAIT_FOR_ROOM: Duration = Duration::from_millis(100);
/// Time after which a message that waits for its connection's or owner's share first tries again. Each further wait is twice as
/// long, so that thousands of waiting messages cost little.
const SHARE_ROUND: Duration = Duration::from_millis(5);
/// Messages of one connection that may wait for room; further ones are refused at once.
const MAX_WAITING: usize = 16;
/// Time after a shortage during which the service counts as short of room.
const PRESSURE: Duration = Duration::from_secs(1);
/// Largest length of a message that may use the reserve for small ones.
const SMALL_BYTES: usize = 64 << 10;

/// Bytes that may be in flight, over all connections.
pub(in crate::api) struct Budget {
    common: Semaphore,
    /// The reserve for small messages and for calls.
    small: Semaphore,
    common_total: usize,
    small_total: usize,
    per_connection: usize,
    per_owner: usize,
    small_per_owner: usize,
    epoch: Instant,
    /// Milliseconds since `epoch`, plus one, at which a message last had to wait for others; 0 if never.
    short_at: AtomicU64,
    /// Message bytes in the transport that no call has read yet; approximate.
    unread: AtomicI64,
}

/// Why a charge could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum Lack {
    /// The connection has used up its share.
    Connection,
    /// The peer address or the client has used up its share.
    Owner,
    /// The service has reached its bound.
    Service,
}

impl Budget {
    /// Makes a budget of `total` bytes, raised to the size of the largest message. One connection may hold half of it and one
    /// owner three quarters; an eighth is reserved for small messages.
    pub(in crate::api) fn new(total: usize, largest_message: usize) -> Arc<Budget> {
        let largest = largest_message.saturating_add(MESSAGE_BYTES + CALL_BYTES);
        let total = total.max(largest).min(Semaphore::MAX_PERMITS / 2);
        let small_total = (total / 8).min(total - largest.min(total));
        let common_total = total - small_total;
        Arc::new(Budget {
            common: Semaphore::new(common_total),
            small: Semaphore::new(small_total),
            common_total,
            small_total,
            per_connection: (total / 2).max(largest),
            per_owner: (total / 4 * 3).max(largest),
            small_per_owner: small_total / 2,
            epoch: Instant::now(),
            short_at: AtomicU64::new(0),
            unread: AtomicI64::new(0),
        })
    }

    /// The bound, in bytes.
    pub(in crate::api) fn total(&self) -> usize {
        self.common_total + self.small_total
    }

    /// The bound on unread bytes in the transport.
    pub(in crate::api) fn unread_limit(&self) -> usize {
        transport_bytes(self.total())
    }

    /// Bytes that are charged now.
    pub(in crate::api) fn held(&self) -> usize {
        let free = self.common.available_permits() + self.small.available_permits();
        self.total() - free.min(self.total())
    }

    /// Whether a message had to wait for others within the last second.
    pub(in crate::api) fn is_short(&self) -> bool {
        let at = self.short_at.load(Ordering::Relaxed);
        at != 0 && self.epoch.elapsed() < Duration::from_millis(at - 1) + PRESSURE
    }

    fn note_shortage(&self) {
        let now = u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.short_at.store(now + 1, Ordering::Relaxed);
    }

    /// Adds to the unread bytes in the transport and returns the sum.
    pub(in crate::api) fn add_unread(&self, bytes: i64) -> i64 {
        self.unread.fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    /// Whether the unread bytes in the transport exceed their bound.
    pub(in crate::api) fn too_much_unread(&self) -> bool {
        usize::try_from(self.unread.load(Ordering::Relaxed)).is_ok_and(|unread| unread > self.unread_limit())
    }

    /// Charges a call, without its requests, for `more` bytes of headers and of an answer.
    pub(in crate::api) fn try_call(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        owner: &Arc<Owner>,
        more: usize,
    ) -> Result<Ticket, Lack> {
        self.ticket(connection, owner, true, None, CALL_BYTES + more, CALL_BYTES + more)
    }

    /// Charges [`MESSAGE_BYTES`] for a message of announced `length`. Its bytes are charged as they arrive.
    pub(in crate::api) fn try_message(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        owner: &Arc<Owner>,
        length: usize,
    ) -> Result<Ticket, Lack> {
        let number = connection.track();
        let announced = length.saturating_add(MESSAGE_BYTES);
        self.ticket(connection, owner, length <= SMALL_BYTES, Some(number), announced, MESSAGE_BYTES)
    }

    /// [`try_message`](Self::try_message) that waits up to [`WAIT_FOR_ROOM`]; `None` if there is no room.
    pub(in crate::api) async fn message(
        self: Arc<Self>,
        connection: Arc<Connection>,
        owner: Arc<Owner>,
        length: usize,
    ) -> Option<Ticket> {
        let _waiting = Waiting::begin(&connection)?;
        let deadline = tokio::time::Instant::now() + WAIT_FOR_ROOM;
        let mut round = SHARE_ROUND;
        loop {
            match self.try_message(&connection, &owner, length) {
                Ok(ticket) => return Some(ticket),
                Err(lack) => self.note_lack(lack),
            }
            if tokio::time::Instant::now() >= deadline {
                return None;
            }
            tokio::time::sleep_until(deadline.min(tokio::time::Instant::now() + round)).await;
            round *= 2;
        }
    }

    /// Notes a shortage, unless only the connection's own share is used up.
    fn note_lack(&self, lack: Lack) {
        if lack != Lack::Connection {
            self.note_shortage();
        }
    }

    fn ticket(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        owner: &Arc<Owner>,
        small: bool,
        number: Option<u64>,
        announced: usize,
        bytes: usize,
    ) -> Result<Ticket, Lack> {
        if !reserve(&connection.held, announced, self.per_connection) {
            number.into_iter().for_each(|number| connection.forget(number));
            return Err(Lack::Connection);
        }
        let ticket = Ticket(Arc::new(Charge {
            budget: Arc::clone(self),
            connection: Arc::clone(connection),
            owner: Arc::clone(owner),
            number,
            small,
            announced,
            from_common: AtomicUsize::new(0),
            from_small: AtomicUsize::new(0),
        }));
        // Fixed charges may use the small reserve, whatever the message's length. On failure the ticket's drop ends the tracking.
        ticket.0.take(bytes, true)?;
        Ok(ticket)
    }
}

/// A charge that grows as bytes arrive. Clones share it; dropping the last one releases it.
#[derive(Clone)]
pub(in crate::api) struct Ticket(Arc<Charge>);

struct Charge {
    budget: Arc<Budget>,
    connection: Arc<Connection>,
    owner: Arc<Owner>,
    /// The message's number on its connection; `None` for a call.
    number: Option<u64>,
    /// Whether it may use the reserve for small messages.
    small: bool,
    /// Bytes charged against the connection's share.
    announced: usize,
    from_common: AtomicUsize,
    from_small: AtomicUsize,
}

impl Charge {
    /// Takes `bytes` more from the owner's share and from the budget, all or nothing.
    fn take(&self, bytes: usize, small: bool) -> Result<(), Lack> {
        self.reserve(bytes)?;
        if small && self.take_small(bytes) {
            return Ok(());
        }
        // More bytes than a semaphore can have permits count as a lack of room.
        let permits = u32::try_from(bytes).ok();
        match permits.and_then(|permits| self.budget.common.try_acquire_many(permits).ok()) {
            Some(permit) => {
                permit.forget();
                self.from_common.fetch_add(bytes, Ordering::Relaxed);
                Ok(())
            }
            None => {
                self.unreserve(bytes);
                Err(Lack::Service)
            }
        }
    }

    fn take_small(&self, bytes: usize) -> bool {
        if !reserve(&self.owner.small, bytes, self.budget.small_per_owner) {
            return false;
        }
        let permits = u32::try_from(bytes).ok();
        let Some(permit) = permits.and_then(|permits| self.budget.small.try_acquire_many(permits).ok())
        else {
            self.owner.small.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        };
        permit.forget();
        self.from_small.fetch_add(bytes, Ordering::Relaxed);
        true
    }

    fn reserve(&self, bytes: usize) -> Result<(), Lack> {
        if reserve(&self.owner.held, bytes, self.budget.per_owner) { Ok(()) } else { Err(Lack::Owner) }
    }

    fn unreserve(&self, bytes: usize) {
        self.owner.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Adds `bytes` to a counter that may reach `limit`.
fn reserve(counter: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    let add = |held: usize| held.checked_add(bytes).filter(|&sum| sum <= limit);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}

impl Ticket {
    /// Charges `bytes` more of a message without waiting.
    pub(in crate::api) fn try_grow(&self, bytes: usize) -> Result<(), Lack> {
        self.0.take(bytes, self.0.small)?;
        self.note_arrival(bytes);
        Ok(())
    }

    /// Charges `bytes` more of a message and waits up to [`WAIT_FOR_ROOM`] for room. Returns whether there was room.
    pub(in crate::api) async fn grow(self, bytes: usize) -> bool {
        let charge = &*self.0;
        let Some(_waiting) = Waiting::begin(&charge.connection) else { return false };
        let deadline = tokio::time::Instant::now() + WAIT_FOR_ROOM;
        let mut round = SHARE_ROUND;
        // Shares first: a connection over its own share must not occupy the common queue.
        loop {
            match charge.reserve(bytes) {
                Ok(()) => break,
                Err(lack) => {
                    charge.budget.note_lack(lack);
                    if tokio::time::Instant::now() >= deadline {
                        return false;
                    }
                    tokio::time::sleep_until(deadline.min(tokio::time::Instant::now() + round)).await;
                    round *= 2;
                }
            }
        }
        let reservation = Reservation { charge, bytes };
        if charge.small && charge.take_small(bytes) {
            std::mem::forget(reservation);
            self.note_arrival(bytes);
            return true;
        }
        charge.budget.note_shortage();
        let Ok(permits) = u32::try_from(bytes) else { return false };
        let room = charge.budget.common.acquire_many(permits);
        let Ok(Ok(permit)) = tokio::time::timeout_at(deadline, room).await else { return false };
        permit.forget();
        charge.from_common.fetch_add(bytes, Ordering::Relaxed);
        std::mem::forget(reservation);
        self.note_arrival(bytes);
        true
    }

    fn note_arrival(&self, bytes: usize) {
        if let Some(number) = self.0.number {
            self.0.connection.note_arrival(number, bytes);
        }
    }

    /// Notes that the message entered a stage.
    pub(in crate::api) fn enter(&self, stage: Stage) {
        if let Some(number) = self.0.number {
            self.0.connection.enter(number, stage);
        }
    }
}

/// Releases a reservation if the wait for room fails or is dropped.
struct Reservation<'a> {
    charge: &'a Charge,
    bytes: usize,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.charge.unreserve(self.bytes);
    }
}

/// One message of a connection that waits for room.
struct Waiting<'a>(&'a Connection);

impl<'a> Waiting<'a> {
    fn begin(connection: &'a Connection) -> Option<Waiting<'a>> {
        reserve(&connection.waiting, 1, MAX_WAITING).then(|| Waiting(connection))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.connection.forget(number);
        }
        let common = *self.from_common.get_mut();
        let small = *self.from_small.get_mut();
        self.connection.held.fetch_sub(self.announced, Ordering::Relaxed);
        self.unreserve(common + small);
        self.owner.small.fetch_sub(small, Ordering::Relaxed);
        self.budget.common.add_permits(common);
        self.budget.small.add_permits(small);
    }
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;
