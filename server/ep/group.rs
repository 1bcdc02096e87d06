//! What the engine sees of an EP group, whatever carries the rows.

use super::config::{ConfigError, EpConfig};
use crate::shm::exchange::{AttachError, ExchangeError};
use crate::shm::region::RegionError;
use crate::types::{Sequence, Slot};

/// Why a call on a group failed. Unless [`is_misuse`](EpError::is_misuse) says otherwise the group has ended: its peers
/// have been told, and nothing but dropping it makes sense.
#[derive(Debug, thiserror::Error)]
pub enum EpError {
    /// A configuration that makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The windows cannot be joined.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The windows cannot be had.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The exchange with the peers failed, or a call was out of order.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// More than the windows hold.
    #[error("{what} is {found}, the group was made for at most {limit}")]
    Limit {
        /// `tokens` or `k`.
        what: &'static str,
        /// What the call says.
        found: usize,
        /// What the group was made for.
        limit: usize,
    },
    /// A buffer of another length than the call's other arguments imply.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// What it must have.
        expected: usize,
        /// What it has.
        found: usize,
    },
    /// An expert that the layer does not have.
    #[error("token {token} chooses expert {id}, but the layer has experts 0 to {last}")]
    Expert {
        /// Index of the token.
        token: usize,
        /// What it chooses.
        id: i32,
        /// The layer's last expert.
        last: i64,
    },
    /// An expert whose owner is not a rank of the group.
    #[error("expert {id} is placed on rank {owner}, but the group has {ranks} ranks")]
    Owner {
        /// The expert.
        id: i32,
        /// Its owner.
        owner: u32,
        /// Ranks of the group.
        ranks: usize,
    },
}

impl EpError {
    /// Whether the caller made a mistake that left the group as it was.
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
/// prepare → dispatch_send → dispatch_wait → work → combine_send → combine_wait
/// ```
///
/// Between a send and its wait the caller may do other work, such as shared experts. Exchanges in different slots may
/// be interleaved, in the same order on every rank. **Every rank runs every exchange**, with zero tokens if it has none.
/// A call that does not fit the slot's state is an error that changes nothing. Sequences are the group's own: each
/// rank counts its exchanges, and because all run the same ones they agree.
///
/// The associated types keep this free of where rows, routing and counts are. After set-up, no call allocates. GPU ranks
/// keep the same protocol without this trait: see `docs/gpu.md`.
pub trait EpGroup {
    /// A buffer of token rows `[tokens, hidden]` in f32, to dispatch from or to combine into.
    type Rows: ?Sized;
    /// What the gate decided for this rank's tokens.
    type Routing<'a>;
    /// What arrived for this rank's experts, and where their results go.
    type Work<'a>
    where
        Self: 'a;

    /// What the group was made for.
    fn config(&self) -> &EpConfig;

    /// Begins an exchange in an idle slot: finds which ranks each token goes to and lays out the routing, which lives in
    /// the slot until [`combine_wait`](Self::combine_wait).
    ///
    /// # Errors
    /// [`EpError`].
    fn prepare(&mut self, slot: Slot, routing: Self::Routing<'_>) -> Result<Sequence, EpError>;

    /// Pushes each row once to every rank that owns one of its experts, and tells all ranks. Never waits.
    ///
    /// # Errors
    /// [`EpError`].
    fn dispatch_send(&mut self, slot: Slot, rows: &Self::Rows) -> Result<(), EpError>;

    /// Waits until every rank's rows for this rank have arrived.
    ///
    /// # Errors
    /// [`EpError`].
    fn dispatch_wait(&mut self, slot: Slot) -> Result<(), EpError>;

    /// What arrived. The caller writes **every** partial row: the sum over this rank's experts of the expert's output,
    /// weighted.
    ///
    /// # Errors
    /// [`EpError`].
    fn work(&mut self, slot: Slot) -> Result<Self::Work<'_>, EpError>;

    /// Hands the partial rows back to their sources, and tells all ranks. Never waits.
    ///
    /// # Errors
    /// [`EpError`].
    fn combine_send(&mut self, slot: Slot) -> Result<(), EpError>;

    /// Waits until every rank's partial rows have arrived, and writes each token's sum over ranks, added in f32 in
    /// ascending order of ranks, to `out`; zeros for a token that no rank took. Ends the exchange.
    ///
    /// # Errors
    /// [`EpError`].
    fn combine_wait(&mut self, slot: Slot, out: &mut Self::Rows) -> Result<(), EpError>;

    /// Tells every rank that this one failed, so that nobody waits for it. Ends the group; dropping it in the midst of
    /// an exchange does the same.
    fn abort(&mut self);

    /// [`dispatch_send`](Self::dispatch_send), then [`dispatch_wait`](Self::dispatch_wait).
    ///
    /// # Errors
    /// [`EpError`].
    fn dispatch(&mut self, slot: Slot, rows: &Self::Rows) -> Result<(), EpError> {
        self.dispatch_send(slot, rows)?;
        self.dispatch_wait(slot)
    }

    /// [`combine_send`](Self::combine_send), then [`combine_wait`](Self::combine_wait).
    ///
    /// # Errors
    /// [`EpError`].
    fn combine(&mut self, slot: Slot, out: &mut Self::Rows) -> Result<(), EpError> {
        self.combine_send(slot)?;
        self.combine_wait(slot, out)
    }
}
