//! The charges of one call, which travel beside its messages: the body of the request adds them, the service takes them, and the body
//! of the answer releases them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;

use super::activity::Busy;
use super::budget::Charge;

/// The charge of a complete message. The connection is not idle while it is held.
pub(crate) type Ticket = Arc<(Charge, Busy)>;

/// The charges of one call, in the order of its messages.
#[derive(Default)]
pub(crate) struct Charges(Mutex<Lists>);

#[derive(Default)]
struct Lists {
    arrived: VecDeque<Ticket>,
    leaving: Vec<Ticket>,
    complete_at: Option<Instant>,
}

impl Charges {
    /// Adds the charge of a message whose last byte has arrived.
    pub(super) fn arrive(&self, ticket: Ticket) {
        let mut lists = self.lists();
        lists.arrived.push_back(ticket);
        lists.complete_at = Some(Instant::now());
    }

    /// Time at which the last byte of the latest message arrived.
    pub(crate) fn complete_at(&self) -> Option<Instant> {
        self.lists().complete_at
    }

    /// The charge of the message that was decoded next.
    pub(crate) fn next_arrival(&self) -> Option<Ticket> {
        self.lists().arrived.pop_front()
    }

    /// Hands over the charge of an answer that is encoded next.
    pub(crate) fn leave(&self, ticket: Ticket) {
        self.lists().leaving.push(ticket);
    }

    /// The charges of the answers that were encoded since the last call.
    pub(super) fn take_leaving(&self) -> Vec<Ticket> {
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
