//! The charges of one call, which travel beside its messages: the body of the request sets them, the service takes them,
//! and the body of the answer releases them.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use expertd_types::ChunkedBytes;
use tonic::Status;

use super::budget::Ticket;

/// Whether a message was charged or refused before it reached the decoder.
pub(in crate::api) enum Arrival {
    /// The charge, and the rows if they were taken out of the message.
    Charged(Ticket, Option<ChunkedBytes>),
    Refused(Status),
}

/// An answer that is about to be encoded.
#[derive(Default)]
pub(in crate::api) struct Leaving {
    /// `None` if the request was refused before it was received.
    pub(in crate::api) ticket: Option<Ticket>,
    /// Rows that are sent without a copy; the message's own rows are then empty.
    pub(in crate::api) rows: Option<Bytes>,
    /// An encoded message that is sent without a copy in place of the empty one that is encoded.
    pub(in crate::api) message: Option<Bytes>,
}

/// The charges of one call, in the order of its messages.
#[derive(Default)]
pub(in crate::api) struct Charges {
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    arrived: VecDeque<Arrival>,
    leaving: VecDeque<Leaving>,
    complete_at: Option<Instant>,
}

impl Charges {
    /// When the last byte of the latest message arrived.
    pub(in crate::api) fn complete_at(&self) -> Option<Instant> {
        self.lists().complete_at
    }

    /// Notes that the last byte of a message has arrived.
    pub(super) fn complete_now(&self) {
        self.lists().complete_at = Some(Instant::now());
    }

    /// The arrival that belongs to the next decoded message.
    pub(in crate::api) fn next_arrival(&self) -> Option<Arrival> {
        self.lists().arrived.pop_front()
    }

    /// Queues the answer that is encoded next.
    pub(in crate::api) fn leave(&self, leaving: Leaving) {
        self.lists().leaving.push_back(leaving);
    }

    /// Queues the fate of a message, in the order of messages.
    pub(super) fn arrive(&self, arrival: Arrival) {
        self.lists().arrived.push_back(arrival);
    }

    /// Takes the answers that were encoded since the last call.
    pub(in crate::api) fn take_leaving(&self) -> VecDeque<Leaving> {
        std::mem::take(&mut self.lists().leaving)
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that keep a charge until the last slice of them is dropped.
pub(in crate::api) fn charged_bytes(bytes: Bytes, ticket: Ticket) -> Bytes {
    struct Owner {
        bytes: Bytes,
        _ticket: Ticket,
    }
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    Bytes::from_owner(Owner { bytes, _ticket: ticket })
}
