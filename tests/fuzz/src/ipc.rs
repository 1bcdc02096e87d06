//! What processes of the service read from each other: control messages, rings, segment tables.

use std::sync::atomic::AtomicU64;

use expertd_ipc::control::{self, FromRank, RankSetup, ToRank};
use expertd_ipc::{Completion, Segment, StepDescriptor};
use expertd_rank::segments::{CheckedSegment, RowsPlace};
use expertd_shm::ring::{RingConsumer, RingError, RingMemory, RingProducer};
use expertd_types::MemoryId;

/// The lines of a control socket, read as each kind of message.
pub fn control(data: &[u8]) {
    let mut reader = data;
    while let Ok(Some(_)) = control::receive::<FromRank>(&mut reader) {}
    let mut reader = data;
    while let Ok(Some(_)) = control::receive::<ToRank>(&mut reader) {}
    let mut reader = data;
    while let Ok(Some(_)) = control::receive::<RankSetup>(&mut reader) {}
}

/// Cells in the rings under test.
const CAPACITY: usize = 4;

struct Memory {
    pushed: AtomicU64,
    popped: AtomicU64,
    cells: Vec<AtomicU64>,
}

impl Memory {
    /// Memory for records of `record_bytes` whose words the input gives, as a hostile peer would write them.
    fn new(record_bytes: usize, words: &mut impl Iterator<Item = u64>) -> Memory {
        let mut next = || AtomicU64::new(words.next().unwrap_or(0));
        let (pushed, popped) = (next(), next());
        let cells = (0..CAPACITY * (record_bytes / 8 + 1)).map(|_| next()).collect();
        Memory { pushed, popped, cells }
    }
}

impl RingMemory for &Memory {
    type Word = AtomicU64;
    type Cell = AtomicU64;
    fn pushed(&self) -> &AtomicU64 {
        &self.pushed
    }
    fn popped(&self) -> &AtomicU64 {
        &self.popped
    }
    fn cells(&self) -> &[AtomicU64] {
        &self.cells
    }
}

/// Ring memory with arbitrary contents: both ends stop with an error or after at most a ring of records.
pub fn ring(data: &[u8]) {
    let mut words =
        data.chunks(8).map(|chunk| chunk.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)));
    let memory = Memory::new(size_of::<Completion>(), &mut words);
    if let Ok(mut consumer) = RingConsumer::<Completion, _>::new(&memory) {
        let mut records = 0;
        while let Ok(Some(completion)) = consumer.try_pop() {
            let _ = completion.text();
            let _ = completion.computed_ns();
            records += 1;
            assert!(records <= CAPACITY, "more records than the ring holds");
        }
    }
    let memory = Memory::new(size_of::<StepDescriptor>(), &mut words);
    if let Ok(mut producer) = RingProducer::<StepDescriptor, _>::new(&memory) {
        let record: StepDescriptor = bytemuck::Zeroable::zeroed();
        let mut records = 0;
        loop {
            match producer.try_push(&record) {
                Ok(true) => records += 1,
                Ok(false) | Err(RingError::Counter { .. }) => break,
                Err(error) => panic!("pushing fails with {error}"),
            }
            assert!(records <= 2 * CAPACITY, "a counter that never moves frees no cell");
        }
    }
}

/// Size of the only attached memory of [`segments`], number 7.
const MEMORY_BYTES: usize = 4096;

/// A segment table: accepted segments lie within the step's rows, and within the staging or an attached memory.
pub fn segments(data: &[u8]) {
    let Some((&[tokens, hidden, low, high], rest)) = data.split_first_chunk::<4>() else { return };
    let (tokens, hidden) = (usize::from(tokens), usize::from(hidden) + 1);
    let staged = usize::from(u16::from_le_bytes([low, high]));
    let table: Vec<Segment> =
        rest.chunks_exact(size_of::<Segment>()).map(bytemuck::pod_read_unaligned).collect();
    let memory = |memory: MemoryId| (memory == MemoryId(7)).then_some(MEMORY_BYTES);
    let Ok(checked) = CheckedSegment::all(&table, tokens, hidden, staged, memory) else { return };
    for segment in checked {
        let bytes = segment.rows.len() * hidden * segment.dtype.size();
        assert!(segment.rows.end <= tokens, "out of bounds");
        match segment.place {
            RowsPlace::Staging(place) => assert!(place.end <= staged && place.len() == bytes),
            RowsPlace::Memory { memory, input, output } => {
                assert!(memory == MemoryId(7) && input.len() == bytes && output.len() == bytes);
                assert!(input.end <= MEMORY_BYTES && output.end <= MEMORY_BYTES, "out of bounds");
                assert!(bytes == 0 || input.end <= output.start || output.end <= input.start, "overlap");
            }
        }
    }
}
