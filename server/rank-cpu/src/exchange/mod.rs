//! One rank's side of the exchanges over symmetric windows: which memory belongs to the rank at which time.
//!
//! Each slot goes through the states of [`SlotState`] in order, once per exchange. In each state this module lends only
//! memory that belongs to this rank, so that callers need no unsafe code and a call out of order is an error instead of
//! a race. `docs/protocol.md` has the full argument; in short, for each slot:
//!
//! * this rank's dispatch areas (in every window) belong to it until it releases its dispatch flags, and again after it
//!   has seen every peer's combine flag, which a peer stores when it has read them;
//! * its partials (in every window) belong to it after it has seen every peer's dispatch flag, which a peer stores when it
//!   has reduced the partials of the slot's previous exchange, until it releases its combine flags.

#![allow(unsafe_code, reason = "makes slices of shared memory while the protocol assigns it to this rank")]

mod areas;
mod error;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) use self::areas::Outgoing;
pub use self::areas::{ReceivedIter, ReceivedRows};
pub(crate) use self::error::{ExchangeError, FaultCause, SlotState};
use self::error::{decode_fault, encode_fault};
pub(crate) use super::window::{AreaHeader, AttachError, FlagKind, WindowLayout, WindowShape};
use super::window::{SEQUENCE_BITS, Windows, flag_value};
use expertd_shm::region::SharedRegion;
use expertd_shm::wait::TimedOut;
use expertd_types::{Generation, Rank, Sequence, Slot};

/// Parameters of a rank's exchanges.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExchangeOptions {
    /// This rank.
    pub rank: Rank,
    /// The windows' generation.
    pub generation: Generation,
    /// Time limit of each wait, without pauses of this process.
    pub deadline: Duration,
    /// How long a wait spins before it sleeps, see [`WaitPolicy::spin`](expertd_shm::WaitPolicy::spin).
    pub spin: Duration,
    /// For tests: whether memory is filled with 0xff bytes (NaN rows, ids of -1) whenever this rank may begin to write it.
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
pub(crate) struct Exchange {
    windows: Windows,
    options: ExchangeOptions,
    slots: Vec<SlotProgress>,
    last: Sequence,
    ended: bool,
}

impl Exchange {
    /// Attaches to the windows in `region`, claiming this rank's.
    pub(crate) fn attach(
        layout: &WindowLayout,
        region: &Arc<SharedRegion>,
        options: ExchangeOptions,
    ) -> Result<Self, AttachError> {
        Ok(Self::over(Windows::attach(layout, region, options.rank, options.generation)?, options))
    }

    /// Maps an inherited descriptor and attaches to the windows in it.
    pub(crate) fn from_fd(
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

    /// Begins the next exchange in an idle slot, with `k` experts per token.
    pub(crate) fn begin(&mut self, slot: Slot, k: u32) -> Result<Sequence, ExchangeError> {
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

    /// The memory for what this rank dispatches to `peer`.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is open.
    ///
    /// # Panics
    /// If there is no such peer.
    pub(crate) fn outgoing(&mut self, slot: Slot, peer: usize) -> Result<Outgoing<'_>, ExchangeError> {
        self.expect(slot, SlotState::Open)?;
        let area = &self.windows.outgoing[self.windows.area(slot, peer)];
        // SAFETY: the slot is open. Only this rank writes these areas (one process per window, by its claim), and the peer
        // reads them only between our dispatch flag and its combine flag of an exchange. We have seen its combine flag of
        // the slot's previous exchange and have not stored our dispatch flag of this one. `&mut self` excludes a second
        // slice.
        unsafe {
            Ok(Outgoing {
                head: &mut area.head.as_mut_slice()[0],
                ids: area.ids.as_mut_slice(),
                weights: area.weights.as_mut_slice(),
                rows: area.rows.as_mut_slice(),
            })
        }
    }

    /// Releases this rank's dispatch flag to every peer. Never waits.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is open.
    pub(crate) fn send_dispatch(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.release(slot, FlagKind::Dispatch, SlotState::Open, SlotState::Sent)
    }

    /// Waits for the dispatch flag of every peer, including peers with no rows.
    pub(crate) fn wait_dispatch(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.wait(slot, FlagKind::Dispatch, SlotState::Sent)?;
        let expected_k = self.slots[slot.index()].k;
        let max_rows = self.windows.shape.max_tokens_per_rank;
        for peer in 0..self.windows.shape.ranks {
            let area = &self.windows.incoming[self.windows.area(slot, peer)];
            // SAFETY: the peer's dispatch flag of this exchange has been seen, and our combine flag is not stored yet.
            let AreaHeader { rows, k } = unsafe { area.head.as_slice() }[0];
            if rows as usize > max_rows || k != expected_k {
                let peer = Rank(peer as u32);
                return Err(self.fail(ExchangeError::Head { peer, rows, k, expected_k, max_rows }));
            }
        }
        self.slots[slot.index()].state = SlotState::Ready;
        if self.options.poison {
            for batch in self.received(slot)? {
                bytemuck::cast_slice_mut::<f32, u8>(batch.partials).fill(0xff);
            }
        }
        Ok(())
    }

    /// The rows that each source rank dispatched to this rank.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is ready.
    pub(crate) fn received(&mut self, slot: Slot) -> Result<ReceivedIter<'_>, ExchangeError> {
        self.expect(slot, SlotState::Ready)?;
        let ranks = 0..self.windows.shape.ranks;
        Ok(ReceivedIter { k: self.slots[slot.index()].k as usize, windows: &mut self.windows, slot, ranks })
    }

    /// Releases this rank's combine flag to every peer, after received rows were read and partials written. Never waits.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is ready.
    pub(crate) fn send_combine(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.release(slot, FlagKind::Combine, SlotState::Ready, SlotState::Returning)
    }

    /// Waits for the combine flag of every peer, including peers with no rows.
    pub(crate) fn wait_combine(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.wait(slot, FlagKind::Combine, SlotState::Returning)?;
        self.slots[slot.index()].state = SlotState::Returned;
        Ok(())
    }

    /// The partials that `peer` returned, `[max_tokens_per_rank, hidden]`; row `i` is the result of row `i` dispatched to it.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is returned.
    ///
    /// # Panics
    /// If there is no such peer.
    pub(crate) fn returned(&self, slot: Slot, peer: usize) -> Result<&[f32], ExchangeError> {
        self.expect(slot, SlotState::Returned)?;
        // SAFETY: the peer stored its combine flag after it wrote the partials, and writes them again only after it has
        // seen our dispatch flag of the slot's next exchange, which is stored through `&mut self`.
        Ok(unsafe { self.windows.returned[self.windows.area(slot, peer)].as_slice() })
    }

    /// Ends the exchange after its partials were read; the slot becomes idle.
    ///
    /// # Errors
    /// [`ExchangeError::State`] unless the slot is returned.
    pub(crate) fn finish(&mut self, slot: Slot) -> Result<(), ExchangeError> {
        self.expect(slot, SlotState::Returned)?;
        self.slots[slot.index()].state = SlotState::Idle;
        Ok(())
    }

    /// Ends the group: reports to every peer that this rank failed, so that none waits for it.
    pub(crate) fn abort(&mut self) {
        if !self.ended {
            self.report(FaultCause::Failed);
            self.ended = true;
        }
    }

    fn progress(&self, slot: Slot) -> Result<&SlotProgress, ExchangeError> {
        self.slots.get(slot.index()).ok_or(ExchangeError::Slot { slot, slots: self.slots.len() })
    }

    /// Fails unless the slot is in state `expected`.
    pub(crate) fn expect(&self, slot: Slot, expected: SlotState) -> Result<(), ExchangeError> {
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
                // A flag of another generation does not count, whatever its sequence.
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
        let ExchangeOptions { spin, deadline, .. } = self.options;
        let failure = match windows.doorbell(me).wait_running(spin, deadline, poll) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(failure)) => failure,
            Err(TimedOut) => {
                let missing = (next..windows.shape.ranks).filter(|&peer| arrived(peer) != Ok(true));
                let peers: Vec<Rank> = missing.map(|peer| Rank(peer as u32)).collect();
                if peers.is_empty() {
                    return Ok(());
                }
                ExchangeError::Missing { phase: kind.phase(), sequence, peers, waited: deadline }
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

    /// The fault in this rank's error word, if there is one of this generation.
    fn reported(&self) -> Option<ExchangeError> {
        let word = self.windows.error(self.options.rank.index()).load(Ordering::Acquire);
        decode_fault(self.windows.generation, word).map(|(rank, cause)| ExchangeError::Fault { rank, cause })
    }

    /// Ends the group because of `failure`, and reports it to the peers unless a peer reported it.
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

    /// Stores an error word in every window that has none, and wakes the windows' owners.
    fn report(&self, cause: FaultCause) {
        let value = encode_fault(self.windows.generation, self.options.rank, cause);
        for peer in 0..self.windows.shape.ranks {
            // Only the first fault is kept: later ones are its consequences.
            let _ = self.windows.error(peer).compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed);
            self.windows.doorbell(peer).ring();
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // A rank that leaves during an exchange will not store the flags that its peers wait for.
        if self.slots.iter().any(|slot| slot.state != SlotState::Idle) {
            self.abort();
        }
    }
}

#[cfg(test)]
mod tests;
