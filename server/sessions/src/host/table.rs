//! The calls of one session as a state machine without threads, clock or I/O: which requests may enter, which end the
//! session, and when its memory is no longer used.

use std::collections::HashMap;
use std::ops::Range;

use expertd_session::wire::ALIGN;

/// Places of a request in the row area, in bytes. Empty ranges stand for parts that the request lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestPlaces {
    /// Rows, ids, weights and token ids that the service reads.
    pub(super) read: [Range<usize>; 4],
    /// Output rows, ids and weights that the service writes.
    pub(super) written: [Range<usize>; 3],
    /// Bytes that the service copies at admission and holds until the completion.
    pub(super) copied: usize,
}

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestVerdict {
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
    calls: HashMap<u64, RequestPlaces>,
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
    pub(super) fn admit(&mut self, call: u64, places: RequestPlaces) -> RequestVerdict {
        if self.is_closing {
            return RequestVerdict::Closing;
        }
        let area = self.area;
        let outside = |range: &&Range<usize>| {
            range.start > range.end
                || range.end > area
                || (!range.is_empty() && !range.start.is_multiple_of(ALIGN))
        };
        if let Some(range) = places.read.iter().chain(&places.written).find(outside) {
            return RequestVerdict::Invalid(format!(
                "bytes {range:?} must lie within the row area of {area} bytes and begin at a multiple of {ALIGN}"
            ));
        }
        if self.calls.contains_key(&call) {
            return RequestVerdict::Invalid(format!("a call with number {call} is in flight"));
        }
        if let Some((a, b)) = places.conflict_within() {
            return RequestVerdict::Invalid(format!(
                "the call writes bytes {a:?} and uses bytes {b:?}; they overlap"
            ));
        }
        if let Some((number, a, b)) = self
            .calls
            .iter()
            .find_map(|(number, other)| places.conflict_with(other).map(|(a, b)| (*number, a, b)))
        {
            return RequestVerdict::Invalid(format!(
                "bytes {a:?} overlap bytes {b:?} of call {number}, which is in flight"
            ));
        }
        if self.copied.saturating_add(places.copied) > area {
            return RequestVerdict::Full(format!(
                "the ids and weights of the calls in flight exceed {area} bytes, the size of the row area"
            ));
        }
        self.copied += places.copied;
        self.calls.insert(call, places);
        RequestVerdict::Admitted
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

impl RequestPlaces {
    /// A range that the call writes and another one that it uses.
    fn conflict_within(&self) -> Option<Conflict> {
        let written = self.written.iter().enumerate();
        written.into_iter().find_map(|(at, range)| {
            self.read.iter().chain(&self.written[at + 1..]).find_map(|other| overlap(range, other))
        })
    }

    /// A range of this call and an overlapping range of another call, at least one of which is written.
    fn conflict_with(&self, other: &RequestPlaces) -> Option<Conflict> {
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
mod tests;
