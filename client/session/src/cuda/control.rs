//! The control region of a CUDA session: a memfd that the service makes, and that the client registers with its GPU.
//!
//! The client may write anything anywhere in it at any time. The service takes a ring by exchange, which is a copy, and copies the routing of
//! a call once. It writes statuses, completion words and returned routing. Doorbells are in host memory: waits for words in device memory
//! starve the writes that would end them.
//!
//! A doorbell is a 64-bit word. Its lower half is the completion word, its upper half the ring. The client's stream starts a call by one
//! store to both, which clears the completion word; since a stream runs in order, the ring also says that it has seen the completion word of
//! its last call.

use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use bytemuck::Zeroable as _;
use expertd_shm::region::{LINE, RegionError, SharedRegion, SharedSlice};

use super::wire::{
    ControlLayout, DONE, FAILED, KIND_CUDA, MAX_DOORBELLS, OpenedCuda, PENDING, RELEASED, Ring,
    STATUS_STRIDE, StatusRecord,
};
use crate::wire::{CompletionRecord, VERSION};

/// Index of the ring among the 32-bit words of a doorbell's line; the completion word is the first.
const RING: usize = 1;
/// Index of the last ended call's number among the 64-bit words of a doorbell's line.
const NUMBER: usize = 1;
/// 64-bit words of a status.
const STATUS_WORDS: usize = size_of::<StatusRecord>() / 8;
/// Index of the last call's weight version among the words of a status.
const LAST_VERSION: usize =
    (offset_of!(StatusRecord, last) + offset_of!(CompletionRecord, weight_version)) / 8;
/// How often a status is read again while the service changes it.
const STATUS_READS: usize = 1000;

/// How the calls of a doorbell ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Number of calls that ended.
    pub calls: u64,
    /// Number of calls that failed.
    pub failures: u64,
    /// Version of the weights that computed the last call; 0 if it failed.
    pub weight_version: u64,
    /// Number of answered calls that other weights computed than the answered call before.
    pub moves: u32,
}

/// The control region of one session.
#[derive(Debug)]
pub struct ControlMemory {
    region: Arc<SharedRegion>,
    layout: ControlLayout,
    /// Lines of doorbells as 64-bit words.
    lines: SharedSlice<u64>,
    /// The same lines as 32-bit words.
    halves: SharedSlice<u32>,
    routing: SharedSlice<u32>,
    statuses: SharedSlice<u64>,
    count: u32,
}

impl ControlMemory {
    /// Makes a region with `doorbells` doorbells and `routing_bytes` bytes for routing each.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create(doorbells: u32, routing_bytes: u32) -> Result<Self, RegionError> {
        let layout = ControlLayout::new(doorbells, routing_bytes)?;
        let region = SharedRegion::create("expertd-session-control", layout.bytes)?;
        region.avoid_huge_pages();
        region.populate(0, layout.bytes)?;
        Self::over(region, layout, doorbells)
    }

    /// Maps the region that the service made.
    ///
    /// # Errors
    /// If the descriptor is no such region, or the offsets do not fit it.
    pub fn join(fd: OwnedFd, opened: &OpenedCuda) -> Result<Self, RegionError> {
        let too_large = |offset: u64| RegionError::TooLarge { offset: offset as usize, bytes: usize::MAX };
        if opened.doorbells == 0 || opened.doorbells > MAX_DOORBELLS {
            return Err(too_large(opened.doorbells.into()));
        }
        let bytes = usize::try_from(opened.region_bytes).map_err(|_| too_large(opened.region_bytes))?;
        let region = SharedRegion::from_fd(fd, bytes)?;
        let layout = ControlLayout {
            doorbells: opened.doorbells_offset as usize,
            routing: opened.routing_offset as usize,
            routing_bytes: opened.routing_bytes as usize,
            statuses: opened.statuses_offset as usize,
            bytes,
        };
        Self::over(region, layout, opened.doorbells)
    }

    fn over(region: Arc<SharedRegion>, layout: ControlLayout, doorbells: u32) -> Result<Self, RegionError> {
        let count = doorbells as usize;
        // What the GPU uses lies before the statuses: `signals` is what a client registers.
        let signals = [(layout.doorbells, count * LINE), (layout.routing, count * layout.routing_bytes)];
        for (offset, bytes) in signals {
            if offset.checked_add(bytes).is_none_or(|end| end > layout.statuses) {
                return Err(RegionError::OutOfBounds { offset, bytes, len: layout.statuses });
            }
        }
        Ok(ControlMemory {
            lines: region.slice(layout.doorbells, count * LINE / 8)?,
            halves: region.slice(layout.doorbells, count * LINE / 4)?,
            routing: region.slice(layout.routing, count * layout.routing_bytes / 4)?,
            statuses: region.slice(layout.statuses, count * STATUS_STRIDE / 8)?,
            region,
            layout,
            count: doorbells,
        })
    }

    /// The description of the region for the client.
    #[must_use]
    pub fn opened(&self, session: u64, hidden: u32) -> OpenedCuda {
        OpenedCuda {
            version: VERSION,
            kind: KIND_CUDA,
            session,
            region_bytes: self.region.len() as u64,
            doorbells_offset: self.layout.doorbells as u64,
            routing_offset: self.layout.routing as u64,
            statuses_offset: self.layout.statuses as u64,
            doorbells: self.count,
            hidden,
            routing_bytes: self.layout.routing_bytes as u32,
            reserved: 0,
        }
    }

    /// The region, whose descriptor the client receives.
    #[must_use]
    pub const fn region(&self) -> &Arc<SharedRegion> {
        &self.region
    }

    /// The doorbells and their routing areas, for registering the pages with a device: all bytes before the statuses.
    #[must_use]
    pub const fn signals(&self) -> (*mut u64, usize) {
        (self.lines.as_ptr(), self.layout.statuses)
    }

    /// Number of doorbells.
    #[must_use]
    pub const fn doorbells(&self) -> u32 {
        self.count
    }

    /// Offset of a doorbell in the region, in bytes. Its completion word is at the same place.
    #[must_use]
    pub const fn doorbell_offset(&self, doorbell: u32) -> usize {
        self.layout.doorbells + doorbell as usize * LINE
    }

    /// Offset in the region of the number of the doorbell's last call that ended, a 64-bit word, in bytes.
    #[must_use]
    pub const fn number_offset(&self, doorbell: u32) -> usize {
        self.doorbell_offset(doorbell) + NUMBER * 8
    }

    /// Size of each doorbell's routing area, in bytes.
    #[must_use]
    pub const fn routing_bytes(&self) -> usize {
        self.layout.routing_bytes
    }

    /// Offset of a doorbell's routing area in the region, in bytes.
    #[must_use]
    pub const fn routing_offset(&self, doorbell: u32) -> usize {
        self.layout.routing + doorbell as usize * self.layout.routing_bytes
    }

    /// A doorbell's routing area, which the client's GPU copies to and from.
    #[must_use]
    pub fn routing_area(&self, doorbell: u32) -> *mut u32 {
        self.routing.as_ptr().wrapping_add(doorbell as usize * self.layout.routing_bytes / 4)
    }

    /// Copies `bytes` bytes at `offset` of a doorbell's routing area, each word once. `None` if they exceed it.
    #[must_use]
    pub fn copy_routing(&self, doorbell: u32, offset: usize, bytes: usize) -> Option<Vec<u8>> {
        let words = self.routing_words(doorbell, offset, bytes)?;
        let mut copy = Vec::with_capacity(bytes);
        for word in words {
            copy.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        Some(copy)
    }

    /// Writes returned routing at `offset` of a doorbell's routing area. `None` if it exceeds the area.
    pub fn write_routing(&self, doorbell: u32, offset: usize, bytes: &[u8]) -> Option<()> {
        let to = self.routing_words(doorbell, offset, bytes.len())?;
        for (to, word) in to.iter().zip(bytes.as_chunks::<4>().0) {
            to.store(u32::from_ne_bytes(*word), Ordering::Relaxed);
        }
        Some(())
    }

    fn routing_words(&self, doorbell: u32, offset: usize, bytes: usize) -> Option<&[AtomicU32]> {
        let all = self.layout.routing_bytes;
        if doorbell >= self.count || offset.checked_add(bytes).is_none_or(|end| end > all) {
            return None;
        }
        let first = (doorbell as usize * all + offset) / 4;
        self.routing.atomics().get(first..first + bytes / 4)
    }

    /// Takes a ring of a doorbell that has `in_flight` calls in flight. Bytes that a client scribbles are a ring, too. Ranks raise
    /// completion words, so the next ring may come before the router knows that the call before it has ended. With more than one call in
    /// flight a ring stays for a later poll.
    #[must_use]
    pub fn take(&self, doorbell: u32, in_flight: u32) -> Option<Ring> {
        if in_flight > 1 || !self.is_rung(doorbell) {
            return None;
        }
        let half = self.half(doorbell, RING).swap(0, Ordering::AcqRel);
        (half != 0).then(|| Ring::from_half(half))
    }

    /// Whether a doorbell was rung and the ring was not taken.
    #[must_use]
    pub fn is_rung(&self, doorbell: u32) -> bool {
        self.half(doorbell, RING).load(Ordering::Acquire) != 0
    }

    fn half(&self, doorbell: u32, index: usize) -> &AtomicU32 {
        &self.halves.atomics()[doorbell as usize * LINE / 4 + index]
    }

    fn line(&self, doorbell: u32, index: usize) -> &AtomicU64 {
        &self.lines.atomics()[doorbell as usize * LINE / 8 + index]
    }

    fn completion_word(&self, doorbell: u32) -> &AtomicU32 {
        self.half(doorbell, 0)
    }

    /// Raises the completion word of the last taken call, which is complete, if the rank that was to raise it was killed before
    /// it did. Nothing else raises the word meanwhile, and no ring is taken. If the rank has raised the word, the doorbell is not
    /// 0: it still holds the raised word, or the client's stream has seen that and rung again.
    pub fn raise_unseen(&self, doorbell: u32) {
        let raised = u64::from(DONE);
        let _ = self.line(doorbell, 0).compare_exchange(0, raised, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Ends a doorbell's call: writes its status, then raises its completion word. `status` counts the doorbell's calls and is the
    /// service's own copy.
    pub fn complete(&self, doorbell: u32, record: &CompletionRecord, status: &mut StatusRecord) {
        self.set_status(doorbell, record, status);
        self.line(doorbell, NUMBER).store(status.calls, Ordering::Relaxed);
        self.raise(doorbell, if record.code == 0 { DONE } else { FAILED });
    }

    /// Writes the status of a doorbell's call whose completion word a rank has raised.
    pub fn set_status(&self, doorbell: u32, record: &CompletionRecord, status: &mut StatusRecord) {
        status.calls += 1;
        status.last = *record;
        if record.code != 0 {
            status.failures += 1;
            status.last_failure = *record;
        } else {
            #[allow(
                clippy::cast_possible_truncation,
                reason = "versions count from 1; two that follow each other differ in this half"
            )]
            let version = record.weight_version as u32;
            let moves = status.moved_to != 0 && status.moved_to != version;
            status.moves = status.moves.wrapping_add(moves.into());
            status.moved_to = version;
        }
        status.stamp += 2;
        let to = self.status_words(doorbell);
        let words: &[u64] = bytemuck::cast_slice(std::slice::from_ref(status));
        to[0].store(status.stamp - 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (to, word) in to[1..].iter().zip(&words[1..]) {
            to.store(*word, Ordering::Relaxed);
        }
        to[0].store(status.stamp, Ordering::Release);
    }

    fn raise(&self, doorbell: u32, value: u32) {
        self.completion_word(doorbell).store(value, Ordering::Release);
    }

    /// Raises the completion words of a new session, so that a word is 0 only while a call is in flight. The client calls this
    /// before its first call.
    pub fn raise_idle(&self) {
        for doorbell in 0..self.count {
            let word = self.completion_word(doorbell);
            let _ = word.compare_exchange(PENDING, DONE, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Releases a stream that waits for a doorbell's completion word; returns whether a stream waited. The client calls this once
    /// the service cannot write the word any more.
    pub fn release(&self, doorbell: u32) -> bool {
        let word = self.completion_word(doorbell);
        word.compare_exchange(PENDING, RELEASED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The completion word of a doorbell.
    #[must_use]
    pub fn completion(&self, doorbell: u32) -> u32 {
        self.completion_word(doorbell).load(Ordering::Acquire)
    }

    /// Number of the doorbell's last call that ended. Once a call's word is raised, it is at least that call's number; the status
    /// may follow a moment later.
    #[must_use]
    pub fn number(&self, doorbell: u32) -> u64 {
        self.line(doorbell, NUMBER).load(Ordering::Acquire)
    }

    /// A doorbell's status; `None` while the service changes it without end.
    #[must_use]
    pub fn status(&self, doorbell: u32) -> Option<StatusRecord> {
        let words = self.status_words(doorbell);
        for _ in 0..STATUS_READS {
            let before = words[0].load(Ordering::Acquire);
            let mut copy = [0_u64; STATUS_WORDS];
            for (copy, word) in copy.iter_mut().zip(words) {
                *copy = word.load(Ordering::Relaxed);
            }
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && words[0].load(Ordering::Relaxed) == before {
                let mut record = StatusRecord::zeroed();
                bytemuck::cast_slice_mut(std::slice::from_mut(&mut record)).copy_from_slice(&copy);
                return Some(record);
            }
            std::hint::spin_loop();
        }
        None
    }

    /// How a doorbell's calls ended, in short; `None` while the service changes it.
    #[must_use]
    pub fn counts(&self, doorbell: u32) -> Option<Counts> {
        let words = self.status_words(doorbell);
        let before = words[0].load(Ordering::Acquire);
        let load = |word: usize| words[word].load(Ordering::Relaxed);
        let moves: [u32; 2] = bytemuck::cast(load(3));
        let (calls, failures, weight_version) = (load(1), load(2), load(LAST_VERSION));
        let counts = Counts { calls, failures, weight_version, moves: moves[0] };
        fence(Ordering::Acquire);
        let is_stable = before.is_multiple_of(2) && words[0].load(Ordering::Relaxed) == before;
        is_stable.then_some(counts)
    }

    /// Number of a doorbell's calls that failed. It counts a call before the call's completion word is raised.
    #[must_use]
    pub fn failures(&self, doorbell: u32) -> u64 {
        self.status_words(doorbell)[2].load(Ordering::Acquire)
    }

    fn status_words(&self, doorbell: u32) -> &[AtomicU64] {
        let first = doorbell as usize * STATUS_STRIDE / 8;
        &self.statuses.atomics()[first..first + STATUS_WORDS]
    }

    /// Rings, as a stream of the client does.
    pub fn ring(&self, doorbell: u32, ring: Ring) {
        self.line(doorbell, 0).store(ring.to_word(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
