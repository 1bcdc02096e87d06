//! The bound on request bytes that the service holds at once.
//!
//! A message is charged for the bytes of it that have arrived, never for the length that it announces. The charge is released when its
//! rows are dropped and its answer has left; until then it travels beside the message ([`Charges`]). An eighth of the bound is reserved for small messages and for calls. One caller (a peer
//! address, a user of this host or an authenticated client) may hold a share of each part.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;

use super::activity::Busy;

/// Charge of a message in addition to its bytes, for its entries in tables and queues.
pub(crate) const MESSAGE_BYTES: usize = 1 << 10;
/// Charge of a call in addition to its messages and headers, for its task and buffers.
pub(crate) const CALL_BYTES: usize = 16 << 10;
/// Largest message that may use the reserve for small ones: 64 KiB of rows and their description.
const SMALL_BYTES: usize = (64 << 10) + 512;

/// The connections and charged bytes of one peer address, one user of this host or one authenticated client.
#[derive(Debug, Default)]
pub(crate) struct Owner {
    /// Open connections.
    pub(crate) connections: AtomicUsize,
    /// Charged bytes, without those of the reserve.
    common: AtomicUsize,
    /// Bytes charged to the reserve.
    small: AtomicUsize,
}

/// Bytes that may be in flight, over all connections.
pub(crate) struct Budget {
    common_total: usize,
    small_total: usize,
    per_owner: usize,
    small_per_owner: usize,
    held: Mutex<Held>,
}

/// Bytes that are charged now, by part.
#[derive(Default)]
struct Held {
    common: usize,
    small: usize,
}

impl Budget {
    /// Makes a budget of `total` bytes, raised to the size of the largest message. One owner may hold half of it, and three quarters
    /// of the reserve.
    pub(crate) fn new(total: usize, largest_message: usize) -> Arc<Budget> {
        let largest = largest_message.saturating_add(MESSAGE_BYTES + CALL_BYTES);
        let total = total.max(largest);
        let small_total = (total / 8).min(total - largest);
        Arc::new(Budget {
            common_total: total - small_total,
            small_total,
            per_owner: (total / 2).max(largest),
            small_per_owner: small_total / 4 * 3,
            held: Mutex::default(),
        })
    }

    /// The bound, in bytes.
    pub(crate) const fn total(&self) -> usize {
        self.common_total + self.small_total
    }

    /// Bytes that are charged now.
    pub(crate) fn held(&self) -> usize {
        let held = self.locked();
        held.common + held.small
    }

    /// Charges `bytes` of a message or call that has `length` bytes in all; `None` if there is no room.
    pub(crate) fn charge(
        self: &Arc<Self>,
        owner: &Arc<Owner>,
        length: usize,
        bytes: usize,
    ) -> Option<Charge> {
        let (budget, owner) = (Arc::clone(self), Arc::clone(owner));
        let mut charge = Charge { budget, owner, is_small: length <= SMALL_BYTES, common: 0, small: 0 };
        charge.try_grow(bytes).then_some(charge)
    }

    fn locked(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Charged bytes, which are released on drop.
pub(crate) struct Charge {
    budget: Arc<Budget>,
    owner: Arc<Owner>,
    /// True if the reserve may be used.
    is_small: bool,
    common: usize,
    small: usize,
}

impl Charge {
    /// Charges more bytes; returns whether there was room.
    pub(crate) fn try_grow(&mut self, bytes: usize) -> bool {
        let Charge { budget, owner, .. } = &*self;
        let mut held = budget.locked();
        // The owner's counters change under the budget's lock only.
        let fits = |part: usize, total: usize, own: &AtomicUsize, share: usize| {
            part + bytes <= total && own.load(Ordering::Relaxed) + bytes <= share
        };
        if self.is_small && fits(held.small, budget.small_total, &owner.small, budget.small_per_owner) {
            held.small += bytes;
            owner.small.fetch_add(bytes, Ordering::Relaxed);
            drop(held);
            self.small += bytes;
        } else if fits(held.common, budget.common_total, &owner.common, budget.per_owner) {
            held.common += bytes;
            owner.common.fetch_add(bytes, Ordering::Relaxed);
            drop(held);
            self.common += bytes;
        } else {
            return false;
        }
        true
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut held = self.budget.locked();
        held.common -= self.common;
        held.small -= self.small;
        self.owner.common.fetch_sub(self.common, Ordering::Relaxed);
        self.owner.small.fetch_sub(self.small, Ordering::Relaxed);
    }
}

/// The charge of a complete message. The connection is not idle while it is held.
pub(crate) type MessageCharge = Arc<(Charge, Busy)>;

/// The charges of one call, in the order of its messages: the body of the request adds them, the service takes them, and the body of the
/// answer releases them.
#[derive(Default)]
pub(crate) struct Charges(Mutex<Lists>);

#[derive(Default)]
struct Lists {
    arrived: VecDeque<MessageCharge>,
    leaving: Vec<MessageCharge>,
    complete_at: Option<Instant>,
}

impl Charges {
    /// Adds the charge of a message whose last byte has arrived.
    pub(super) fn arrive(&self, ticket: MessageCharge) {
        let mut lists = self.lists();
        lists.arrived.push_back(ticket);
        lists.complete_at = Some(Instant::now());
    }

    /// Time at which the last byte of the latest message arrived.
    pub(crate) fn complete_at(&self) -> Option<Instant> {
        self.lists().complete_at
    }

    /// The charge of the message that was decoded next.
    pub(crate) fn next_arrival(&self) -> Option<MessageCharge> {
        self.lists().arrived.pop_front()
    }

    /// Hands over the charge of an answer that is encoded next.
    pub(crate) fn leave(&self, ticket: MessageCharge) {
        self.lists().leaving.push(ticket);
    }

    /// The charges of the answers that were encoded since the last call.
    pub(super) fn take_leaving(&self) -> Vec<MessageCharge> {
        std::mem::take(&mut self.lists().leaving)
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that keep `guard` until the last slice of them is dropped.
pub(crate) fn guarded<G: Send + 'static>(bytes: Bytes, guard: G) -> Bytes {
    struct Guarded<G> {
        bytes: Bytes,
        _guard: G,
    }
    impl<G> AsRef<[u8]> for Guarded<G> {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    Bytes::from_owner(Guarded { bytes, _guard: guard })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1 << 10;

    #[test]
    fn one_owner_leaves_room_for_others_and_for_small_messages() {
        let budget = Budget::new(8 << 20, 1 << 20);
        let (greedy, other) = (Arc::default(), Arc::default());
        let mut large = Vec::new();
        while let Some(charge) = budget.charge(&greedy, 1 << 20, 1 << 20) {
            large.push(charge);
        }
        assert_eq!(large.len(), 4, "half of the bound");
        assert!(budget.charge(&greedy, 64 * KIB, 64 * KIB).is_some(), "the reserve");
        let others: Vec<_> = (0..3).map(|_| budget.charge(&other, 1 << 20, 1 << 20)).collect();
        assert!(others.iter().all(Option::is_some));
        assert!(budget.charge(&Arc::default(), 1 << 20, 1 << 20).is_none(), "the bound");
        drop((large, others));
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn charges_grow_by_what_arrives_and_the_largest_message_always_fits() {
        let budget = Budget::new(0, 4 << 20);
        assert!(budget.total() >= 4 << 20);
        let owner = Arc::default();
        let mut charge = budget.charge(&owner, 4 << 20, MESSAGE_BYTES).expect("room");
        assert_eq!(budget.held(), MESSAGE_BYTES, "the announced length is not charged");
        assert!(charge.try_grow(4 << 20));
        assert!(!charge.try_grow(1 << 20));
        assert_eq!(budget.held(), MESSAGE_BYTES + (4 << 20));
        drop(charge);
        assert_eq!(budget.held(), 0);
    }
}
