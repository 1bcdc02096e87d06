//! One rank's side of the exchanges over symmetric windows: whose turn it is to touch what.
//!
//! Each slot goes through the states of [`SlotState`] in order, once per exchange; in each, this module hands out only
//! the memory that belongs to this rank then, so that callers need no unsafe code and a call out of order is an error
//! instead of a race. `docs/protocol.md` has the argument; in short, per slot:
//!
//! * this rank's dispatch areas (in every window) are its own until it releases its dispatch flags, and again once it
//!   has seen every peer's combine flag, which a peer stores when it has read them;
//! * its partials (in every window) are its own from the time it has seen every peer's dispatch flag, which a peer
//!   stores when it has reduced what an earlier exchange brought it, until it releases its combine flags.

#![allow(
    unsafe_code,
    reason = "turns views of shared memory into slices while the protocol says they are ours"
)]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::region::SharedRegion;
use super::wait::{Patience, TimedOut};
pub use super::window::{AttachError, BatchHead, FlagKind, WindowLayout, WindowShape};
use super::window::{SEQUENCE_BITS, Windows, flag_value};
use crate::types::{Generation, Rank, Sequence, Slot};

/// Where a slot is in its exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing in flight.
    Idle,
    /// Issued: this rank may write what it dispatches.
    Open,
    /// Dispatch flags are released.
    Sent,
    /// Every peer's dispatch has arrived: received rows may be read, partials written.
    Ready,
    /// Combine flags are released: what was received is consumed.
    Returning,
    /// Every peer's partials have arrived and may be read.
    Returned,
}

/// Why an exchange failed. All but [`State`](Self::State) end the group: its other ranks are told, and later calls
/// give [`Ended`](Self::Ended).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// The call does not fit the slot's state.
    #[error("slot {slot} is {found:?}, but the call needs it to be {expected:?}")]
    State {
        /// The slot.
        slot: Slot,
        /// The state the call needs.
        expected: SlotState,
        /// The slot's state.
        found: SlotState,
    },
    /// No such slot.
    #[error("slot {slot} is not one of {slots} slots")]
    Slot {
        /// The slot.
        slot: Slot,
        /// Slots of the group.
        slots: usize,
    },
    /// Peers did not arrive in time.
    #[error("{phase} of exchange {sequence} waited {waited:?} for rank(s) {}", list(.peers))]
    Missing {
        /// `dispatch` or `combine`.
        phase: &'static str,
        /// Which exchange.
        sequence: Sequence,
        /// Who did not arrive.
        peers: Vec<Rank>,
        /// The deadline.
        waited: Duration,
    },
    /// A rank, maybe this one, reported a fault.
    #[error("rank {rank} {cause}")]
    Fault {
        /// Who reported.
        rank: Rank,
        /// What it reported.
        cause: FaultCause,
    },
    /// A peer is at a later exchange: the ranks did not run the same steps.
    #[error(
        "{phase} of exchange {expected}: rank {peer} is at exchange {found} already; ranks must run the same steps"
    )]
    Ahead {
        /// `dispatch` or `combine`.
        phase: &'static str,
        /// Who is ahead.
        peer: Rank,
        /// This rank's exchange.
        expected: Sequence,
        /// The peer's.
        found: Sequence,
    },
    /// What a peer announces contradicts the windows or this rank's step.
    #[error(
        "rank {peer} announces {rows} rows with k = {k}; this step has k = {expected_k} and at most {max_rows} rows"
    )]
    Head {
        /// The peer.
        peer: Rank,
        /// Its rows.
        rows: u32,
        /// Its experts per token.
        k: u32,
        /// This rank's experts per token.
        expected_k: u32,
        /// Rows that an area holds.
        max_rows: usize,
    },
    /// The generation has used all sequences.
    #[error("the generation has used all of its 2^40 sequences; a new generation is needed")]
    Exhausted,
    /// The group failed before.
    #[error("the group has ended after a fault")]
    Ended,
}

/// What a rank reported through the error word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCause {
    /// It failed, or left with an exchange in flight.
    Failed,
    /// It waited in vain for this rank (the first, if several are missing).
    Missed(Rank),
}

impl std::fmt::Display for FaultCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed => f.write_str("failed or left during an exchange"),
            Self::Missed(rank) => write!(f, "waited in vain for rank {rank}"),
        }
    }
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

/// How a rank takes part.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeOptions {
    /// This rank.
    pub rank: Rank,
    /// The windows' generation.
    pub generation: Generation,
    /// How long any wait may take.
    pub deadline: Duration,
    /// Looks before sleeping, see [`Patience::spin`].
    pub spin: u32,
    /// Fill memory with 0xff bytes (NaN rows, ids of -1) whenever it becomes this rank's to write: for tests.
    pub poison: bool,
}

#[derive(Clone, Copy, Debug)]
struct SlotProgress {
    state: SlotState,
    sequence: Sequence,
    k: u32,
}

/// One rank's side of the exchanges of a generation.
#[derive(Debug)]
pub struct Exchange {
    windows: Windows,
    options: ExchangeOptions,
    slots: Vec<SlotProgress>,
    last: Sequence,
    ended: bool,
}

/// What this rank dispatches to one other: to be filled while the slot is [`SlotState::Open`].
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// How much of the rest is filled.
    pub head: &'a mut BatchHead,
    /// `[max_tokens_per_rank, max_top_k]`.
    pub ids: &'a mut [i32],
    /// `[max_tokens_per_rank, max_top_k]`.
    pub weights: &'a mut [f32],
    /// `[max_tokens_per_rank, hidden]`.
    pub rows: &'a mut [f32],
}

/// What one source rank dispatched to this rank, and where the answer goes.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The source.
    pub source: Rank,
    /// Experts per token.
    pub k: usize,
    /// `[rows, hidden]`.
    pub rows: &'a [f32],
    /// `[rows, k]`.
    pub ids: &'a [i32],
    /// `[rows, k]`.
    pub weights: &'a [f32],
    /// `[rows, hidden]`, in the source's window: row `i` answers received row `i`.
    pub partials: &'a mut [f32],
}

/// One [`Batch`] per source rank, in ascending order, those without rows included.
#[derive(Debug)]
pub struct Batches<'a> {
    // Mutable, so that nothing else of the exchange is used while batches are out.
    windows: &'a mut Windows,
    slot: Slot,
    k: usize,
    ranks: Range<usize>,
}

impl<'a> Iterator for Batches<'a> {
    type Item = Batch<'a>;

    fn next(&mut self) -> Option<Batch<'a>> {
        let source = self.ranks.next()?;
        let (windows, k) = (&*self.windows, self.k);
        let WindowShape { hidden, max_tokens_per_rank, .. } = windows.shape;
        let at = windows.area(self.slot, source);
        let area = &windows.incoming[at];
        // SAFETY: the slot is ready. The source stored its dispatch flag after it wrote the area, and writes it again
        // only after it has seen our combine flag, which is not stored while this borrow of the exchange lives. The
        // partials nobody else writes, and the source, having stored the dispatch flag of this exchange, has finished
        // reading those of the slot's last one and reads these after our combine flag. Each source comes once, so no
        // second slice of its partials exists. The slices point into the region, which outlives the borrow.
        unsafe {
            // The count was checked when it arrived; `min` keeps a peer that scribbles later from causing a panic.
            let rows = (area.head.as_slice()[0].rows as usize).min(max_tokens_per_rank);
            Some(Batch {
                source: Rank(source as u32),
                k,
                rows: extend(&area.rows.as_slice()[..rows * hidden]),
                ids: extend(&area.ids.as_slice()[..rows * k]),
                weights: extend(&area.weights.as_slice()[..rows * k]),
                partials: extend_mut(&mut windows.partials[at].as_mut_slice()[..rows * hidden]),
            })
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ranks.size_hint()
    }
}

impl ExactSizeIterator for Batches<'_> {}

/// Lengthens a borrow of window memory from one call of `next` to the borrow of the exchange.
///
/// # Safety
/// The memory is in a region that lives as long as `'a`, and stays ours that long.
const unsafe fn extend<'a, T>(slice: &[T]) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(slice.as_ptr(), slice.len()) }
}

/// As [`extend`].
///
/// # Safety
/// As there, and the slice is given out once.
const unsafe fn extend_mut<'a, T>(slice: &mut [T]) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr(), slice.len()) }
}

impl Exchange {
    /// Attaches to the windows in `region`, claiming this rank's.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(
        layout: &WindowLayout,
        region: &Arc<SharedRegion>,
        options: ExchangeOptions,
    ) -> Result<Self, AttachError> {
        Ok(Self::over(Windows::attach(layout, region, options.rank, options.generation)?, options))
    }

    /// Maps an inherited descriptor and attaches to the windows in it.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn from_fd(
        layout: &WindowLayout,
        fd: OwnedFd,
        options: ExchangeOptions,
    ) -> Result<Self, AttachError> {
        Ok(Self::over(Windows::from_fd(layout, fd, options.rank, options.generation)?, options))
    }

    fn over(windows: Windows, options: ExchangeOptions) -> Self {
        let idle = SlotProgress { state: SlotState::Idle, sequence: Sequence(0), k: 0 };
        let slots = vec![idle; windows.shape.slots];
        Self { windows, options, slots, last: Sequence(0), ended: false }
    }

    /// The slot's state.
    ///
    /// # Errors
    /// [`ExchangeError::Slot`].
    pub fn state(&self, slot: Slot) -> Result<SlotState, ExchangeError> {
        self.progress(slot).map(|p| p.state)
    }

    /// Begins the next exchange in an idle slot, of `k` experts per token.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn begin(&mut self, slot: Slot, k: u32) -> Result<Sequence, ExchangeError> {
        self.expect(slot, SlotState::Idle)?;
        self.check_error_word()?;
        let sequence = Sequence(self.last.0 + 1);
        if sequence.0 >> SEQUENCE_BITS != 0 {
            return Err(self.fail(ExchangeError::Exhausted));
        }
        self.last = sequence;
        self.slots[slot.index()] = SlotProgress { state: SlotState::Open, sequence, k };
        if self.options.poison {
            for peer in 0..self.windows.shape.ranks {
                let out = self.outgoing(slot, peer)?;
                bytemuck::bytes_of_mut(out.head).fill(0xff);
                for bytes in [
                    bytemuck::cast_slice_mut::<i32, u8>(out.ids),
                    bytemuck::cast_slice_mut::<f32, u8>(out.weights),
                    bytemuck::cast_slice_mut::<f32, u8>(out.rows),
                ] {
                    bytes.fill(0xff);
                }
            }
        }
        Ok(sequence)
    }

    /// What goes to `peer`.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is open.
    ///
    /// # Panics
    /// If there is no such peer.
    pub fn outgoing(&mut self, slot: Slot, peer: usize) -> Result<Outgoing<'_>, ExchangeError> {
        self.expect(slot, SlotState::Open)?;
        let area = &self.windows.outgoing[self.windows.area(slot, peer)];
        // SAFETY: the slot is open. Nobody but this rank (one per window, by its claim) writes these areas, and the
        // peer reads them only between our dispatch flag and its combine flag of an exchange; the ones of the last
        // exchange in this slot we have seen, the one of this exchange we have not stored. `&mut self` excludes a
        // second slice.
        unsafe {
            Ok(Outgoing {
                head: &mut area.head.as_mut_slice()[0],
                ids: area.ids.as_mut_slice(),
                weights: area.weights.as_mut_slice(),
                rows: area.rows.as_mut_slice(),
            })
        }
    }

    /// Releases the dispatch flags to every peer. Never waits.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is open.
    pub fn send_dispatch(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.release(slot, FlagKind::Dispatch, SlotState::Open, SlotState::Sent)
    }

    /// Waits for every peer's dispatch flag, those with no rows included.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn wait_dispatch(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.wait(slot, FlagKind::Dispatch, SlotState::Sent)?;
        let expected_k = self.slots[slot.index()].k;
        let max_rows = self.windows.shape.max_tokens_per_rank;
        for peer in 0..self.windows.shape.ranks {
            let area = &self.windows.incoming[self.windows.area(slot, peer)];
            // SAFETY: the peer's dispatch flag of this exchange has been seen, our combine flag is not stored.
            let BatchHead { rows, k } = unsafe { area.head.as_slice() }[0];
            if rows as usize > max_rows || k != expected_k {
                let peer = Rank(peer as u32);
                return Err(self.fail(ExchangeError::Head { peer, rows, k, expected_k, max_rows }));
            }
        }
        self.slots[slot.index()].state = SlotState::Ready;
        if self.options.poison {
            for batch in self.batches(slot)? {
                bytemuck::cast_slice_mut::<f32, u8>(batch.partials).fill(0xff);
            }
        }
        Ok(())
    }

    /// What every source rank dispatched to this rank.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is ready.
    pub fn batches(&mut self, slot: Slot) -> Result<Batches<'_>, ExchangeError> {
        self.expect(slot, SlotState::Ready)?;
        let ranks = 0..self.windows.shape.ranks;
        Ok(Batches { k: self.slots[slot.index()].k as usize, windows: &mut self.windows, slot, ranks })
    }

    /// Releases the combine flags to every peer: received rows are read, partials written. Never waits.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is ready.
    pub fn send_combine(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.release(slot, FlagKind::Combine, SlotState::Ready, SlotState::Returning)
    }

    /// Waits for every peer's combine flag, those with no rows included.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn wait_combine(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.wait(slot, FlagKind::Combine, SlotState::Returning)?;
        self.slots[slot.index()].state = SlotState::Returned;
        Ok(())
    }

    /// The partials that `peer` returned, `[max_tokens_per_rank, hidden]`: row `i` answers row `i` of what was
    /// dispatched to it.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is returned.
    ///
    /// # Panics
    /// If there is no such peer.
    pub fn returned(&self, slot: Slot, peer: usize) -> Result<&[f32], ExchangeError> {
        self.expect(slot, SlotState::Returned)?;
        // SAFETY: the peer stored its combine flag after it wrote them, and writes them again only after it has seen
        // our dispatch flag of the slot's next exchange, which takes `&mut self`.
        Ok(unsafe { self.windows.returned[self.windows.area(slot, peer)].as_slice() })
    }

    /// Ends the exchange: its partials have been read, the slot is idle.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is returned.
    pub fn finish(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.expect(slot, SlotState::Returned)?;
        self.slots[slot.index()].state = SlotState::Idle;
        Ok(())
    }

    /// Ends the group: tells every peer that this rank failed, so that nobody waits for it.
    pub fn abort(&mut self) {
        if !self.ended {
            self.report(FaultCause::Failed);
            self.ended = true;
        }
    }

    fn progress(&self, slot: Slot) -> Result<&SlotProgress, ExchangeError> {
        self.slots.get(slot.index()).ok_or(ExchangeError::Slot { slot, slots: self.slots.len() })
    }

    /// Fails unless the slot is in a state.
    ///
    /// # Errors
    /// [`ExchangeError::State`], [`ExchangeError::Slot`] or [`ExchangeError::Ended`].
    pub fn expect(&self, slot: Slot, expected: SlotState) -> Result<(), ExchangeError> {
        if self.ended {
            return Err(ExchangeError::Ended);
        }
        match self.progress(slot)?.state {
            found if found == expected => Ok(()),
            found => Err(ExchangeError::State { slot, expected, found }),
        }
    }

    fn release(
        &mut self,
        slot: Slot,
        kind: FlagKind,
        from: SlotState,
        to: SlotState,
    ) -> Result<(), ExchangeError> {
        self.expect(slot, from)?;
        let progress = &mut self.slots[slot.index()];
        progress.state = to;
        let value = flag_value(self.windows.generation, progress.sequence);
        let me = self.options.rank.index();
        for peer in 0..self.windows.shape.ranks {
            self.windows.flag(peer, slot, kind, me).store(value, Ordering::Release);
        }
        for peer in (0..self.windows.shape.ranks).filter(|&peer| peer != me) {
            self.windows.doorbell(peer).ring();
        }
        Ok(())
    }

    fn wait(&mut self, slot: Slot, kind: FlagKind, from: SlotState) -> Result<(), ExchangeError> {
        self.expect(slot, from)?;
        let sequence = self.slots[slot.index()].sequence;
        let windows = &self.windows;
        let me = self.options.rank.index();
        let arrived = |peer: usize| {
            let found = windows.flag(me, slot, kind, peer).load(Ordering::Acquire);
            let ours = found >> SEQUENCE_BITS == windows.generation.0;
            let found = Sequence(found & ((1 << SEQUENCE_BITS) - 1));
            match found {
                // Another generation's flag says nothing, whatever its sequence.
                found if !ours || found < sequence => Ok(false),
                found if found == sequence => Ok(true),
                found => Err(ExchangeError::Ahead {
                    phase: kind.phase(),
                    peer: Rank(peer as u32),
                    expected: sequence,
                    found,
                }),
            }
        };
        let mut next = 0;
        let poll = || -> Option<Result<(), ExchangeError>> {
            if let Some(fault) = self.reported() {
                return Some(Err(fault));
            }
            while next < windows.shape.ranks {
                match arrived(next) {
                    Ok(true) => next += 1,
                    Ok(false) => return None,
                    Err(ahead) => return Some(Err(ahead)),
                }
            }
            Some(Ok(()))
        };
        let patience = Patience::within(self.options.spin, self.options.deadline);
        let failure = match windows.doorbell(me).wait_for(patience, poll) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(failure)) => failure,
            Err(TimedOut) => {
                let missing = (next..windows.shape.ranks).filter(|&peer| arrived(peer) != Ok(true));
                let peers: Vec<Rank> = missing.map(|peer| Rank(peer as u32)).collect();
                if peers.is_empty() {
                    return Ok(());
                }
                let waited = self.options.deadline;
                ExchangeError::Missing { phase: kind.phase(), sequence, peers, waited }
            }
        };
        Err(self.fail(failure))
    }

    fn check_error_word(&mut self) -> Result<(), ExchangeError> {
        match self.reported() {
            Some(fault) => Err(self.fail(fault)),
            None => Ok(()),
        }
    }

    /// The fault in this rank's error word.
    fn reported(&self) -> Option<ExchangeError> {
        let word = self.windows.error(self.options.rank.index()).load(Ordering::Acquire);
        decode_fault(self.windows.generation, word).map(|(rank, cause)| ExchangeError::Fault { rank, cause })
    }

    /// Ends the group because of `failure`, and tells the peers unless they told us.
    fn fail(&mut self, failure: ExchangeError) -> ExchangeError {
        match &failure {
            ExchangeError::Fault { .. } => {}
            ExchangeError::Missing { peers, .. } if !peers.is_empty() => {
                self.report(FaultCause::Missed(peers[0]))
            }
            _ => self.report(FaultCause::Failed),
        }
        self.ended = true;
        failure
    }

    /// Stores the error word in every window that has none, and wakes their owners.
    fn report(&self, cause: FaultCause) {
        let value = encode_fault(self.windows.generation, self.options.rank, cause);
        for peer in 0..self.windows.shape.ranks {
            // The first fault is the one to tell of; a later one is a consequence.
            let _ = self.windows.error(peer).compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed);
            self.windows.doorbell(peer).ring();
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // Whoever leaves in the midst of an exchange will not store the flags that others wait for.
        if self.slots.iter().any(|slot| slot.state != SlotState::Idle) {
            self.abort();
        }
    }
}

/// `generation << 40 | (missed rank + 1) << 20 | rank + 1`: never zero.
fn encode_fault(generation: Generation, rank: Rank, cause: FaultCause) -> u64 {
    let missed = match cause {
        FaultCause::Failed => 0,
        FaultCause::Missed(peer) => u64::from(peer.0) + 1,
    };
    generation.0 << SEQUENCE_BITS | missed << 20 | (u64::from(rank.0) + 1)
}

fn decode_fault(generation: Generation, word: u64) -> Option<(Rank, FaultCause)> {
    let rank = (word & 0xf_ffff) as u32;
    if word >> SEQUENCE_BITS != generation.0 || rank == 0 {
        return None;
    }
    let cause = match (word >> 20 & 0xf_ffff) as u32 {
        0 => FaultCause::Failed,
        missed => FaultCause::Missed(Rank(missed - 1)),
    };
    Some((Rank(rank - 1), cause))
}

#[cfg(test)]
mod tests;
