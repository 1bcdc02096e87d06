//! A CPU rank's side of the wire.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use half::bf16;

use expertd_shm::region::SharedRegion;
use expertd_types::{Generation, Rank, Sequence, Slot};

use crate::layout::{Returned, Sent, TierLayout, TierShape, WireError};
use crate::{has_come, is_poisoned, wait_for, word};

/// A CPU rank's side of the wire.
#[derive(Debug)]
pub struct WorkerWire {
    shape: TierShape,
    generation: Generation,
    /// `[slots]`.
    sent: Vec<Sent>,
    /// `[slots]`.
    returned: Vec<Returned>,
    /// See [`POISON`](crate::POISON).
    pub(crate) is_poisoned: bool,
}

/// The rows of a step and the choices of the source's gate.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// `[tokens, k]`; -1 for a choice that no CPU rank computes. Ids outside of the layer's experts belong to no rank.
    pub ids: &'a [i32],
    /// `[tokens, k]`.
    pub weights: &'a [f32],
    /// `[tokens, stride]`.
    pub rows: &'a [bf16],
}

/// The source's message about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Its rows have come.
    Rows,
    /// The source computes it by itself.
    Spared,
}

impl WorkerWire {
    /// Maps the wire, claims the place of `rank`, which is at least 1, and makes the pages present that this rank accesses.
    ///
    /// # Errors
    /// If the memory is that of another group or generation, or the place was claimed before.
    pub fn join(
        shape: TierShape,
        generation: Generation,
        rank: Rank,
        fd: OwnedFd,
    ) -> Result<Self, WireError> {
        let layout = TierLayout::new(shape)?;
        let Some(worker) = rank.index().checked_sub(1).filter(|&worker| worker < shape.workers) else {
            return Err(WireError::Rank { rank: rank.index(), ranks: shape.workers + 1 });
        };
        let region = SharedRegion::from_fd(fd, layout.bytes())?;
        layout.claim(&region, rank.index(), generation)?;
        for slot in layout.slots() {
            region.populate(slot.sent, slot.done[0] - slot.sent)?;
            let sums = shape.max_tokens * shape.stride() * size_of::<f32>();
            region.populate(slot.done[worker], slot.sums[worker] - slot.done[worker] + sums)?;
        }
        let (sent, returned) = (layout.sent(&region)?, layout.returned(&region, worker)?);
        Ok(WorkerWire { shape, generation, sent, returned, is_poisoned: is_poisoned() })
    }

    /// The sizes.
    #[must_use]
    pub const fn shape(&self) -> &TierShape {
        &self.shape
    }

    /// Begins a step of the slot.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn begin(&mut self, slot: Slot) {
        if self.is_poisoned {
            // SAFETY: only this rank writes its sums (one process by its claim), and the source has read those of the slot's previous
            // step, which every rank has completed.
            unsafe { self.returned[slot.index()].sums.as_mut_slice().fill(f32::NAN) };
        }
    }

    /// Waits until the source has sent the step's rows, or has said that it needs no sums: spins for `spin`, then looks again after naps.
    ///
    /// # Errors
    /// If the source does not send them within `limit`, or is at a later step.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn wait(
        &self,
        slot: Slot,
        sequence: Sequence,
        spin: Duration,
        limit: Duration,
    ) -> Result<Arrival, WireError> {
        let expected = word(self.generation, sequence);
        let Sent { word: sent, spared, .. } = &self.sent[slot.index()];
        let come = || has_come(sent.atomics()[0].load(Ordering::Acquire), expected, "the source rank");
        match wait_for(spin, limit, come)? {
            None if spared.atomics()[0].load(Ordering::Relaxed) == expected => Ok(Arrival::Spared),
            None => Ok(Arrival::Rows),
            Some(waited) => Err(WireError::Late { sequence, waited }),
        }
    }

    /// The rows and choices of a step for which [`wait`](Self::wait) has returned, and the memory for its sums, `[tokens, stride]`.
    /// `&mut self` excludes a second borrow.
    ///
    /// # Errors
    /// If the step does not fit, or its rows have not come.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn step(
        &mut self,
        slot: Slot,
        sequence: Sequence,
        tokens: usize,
        k: usize,
    ) -> Result<(Incoming<'_>, &mut [f32]), WireError> {
        self.shape.check(tokens, k)?;
        let sent = &self.sent[slot.index()];
        let found = sent.word.atomics()[0].load(Ordering::Acquire);
        if !has_come(found, word(self.generation, sequence), "the source rank")? {
            return Err(WireError::Late { sequence, waited: Duration::ZERO });
        }
        let elements = tokens * self.shape.stride();
        // SAFETY: the source has stored its word after it wrote the rows and choices (just loaded), and writes them again only in the
        // slot's next step, which the router launches after this rank has completed this one. Only this rank writes its sums (one
        // process by its claim), and the source reads them only after this rank's word of the step, which `finish` stores through
        // `&mut self`, and before it completes the step.
        unsafe {
            let incoming = Incoming {
                ids: &sent.ids.as_slice()[..tokens * k],
                weights: &sent.weights.as_slice()[..tokens * k],
                rows: bytemuck::cast_slice(&sent.rows.as_slice()[..elements]),
            };
            Ok((incoming, &mut self.returned[slot.index()].sums.as_mut_slice()[..elements]))
        }
    }

    /// Tells the source that this rank's sums of the step are written. Never waits.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn finish(&mut self, slot: Slot, sequence: Sequence) {
        self.returned[slot.index()].word.atomics()[0]
            .store(word(self.generation, sequence), Ordering::Release);
    }
}
