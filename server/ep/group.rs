//! The engine's interface to an EP group, independent of the transport.

use super::config::{ConfigError, EpConfig};
use crate::shm::exchange::{AttachError, ExchangeError};
use crate::shm::region::RegionError;
use crate::types::{Sequence, Slot};

/// Why a call on a group failed. Unless [`is_misuse`](EpError::is_misuse) returns true, the group has ended: its peers have
/// been notified, and the caller can only drop it.
#[derive(Debug, thiserror::Error)]
pub enum EpError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The windows cannot be joined.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The memory of the windows cannot be created or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The exchange with the peers failed, or a call was out of order.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// An argument exceeds the capacity of the windows.
    #[error("{what} is {found}, expected 1 to {limit}, the group's limit")]
    Limit {
        /// `tokens` or `k`.
        what: &'static str,
        /// Value of the argument.
        found: usize,
        /// Largest value that the group supports.
        limit: usize,
    },
    /// The length of a buffer does not match the call's other arguments.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// Name of the buffer.
        what: &'static str,
        /// Expected number of elements.
        expected: usize,
        /// Number of elements.
        found: usize,
    },
    /// A token's expert id is out of range.
    #[error("token {token} chooses expert {id}, but the layer has experts 0 to {last}")]
    Expert {
        /// Index of the token.
        token: usize,
        /// The id.
        id: i32,
        /// The layer's last expert.
        last: i64,
    },
    /// The owner of an expert is not a rank of the group.
    #[error("expert {id} is placed on rank {owner}, but the group has {ranks} ranks")]
    Owner {
        /// The expert.
        id: i32,
        /// The expert's owner.
        owner: u32,
        /// Number of ranks in the group.
        ranks: usize,
    },
}

impl EpError {
    /// Whether the error is a caller's mistake that left the group unchanged.
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        match self {
            Self::Exchange(e) => matches!(e, ExchangeError::State { .. } | ExchangeError::Slot { .. }),
            Self::Limit { .. } | Self::Length { .. } | Self::Expert { .. } | Self::Owner { .. } => true,
            Self::Config(_) | Self::Attach(_) | Self::Region(_) => false,
        }
    }
}

/// One rank's membership in an EP group.
///
/// An exchange is one round of these calls for a slot, in this order:
///
/// ```text
/// prepare → dispatch_send → dispatch_wait → received → combine_send → combine_wait
/// ```
///
/// Between a send and its wait the caller may do other work, such as shared experts. Exchanges in different slots may
/// be interleaved, in the same order on every rank. **Every rank runs every exchange**, with zero tokens if it has none.
/// A call that does not fit the slot's state is an error that changes nothing. Each rank counts its exchanges by itself;
/// the sequences agree because all ranks run the same exchanges.
///
/// The associated types leave open where rows, routing and counts are stored. After set-up, no call allocates. GPU ranks
/// follow the same protocol without this trait: see `docs/gpu.md`.
pub trait EpGroup {
    /// A buffer of token rows `[tokens, hidden]` in f32, to dispatch from or to combine into.
    type Rows: ?Sized;
    /// The gate's decision for this rank's tokens.
    type Routing<'a>;
    /// Rows that arrived for this rank's experts, with memory for the results.
    type Received<'a>
    where
        Self: 'a;

    /// The configuration of the group.
    fn config(&self) -> &EpConfig;

    /// Begins an exchange in an idle slot: determines which ranks each token goes to and lays out the routing, which the
    /// slot keeps until [`combine_wait`](Self::combine_wait).
    ///
    /// # Errors
    /// [`EpError`].
    fn prepare(&mut self, slot: Slot, routing: Self::Routing<'_>) -> Result<Sequence, EpError>;

    /// Pushes each row once to every rank that owns one of its experts, and signals all ranks. Never waits.
    ///
    /// # Errors
    /// [`EpError`].
    fn dispatch_send(&mut self, slot: Slot, rows: &Self::Rows) -> Result<(), EpError>;

    /// Waits until every rank's rows for this rank have arrived.
    ///
    /// # Errors
    /// [`EpError`].
    fn dispatch_wait(&mut self, slot: Slot) -> Result<(), EpError>;

    /// The rows that arrived. The caller writes **every** partial row: the weighted sum of the outputs of this rank's
    /// experts.
    ///
    /// # Errors
    /// [`EpError`].
    fn received(&mut self, slot: Slot) -> Result<Self::Received<'_>, EpError>;

    /// Returns the partial rows to their sources, and signals all ranks. Never waits.
    ///
    /// # Errors
    /// [`EpError`].
    fn combine_send(&mut self, slot: Slot) -> Result<(), EpError>;

    /// Waits until every rank's partial rows have arrived, and writes each token's sum over ranks to `out`, added in f32 in
    /// ascending order of ranks. A token without experts gets zeros. Ends the exchange.
    ///
    /// # Errors
    /// [`EpError`].
    fn combine_wait(&mut self, slot: Slot, out: &mut Self::Rows) -> Result<(), EpError>;

    /// Reports to every rank that this one failed, so that none waits for it, and ends the group. Dropping the group during
    /// an exchange does the same.
    fn abort(&mut self);

    /// Calls [`dispatch_send`](Self::dispatch_send), then [`dispatch_wait`](Self::dispatch_wait).
    ///
    /// # Errors
    /// [`EpError`].
    fn dispatch(&mut self, slot: Slot, rows: &Self::Rows) -> Result<(), EpError> {
        self.dispatch_send(slot, rows)?;
        self.dispatch_wait(slot)
    }

    /// Calls [`combine_send`](Self::combine_send), then [`combine_wait`](Self::combine_wait).
    ///
    /// # Errors
    /// [`EpError`].
    fn combine(&mut self, slot: Slot, out: &mut Self::Rows) -> Result<(), EpError> {
        self.combine_send(slot)?;
        self.combine_wait(slot, out)
    }
}
