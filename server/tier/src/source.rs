//! The source rank's side of the wire.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use expertd_shm::region::{SharedRegion, SharedSlice};
use expertd_types::{Generation, Sequence, Slot};

use crate::layout::{Returned, Sent, SlotPlaces, TierLayout, TierShape, WireError};
use crate::{has_come, is_poisoned, wait_for, word};

/// The source rank's side of the wire.
#[derive(Debug)]
pub struct SourceWire {
    layout: TierLayout,
    generation: Generation,
    /// The whole memory.
    pages: SharedSlice<u8>,
    /// `[slots]`.
    sent: Vec<Sent>,
    /// `[workers][slots]`.
    returned: Vec<Vec<Returned>>,
    /// See [`POISON`](crate::POISON).
    pub(crate) is_poisoned: bool,
}

/// Where a source on the CPU writes a step's rows and the choices of its gate.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// `[tokens, k]`; -1 for a choice that no CPU rank computes.
    pub ids: &'a mut [i32],
    /// `[tokens, k]`.
    pub weights: &'a mut [f32],
    /// `[tokens, stride]`, as bits of bf16.
    pub rows: &'a mut [u16],
}

impl SourceWire {
    /// Maps and claims the wire, and makes its pages present.
    ///
    /// # Errors
    /// If the memory is that of another group or generation, or was claimed before.
    pub fn join(shape: TierShape, generation: Generation, fd: OwnedFd) -> Result<Self, WireError> {
        let layout = TierLayout::new(shape)?;
        let region = SharedRegion::from_fd(fd, layout.bytes())?;
        layout.claim(&region, 0, generation)?;
        region.populate(0, region.len())?;
        let returned = (0..shape.workers).map(|worker| layout.returned(&region, worker));
        let (sent, returned) = (layout.sent(&region)?, returned.collect::<Result<_, _>>()?);
        let pages = region.slice(0, region.len())?;
        Ok(SourceWire { layout, generation, pages, sent, returned, is_poisoned: is_poisoned() })
    }

    /// The sizes.
    #[must_use]
    pub const fn shape(&self) -> &TierShape {
        &self.layout.shape
    }

    /// Address and length in bytes of the memory, for a device that needs it pinned. Valid as long as the wire lives.
    #[must_use]
    pub fn pages(&self) -> (*mut u8, usize) {
        (self.pages.as_ptr(), self.pages.len())
    }

    /// Places of each slot, as offsets from the beginning of [`pages`](Self::pages).
    #[must_use]
    pub fn places(&self) -> &[SlotPlaces] {
        self.layout.slots()
    }

    /// Begins a step of the slot, before its rows and choices are written here or by a device.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn begin(&mut self, slot: Slot) {
        if !self.is_poisoned {
            return;
        }
        let sent = &self.sent[slot.index()];
        // SAFETY: as in `outgoing`.
        unsafe {
            sent.ids.as_mut_slice().fill(0);
            sent.weights.as_mut_slice().fill(f32::NAN);
            sent.rows.as_mut_slice().fill(u16::MAX);
        }
    }

    /// The memory for a step's rows and choices. `&mut self` excludes a second borrow.
    ///
    /// # Errors
    /// If the step does not fit.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn outgoing(&mut self, slot: Slot, tokens: usize, k: usize) -> Result<Outgoing<'_>, WireError> {
        self.layout.shape.check(tokens, k)?;
        let sent = &self.sent[slot.index()];
        // SAFETY: only the source writes these places (one process by its claim), and CPU ranks read them only between this rank's
        // word of a step and the step's completion. The router gives this rank a step of the slot after every rank has completed
        // the slot's previous one.
        unsafe {
            Ok(Outgoing {
                ids: &mut sent.ids.as_mut_slice()[..tokens * k],
                weights: &mut sent.weights.as_mut_slice()[..tokens * k],
                rows: &mut sent.rows.as_mut_slice()[..tokens * self.layout.shape.stride()],
            })
        }
    }

    /// Tells all CPU ranks that the step's rows and choices are written. Never waits.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn send(&mut self, slot: Slot, sequence: Sequence) {
        self.sent[slot.index()].word.atomics()[0].store(word(self.generation, sequence), Ordering::Release);
    }

    /// Tells all CPU ranks that the source computes the step by itself: no rows follow, and no sums are expected. Never waits.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn spare(&mut self, slot: Slot, sequence: Sequence) {
        let spared = &self.sent[slot.index()].spared.atomics()[0];
        // Ordered by the release of `send`.
        spared.store(word(self.generation, sequence), Ordering::Relaxed);
        self.send(slot, sequence);
    }

    /// Whether the sums of every CPU rank have arrived. Never waits.
    ///
    /// # Errors
    /// If a CPU rank is at a later step.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn arrived(&self, slot: Slot, sequence: Sequence) -> Result<bool, WireError> {
        let expected = word(self.generation, sequence);
        for returned in &self.returned {
            let found = returned[slot.index()].word.atomics()[0].load(Ordering::Acquire);
            if !has_come(found, expected, "a CPU rank")? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until the sums of every CPU rank have arrived: spins for `spin`, then looks again after naps.
    ///
    /// # Errors
    /// [`WireError::Missing`] if they do not come within `limit`, or the error of [`arrived`](Self::arrived).
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn wait(
        &self,
        slot: Slot,
        sequence: Sequence,
        spin: Duration,
        limit: Duration,
    ) -> Result<(), WireError> {
        match wait_for(spin, limit, || self.arrived(slot, sequence))? {
            None => Ok(()),
            Some(waited) => Err(self.missing(slot, sequence, waited)),
        }
    }

    /// The error that names the CPU ranks whose sums of the step have not arrived after `waited`.
    ///
    /// # Panics
    /// If there is no such slot.
    #[must_use]
    pub fn missing(&self, slot: Slot, sequence: Sequence, waited: Duration) -> WireError {
        let expected = word(self.generation, sequence);
        let late = |returned: &[Returned]| {
            returned[slot.index()].word.atomics()[0].load(Ordering::Acquire) != expected
        };
        let ranks = (1..).zip(&self.returned).filter(|(_, returned)| late(returned)).map(|(rank, _)| rank);
        WireError::Missing { sequence, ranks: ranks.collect(), waited }
    }

    /// The sums of one CPU rank, `[tokens, stride]`, after [`wait`](Self::wait) or once [`arrived`](Self::arrived) has said so.
    ///
    /// # Errors
    /// If the step does not fit, or the sums have not arrived.
    ///
    /// # Panics
    /// If there is no such slot or CPU rank.
    pub fn sums(
        &self,
        slot: Slot,
        sequence: Sequence,
        worker: usize,
        tokens: usize,
    ) -> Result<&[f32], WireError> {
        self.layout.shape.check(tokens, 0)?;
        let returned = &self.returned[worker][slot.index()];
        let found = returned.word.atomics()[0].load(Ordering::Acquire);
        if !has_come(found, word(self.generation, sequence), "a CPU rank")? {
            return Err(WireError::Missing { sequence, ranks: vec![worker + 1], waited: Duration::ZERO });
        }
        // SAFETY: the CPU rank has stored its word after it wrote the sums (just loaded), and writes them again only in the slot's next
        // step, which the router launches after this rank has completed this one; that needs `&mut` of the caller's step.
        let sums = unsafe { returned.sums.as_slice() };
        Ok(&sums[..tokens * self.layout.shape.stride()])
    }
}
