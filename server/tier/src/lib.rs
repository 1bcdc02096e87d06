//! The wire of a mixed group: one *source rank* gets all rows and sends them to *CPU ranks*, which return sums.
//!
//! For each step of a layer that has experts on CPU ranks:
//!
//! 1. The source writes the step's rows once, with the ids and weights that its gate chose, and stores the word `sent`.
//! 2. Every CPU rank waits for that word ([`WorkerWire::wait`]), computes for each row the weighted sum over the experts that it owns
//!    (zeros if the row chose none of them), writes the sums ([`WorkerWire::step`]) and stores its word `done` ([`WorkerWire::finish`]).
//! 3. The source looks for these words ([`SourceWire::arrived`]) and adds the sums in the order of ranks.
//!
//! A source that computes all experts of a step by itself sends no rows: it stores the step's word at `spared`, then at `sent`
//! ([`SourceWire::spare`]), and CPU ranks complete the step without sums.
//!
//! Words are `generation << 40 | sequence`, where the sequence is that of the router's step descriptor, which all ranks of the step
//! have. No word says that a slot may be written again, because the router launches a step in a slot only after every rank has
//! completed the slot's previous step: the source has read the sums by then, and CPU ranks have read the rows.
//!
//! The memory is new for each generation, and each rank claims its side of it once: what a rank of an earlier generation writes late
//! reaches memory that nobody reads any more. A peer that dies or stops leaves its word unset; the wait for it has a deadline, and
//! the router ends the generation earlier if it notices.
//!
//! The source may be a GPU, which writes and reads the same places through its own addresses of the pinned memory
//! ([`SourceWire::pages`], [`SlotPlaces`]).

#![allow(unsafe_code, reason = "makes slices of shared memory while the protocol assigns it to this rank")]

mod layout;
pub mod slots;
mod source;
mod streaming;
mod worker;

pub use layout::{MAX_WORKERS, SlotPlaces, TierLayout, TierShape, WireError};
pub use source::{Outgoing, SourceWire};
pub use streaming::{
    Last, ShareBalance, StreamedExperts, counts_for_slots, least_divided, next_chunk, pays, share_of,
    stream_rows_of, streamed_share, touched_share,
};
pub use worker::{Arrival, Incoming, WorkerWire};

use std::time::{Duration, Instant};

use expertd_shm::ObservedTime;
use expertd_types::{Generation, Sequence};

/// Low bits of a word, which hold the sequence; the generation is in the bits above.
const SEQUENCE_BITS: u32 = 40;

/// The value of a word whose writer has reached step `sequence` of `generation`.
#[must_use]
pub const fn word(generation: Generation, sequence: Sequence) -> u64 {
    generation.0 << SEQUENCE_BITS | sequence.0
}

/// For tests (see [`expertd_shm::faults`]): if this variable is set, memory of the wire is filled with NaN before each step, so that a step
/// that reads what no rank has written is noticed.
const POISON: &str = "EXPERTD_TIER_POISON";

fn is_poisoned() -> bool {
    expertd_shm::faults::setting(POISON).is_some()
}

/// Pause between two looks at a word after spinning. A device cannot ring a doorbell.
const NAP: Duration = Duration::from_micros(20);
/// The pause of a long wait, whose peer computes something long.
const LONG_NAP: Duration = Duration::from_micros(200);
/// A wait is long after this time.
const LONG: Duration = Duration::from_millis(5);

/// Polls until `poll` returns true: spins for `spin`, then looks again after naps. Returns the time waited if that reaches
/// `limit`; a pause of this process does not count.
fn wait_for(
    spin: Duration,
    limit: Duration,
    mut poll: impl FnMut() -> Result<bool, WireError>,
) -> Result<Option<Duration>, WireError> {
    let mut time = ObservedTime::start(Instant::now());
    while !poll()? {
        match time.look(Instant::now()) {
            waited if waited < spin => std::hint::spin_loop(),
            waited if waited < limit => std::thread::sleep(if waited < LONG { NAP } else { LONG_NAP }),
            waited => return Ok(Some(waited)),
        }
    }
    Ok(None)
}

/// Whether a word has the value that a wait expects.
///
/// # Errors
/// [`WireError::Ahead`] if it belongs to a later step of the same generation.
fn has_come(found: u64, expected: u64, whose: &'static str) -> Result<bool, WireError> {
    if found > expected && found >> SEQUENCE_BITS == expected >> SEQUENCE_BITS {
        let sequence = |word: u64| Sequence(word & ((1 << SEQUENCE_BITS) - 1));
        return Err(WireError::Ahead { whose, expected: sequence(expected), found: sequence(found) });
    }
    Ok(found == expected)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
