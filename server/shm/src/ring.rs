//! A ring of fixed-size records in shared memory: one producer, one consumer, no locks.
//!
//! Two counters, each on a cache line of its own, count the records ever pushed and ever popped; record number `n` is in
//! cell `n % capacity`. A cell consists of the record's words and a stamp, `n + 1`. The producer writes a cell, then
//! releases the pushed counter; the consumer acquires that counter, copies the cell, then releases the popped counter,
//! which the producer acquires before it writes to the cell again. A producer that dies while it writes a record has
//! not counted it, so the consumer never sees it.
//!
//! Each side keeps its own position privately and validates the other's counter: the other side may be dead or write
//! nonsense. A counter that runs backwards or further than the capacity, or a cell with a wrong stamp, is an error, after
//! which the ring is not used any more. Every word is an atomic, so nothing that the other side does is undefined
//! behaviour here, and both operations end after a bounded number of steps.
//!
//! Rings are not re-attached: every new process gets a fresh one. A ring wakes no waiter; a producer pushes and then rings
//! the other side's [`Doorbell`](super::wait::Doorbell).

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;

use super::region::{LINE, Layout, RegionError, SharedRegion, SharedSlice};

/// Why a ring cannot be used, or cannot be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum RingError {
    /// The record size is not a positive multiple of eight bytes, or the capacity is not a power of two.
    #[error(
        "a ring of {capacity} records of {record_bytes} bytes: the capacity must be a power of two, the record size a \
         positive multiple of 8"
    )]
    Shape { capacity: usize, record_bytes: usize },
    /// This side's counter is not zero: another process has used the ring.
    #[error(
        "the ring has been used before (its {side} counter is {count}); a new process needs a fresh ring"
    )]
    Used { side: &'static str, count: u64 },
    #[error(
        "the ring's {side} counter is {found}, which cannot follow {last} in a ring of {capacity} records"
    )]
    Counter { side: &'static str, found: u64, last: u64, capacity: u64 },
    /// The pushed counter includes a record that its cell does not hold.
    #[error(
        "the ring's cell for record {record} has stamp {found} instead of {}: the record was counted, but not written",
        .record.wrapping_add(1)
    )]
    Stamp { record: u64, found: u64 },
}

/// A 64-bit atomic; generic so that loom can check the ring.
pub trait Word64 {
    /// Loads the word.
    fn load(&self, order: Ordering) -> u64;
    /// Stores `value` in the word.
    fn store(&self, value: u64, order: Ordering);
}

impl Word64 for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

/// The memory of a ring, which is zero when the ring is made.
pub trait RingMemory {
    /// The counters' atomics.
    type Word: Word64;
    /// Type of the cells' words. They are atomics although two correct sides never access a cell at once: the other side
    /// may be incorrect.
    type Cell: Word64;
    /// Counter of all records pushed; written by the producer.
    fn pushed(&self) -> &Self::Word;
    /// Counter of all records popped; written by the consumer.
    fn popped(&self) -> &Self::Word;
    /// The cells, each with the record's words and a stamp.
    fn cells(&self) -> &[Self::Cell];
}

/// Offset and capacity of a ring of `T` records in a region. Both sides compute them from the same layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout<T> {
    offset: usize,
    capacity: usize,
    record: PhantomData<fn() -> T>,
}

const WORD: usize = size_of::<u64>();
const WORDS_PER_LINE: usize = LINE / WORD;

impl<T: Pod> RingLayout<T> {
    /// Appends a ring of `capacity` records, a power of two, to a layout.
    pub fn reserve(layout: &mut Layout, capacity: usize) -> Result<Self, RegionError> {
        let bytes = capacity.saturating_mul(size_of::<T>() + WORD).saturating_add(2 * LINE);
        Ok(Self { offset: layout.line(bytes)?, capacity, record: PhantomData })
    }

    /// Offset of the ring in its region, in bytes.
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// The ring's memory in `region`.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`] if the region has another layout.
    pub fn memory(&self, region: &Arc<SharedRegion>) -> Result<SharedRing, RegionError> {
        let words = 2 * WORDS_PER_LINE + self.capacity * (size_of::<T>() / WORD + 1);
        Ok(SharedRing(region.slice(self.offset, words)?))
    }
}

/// The memory of a ring in a region: a cache line for each counter, then the cells.
#[derive(Clone, Debug)]
pub struct SharedRing(SharedSlice<u64>);

impl RingMemory for SharedRing {
    type Word = AtomicU64;
    type Cell = AtomicU64;
    fn pushed(&self) -> &AtomicU64 {
        &self.0.atomics()[0]
    }
    fn popped(&self) -> &AtomicU64 {
        &self.0.atomics()[WORDS_PER_LINE]
    }
    fn cells(&self) -> &[AtomicU64] {
        &self.0.atomics()[2 * WORDS_PER_LINE..]
    }
}

/// State of one end of a ring.
#[derive(Debug)]
struct RingEnd<T, M> {
    memory: M,
    /// Capacity in records.
    capacity: u64,
    /// Number of records that this side has pushed or popped; the shared counter is a copy for the other side.
    position: u64,
    /// The other side's counter when it was last loaded.
    other: u64,
    record: PhantomData<fn(T) -> T>,
}

impl<T: Pod, M: RingMemory> RingEnd<T, M> {
    const RECORD_WORDS: usize = size_of::<T>() / WORD;

    fn new(memory: M) -> Result<Self, RingError> {
        let capacity = memory.cells().len() / (Self::RECORD_WORDS + 1);
        if !capacity.is_power_of_two() || size_of::<T>() == 0 || !size_of::<T>().is_multiple_of(WORD) {
            return Err(RingError::Shape { capacity, record_bytes: size_of::<T>() });
        }
        Ok(Self { memory, capacity: capacity as u64, position: 0, other: 0, record: PhantomData })
    }

    /// Words and stamp of the cell of record `n`.
    fn cell(&self, n: u64) -> (&[M::Cell], &M::Cell) {
        let begin = (n % self.capacity) as usize * (Self::RECORD_WORDS + 1);
        let cell = &self.memory.cells()[begin..=begin + Self::RECORD_WORDS];
        (&cell[..Self::RECORD_WORDS], &cell[Self::RECORD_WORDS])
    }
}

/// The pushing end of a ring of `T` records.
#[derive(Debug)]
pub struct RingProducer<T, M = SharedRing>(RingEnd<T, M>);

impl<T: Pod, M: RingMemory> RingProducer<T, M> {
    /// Takes the pushing end of a fresh ring.
    pub fn new(memory: M) -> Result<Self, RingError> {
        let end = RingEnd::new(memory)?;
        match end.memory.pushed().load(Ordering::Acquire) {
            0 => Ok(Self(end)),
            count => Err(RingError::Used { side: "pushed", count }),
        }
    }

    /// Pushes a record; returns false if the ring is full.
    ///
    /// # Errors
    /// [`RingError::Counter`] if the consumer's counter is impossible.
    pub fn try_push(&mut self, record: &T) -> Result<bool, RingError> {
        if self.0.position.wrapping_sub(self.0.other) >= self.0.capacity {
            self.update_popped()?;
            if self.0.position.wrapping_sub(self.0.other) >= self.0.capacity {
                return Ok(false);
            }
        }
        let end = &mut self.0;
        let (words, stamp) = end.cell(end.position);
        for (word, bytes) in words.iter().zip(bytemuck::bytes_of(record).as_chunks::<WORD>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        stamp.store(end.position.wrapping_add(1), Ordering::Relaxed);
        end.position = end.position.wrapping_add(1);
        end.memory.pushed().store(end.position, Ordering::Release);
        Ok(true)
    }

    /// Number of records pushed so far.
    pub const fn pushed(&self) -> u64 {
        self.0.position
    }

    /// Number of records that the consumer has not popped.
    ///
    /// # Errors
    /// [`RingError::Counter`] if the consumer's counter is impossible.
    pub fn waiting(&mut self) -> Result<u64, RingError> {
        self.update_popped()?;
        Ok(self.0.position.wrapping_sub(self.0.other))
    }

    /// Loads the consumer's counter and checks it.
    fn update_popped(&mut self) -> Result<(), RingError> {
        let end = &mut self.0;
        let popped = end.memory.popped().load(Ordering::Acquire);
        // The counter must lie between its previous value and the position, in wrapping arithmetic.
        if popped.wrapping_sub(end.other) > end.position.wrapping_sub(end.other) {
            return Err(RingError::Counter {
                side: "popped",
                found: popped,
                last: end.other,
                capacity: end.capacity,
            });
        }
        end.other = popped;
        Ok(())
    }
}

/// The popping end of a ring of `T` records.
#[derive(Debug)]
pub struct RingConsumer<T, M = SharedRing>(RingEnd<T, M>);

impl<T: Pod, M: RingMemory> RingConsumer<T, M> {
    /// Takes the popping end of a fresh ring, in which records may have been pushed already.
    pub fn new(memory: M) -> Result<Self, RingError> {
        let end = RingEnd::new(memory)?;
        match end.memory.popped().load(Ordering::Acquire) {
            0 => Ok(Self(end)),
            count => Err(RingError::Used { side: "popped", count }),
        }
    }

    /// Pops the oldest record; returns `None` if the ring is empty.
    ///
    /// # Errors
    /// [`RingError::Counter`] if the producer's counter is impossible, [`RingError::Stamp`] if the cell was not written.
    pub fn try_pop(&mut self) -> Result<Option<T>, RingError> {
        let end = &mut self.0;
        if end.position == end.other {
            let pushed = end.memory.pushed().load(Ordering::Acquire);
            // All records counted before have been popped, so the difference is the number of records waiting.
            if pushed.wrapping_sub(end.position) > end.capacity {
                return Err(RingError::Counter {
                    side: "pushed",
                    found: pushed,
                    last: end.other,
                    capacity: end.capacity,
                });
            }
            end.other = pushed;
            if end.position == end.other {
                return Ok(None);
            }
        }
        let (words, stamp) = end.cell(end.position);
        let found = stamp.load(Ordering::Relaxed);
        if found != end.position.wrapping_add(1) {
            return Err(RingError::Stamp { record: end.position, found });
        }
        let mut record = T::zeroed();
        for (word, bytes) in words.iter().zip(bytemuck::bytes_of_mut(&mut record).as_chunks_mut::<WORD>().0) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        end.position = end.position.wrapping_add(1);
        end.memory.popped().store(end.position, Ordering::Release);
        Ok(Some(record))
    }

    /// Number of records popped so far.
    pub const fn popped(&self) -> u64 {
        self.0.position
    }
}

#[cfg(test)]
mod tests;
