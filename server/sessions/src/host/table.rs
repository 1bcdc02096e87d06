//! The calls of one session as a state machine without threads, clock or I/O: which requests may enter, which end the
//! session, and when its memory is no longer used.

use std::collections::HashMap;
use std::ops::Range;

use expertd_session::wire::ALIGN;

/// Places of a request in the row area, in bytes. Empty ranges stand for parts that the request lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    /// Rows, ids, weights and token ids that the service reads.
    pub(super) read: [Range<usize>; 4],
    /// Output rows, ids and weights that the service writes.
    pub(super) written: [Range<usize>; 3],
    /// Bytes that the service copies at admission and holds until the completion.
    pub(super) copied: usize,
}

/// What happens to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It is in flight now.
    Admitted,
    /// It fails with INVALID_ARGUMENT, for this reason.
    Invalid(String),
    /// It fails with RESOURCE_EXHAUSTED, for this reason.
    Full(String),
    /// The session ends; no client waits for the call.
    Closing,
}

/// The calls in flight of one session.
#[derive(Debug)]
pub(super) struct CallTable {
    capacity: usize,
    area: usize,
    copied: usize,
    calls: HashMap<u64, Places>,
    is_closing: bool,
}

impl CallTable {
    /// For `capacity` calls in flight and a row area of `area` bytes. Copies of ids and weights are bounded by the size of the
    /// area, too.
    pub(super) fn new(capacity: usize, area: usize) -> Self {
        CallTable { capacity, area, copied: 0, calls: HashMap::new(), is_closing: false }
    }

    /// Whether the client exceeds its calls in flight, with `unread` completions that it has not popped: the ring of
    /// completions could not take an answer.
    pub(super) fn exceeds(&self, unread: u64) -> bool {
        self.calls.len() as u64 + unread >= self.capacity as u64
    }

    /// Admits a request, or says why not.
    pub(super) fn admit(&mut self, call: u64, places: Places) -> Admission {
        if self.is_closing {
            return Admission::Closing;
        }
        let area = self.area;
        let outside = |range: &&Range<usize>| {
            range.start > range.end
                || range.end > area
                || (!range.is_empty() && !range.start.is_multiple_of(ALIGN))
        };
        if let Some(range) = places.read.iter().chain(&places.written).find(outside) {
            return Admission::Invalid(format!(
                "bytes {range:?} must lie within the row area of {area} bytes and begin at a multiple of {ALIGN}"
            ));
        }
        if self.calls.contains_key(&call) {
            return Admission::Invalid(format!("a call with number {call} is in flight"));
        }
        if let Some((a, b)) = places.conflict_within() {
            return Admission::Invalid(format!(
                "the call writes bytes {a:?} and uses bytes {b:?}; they overlap"
            ));
        }
        if let Some((number, a, b)) = self
            .calls
            .iter()
            .find_map(|(number, other)| places.conflict_with(other).map(|(a, b)| (*number, a, b)))
        {
            return Admission::Invalid(format!(
                "bytes {a:?} overlap bytes {b:?} of call {number}, which is in flight"
            ));
        }
        if self.copied.saturating_add(places.copied) > area {
            return Admission::Full(format!(
                "the ids and weights of the calls in flight exceed {area} bytes, the size of the row area"
            ));
        }
        self.copied += places.copied;
        self.calls.insert(call, places);
        Admission::Admitted
    }

    /// A call ends, with or without an answer.
    pub(super) fn complete(&mut self, call: u64) {
        if let Some(places) = self.calls.remove(&call) {
            self.copied -= places.copied;
        }
    }

    /// The session ends: no request enters any more.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
    }

    /// Number of calls in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.calls.len()
    }
}

type Conflict = (Range<usize>, Range<usize>);

impl Places {
    /// A range that the call writes and another one that it uses.
    fn conflict_within(&self) -> Option<Conflict> {
        let written = self.written.iter().enumerate();
        written.into_iter().find_map(|(at, range)| {
            self.read.iter().chain(&self.written[at + 1..]).find_map(|other| overlap(range, other))
        })
    }

    /// A range of this call and one of another call, at least one of which is written.
    fn conflict_with(&self, other: &Places) -> Option<Conflict> {
        let with = |a: &[Range<usize>], b: &[Range<usize>]| {
            a.iter().find_map(|a| b.iter().find_map(|b| overlap(a, b)))
        };
        with(&self.written, &other.read)
            .or_else(|| with(&self.written, &other.written))
            .or_else(|| with(&self.read, &other.written))
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Conflict> {
    let overlaps = !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end;
    overlaps.then(|| (a.clone(), b.clone()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn places(rows: Range<usize>, output: Range<usize>) -> Places {
        Places { read: [rows, 0..0, 0..0, 0..0], written: [output, 0..0, 0..0], copied: 8 }
    }

    #[test]
    fn inputs_may_be_shared_and_outputs_may_not() {
        let mut table = CallTable::new(4, 1024);
        assert_eq!(table.admit(1, places(0..64, 64..128)), Admission::Admitted);
        assert_eq!(table.admit(2, places(0..64, 128..192)), Admission::Admitted);
        for (rows, output) in [(0..64, 64..128), (0..64, 0..64), (64..128, 256..320), (512..640, 576..704)] {
            assert!(matches!(table.admit(3, places(rows, output)), Admission::Invalid(_)));
        }
        table.complete(1);
        assert_eq!(table.admit(3, places(0..64, 64..128)), Admission::Admitted);
    }

    #[test]
    fn ranges_outside_the_area_and_numbers_in_flight_are_refused() {
        let mut table = CallTable::new(4, 1024);
        for rows in [0..1025, 960..1088, 32..96, usize::MAX - 63..usize::MAX] {
            assert!(matches!(table.admit(1, places(rows, 0..0)), Admission::Invalid(_)));
        }
        assert_eq!(table.admit(1, places(0..64, 64..128)), Admission::Admitted);
        assert!(matches!(table.admit(1, places(0..64, 128..192)), Admission::Invalid(_)));
        let large = Places { copied: 1020, ..places(0..64, 128..192) };
        assert!(matches!(table.admit(2, large), Admission::Full(_)));
    }

    #[test]
    fn completions_that_are_not_popped_count() {
        let mut table = CallTable::new(2, 1024);
        assert!(!table.exceeds(1) && table.exceeds(2));
        table.admit(1, places(0..64, 64..128));
        assert!(!table.exceeds(0) && table.exceeds(1));
        table.close();
        assert_eq!(table.admit(2, places(0..64, 128..192)), Admission::Closing);
        assert_eq!(table.in_flight(), 1);
        table.complete(1);
        assert_eq!(table.in_flight(), 0);
    }

    proptest! {
        /// Random clients: at no time do two calls in flight write the same byte, or one read what another writes; counts and
        /// charges return to zero.
        #[test]
        fn calls_in_flight_never_conflict(
            steps in prop::collection::vec((0_u64..8, prop::collection::vec((0_usize..18, 0_usize..4), 7), any::<bool>()), 1..80),
        ) {
            let mut table = CallTable::new(8, 1024);
            let mut model: HashMap<u64, Places> = HashMap::new();
            for (call, ranges, complete) in steps {
                if complete {
                    table.complete(call);
                    model.remove(&call);
                    continue;
                }
                let mut ranges = ranges.into_iter().map(|(at, len)| at * 64..(at + len) * 64);
                let mut next = || ranges.next().unwrap_or_default();
                let places = Places {
                    read: [next(), next(), next(), next()],
                    written: [next(), next(), next()],
                    copied: 100,
                };
                if table.admit(call, places.clone()) == Admission::Admitted {
                    prop_assert!(model.insert(call, places).is_none());
                }
                let mut writers = [0_u32; 16];
                let mut readers = [0_u32; 16];
                for places in model.values() {
                    let units = |range: &Range<usize>| range.start / 64..range.end / 64;
                    places.written.iter().flat_map(units).for_each(|unit| writers[unit] += 1);
                    let mut mine: Vec<usize> = places.read.iter().flat_map(units).collect();
                    mine.sort_unstable();
                    mine.dedup();
                    mine.into_iter().for_each(|unit| readers[unit] += 1);
                }
                for (writers, readers) in writers.iter().zip(readers) {
                    prop_assert!(*writers <= 1 && (*writers == 0 || readers == 0));
                }
                prop_assert_eq!(table.in_flight(), model.len());
                prop_assert_eq!(table.copied, model.len() * 100);
            }
        }
    }
}
