//! Large calls of network sessions travel in pieces of consecutive rows, each a call of its own for the service: rows of later pieces
//! travel in while earlier ones are computed and their output travels back. The state machine has no clock and no I/O.
//!
//! A call is complete when all its pieces are. After a failed piece no further one is sent, and the call fails with the first failure.
//! Pieces that different weights have computed are computed again, as one call. The places that a call writes overlap none that it reads,
//! so its rows are still there.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::places::Place;
use crate::wire::{CompletionRecord, MAX_RANKS, RequestRecord};

/// The rows of a piece have about this many bytes, which TCP carries over loopback in a quarter of a millisecond.
const PIECE_BYTES: usize = 1 << 20;
/// Pieces of a call in flight: one is computed, one waits for its step, and one travels.
const AHEAD: usize = 3;
/// Pieces begin at multiples of this many rows, so that their places are multiples of 64 bytes.
const UNIT: u32 = 32;

const DEADLINE_EXCEEDED: u32 = 4;

/// Calls in flight and their pieces.
#[derive(Debug)]
pub struct Pieces {
    /// Pieces in flight beyond one for each call, at most.
    spare: usize,
    /// Rows of a call, at most. The service refuses larger ones, so they are not divided.
    most_rows: u32,
    calls: HashMap<u64, Whole>,
    /// The calls of the pieces in flight.
    owners: HashMap<u64, u64>,
    /// Calls with rows that were not sent, the oldest first.
    unsent: VecDeque<u64>,
    /// Calls with pieces in flight.
    active: usize,
    /// Number of the next piece.
    next: u64,
}

#[derive(Debug)]
struct Whole {
    request: RequestRecord,
    row_bytes: u64,
    begun: Instant,
    /// Rows of a piece.
    piece: u32,
    /// Rows that were sent.
    sent: u32,
    in_flight: usize,
    answer: Option<CompletionRecord>,
    /// Whether the weights have changed between two pieces.
    is_mixed: bool,
}

impl Pieces {
    /// For sessions with `calls` calls of at most `most_rows` rows, of which the service takes `pieces` at once.
    #[must_use]
    pub fn new(calls: u32, pieces: u32, most_rows: u32) -> Self {
        Pieces {
            spare: pieces.saturating_sub(calls) as usize,
            most_rows,
            calls: HashMap::new(),
            owners: HashMap::new(),
            unsent: VecDeque::new(),
            active: 0,
            next: 1,
        }
    }

    /// Pieces in flight for sessions with `calls` calls: `most` at most.
    #[must_use]
    pub fn of_calls(calls: u32, most: u32) -> u32 {
        calls.saturating_mul(2).clamp(4, most)
    }

    /// Whether no call is in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Takes a call that reads and writes these places, rows and output first.
    pub fn start(&mut self, request: RequestRecord, read: &[Place], written: &[Place], now: Instant) {
        let row_bytes = read.first().map_or(0, |rows| rows.bytes) / request.tokens.max(1) as usize;
        let piece = if self.spare == 0 || request.tokens > self.most_rows || overlap(read, written) {
            request.tokens
        } else {
            rows_of_pieces(request.tokens, row_bytes)
        };
        let row_bytes = row_bytes as u64;
        let whole = Whole {
            request,
            row_bytes,
            begun: now,
            piece,
            sent: 0,
            in_flight: 0,
            answer: None,
            is_mixed: false,
        };
        self.unsent.push_back(request.call);
        self.calls.insert(request.call, whole);
    }

    /// The next piece to send. A call's first piece in flight is sent at once; others follow when the link is free.
    pub fn next(&mut self, is_sending: bool, now: Instant) -> Option<RequestRecord> {
        let has_spare = self.owners.len() - self.active < self.spare;
        let at = self.unsent.iter().position(|call| {
            let in_flight = self.calls.get(call).map_or(0, |whole| whole.in_flight);
            in_flight == 0 || (has_spare && !is_sending && in_flight < AHEAD)
        })?;
        let call = self.unsent[at];
        let whole = self.calls.get_mut(&call)?;
        let record = whole.cut(self.next, now);
        if whole.sent == whole.request.tokens {
            self.unsent.remove(at);
        }
        self.active += usize::from(whole.in_flight == 0);
        whole.in_flight += 1;
        self.owners.insert(self.next, call);
        self.next += 1;
        Some(record)
    }

    /// Takes the completion of a piece; returns that of its call if it was the last one.
    pub fn complete(&mut self, piece: &CompletionRecord, now: Instant) -> Option<CompletionRecord> {
        let call = self.owners.remove(&piece.call)?;
        let whole = self.calls.get_mut(&call)?;
        whole.in_flight -= 1;
        self.active -= usize::from(whole.in_flight == 0);
        whole.add(piece);
        let has_failed = whole.answer.is_some_and(|answer| answer.code != 0);
        let has_unsent = whole.sent < whole.request.tokens;
        if has_unsent && (has_failed || whole.is_mixed) {
            whole.sent = whole.request.tokens;
            self.unsent.retain(|other| *other != call);
        } else if has_unsent {
            return None;
        }
        if whole.in_flight > 0 {
            return None;
        }
        if whole.is_mixed && !has_failed {
            if whole.left(now) != Some(Duration::ZERO) {
                (whole.piece, whole.sent, whole.answer, whole.is_mixed) =
                    (whole.request.tokens, 0, None, false);
                self.unsent.push_back(call);
                return None;
            }
            let text = "the weights changed while the call was computed, and its time is over";
            whole.answer = Some(CompletionRecord::failed(call, DEADLINE_EXCEEDED, text));
        }
        self.calls.remove(&call)?.answer
    }
}

impl Whole {
    /// The next piece, as call `number`.
    fn cut(&mut self, number: u64, now: Instant) -> RequestRecord {
        let (from, whole) = (u64::from(self.sent), self.request);
        let tokens = self.piece.min(whole.tokens - self.sent);
        self.sent += tokens;
        let words = from * 4 * u64::from(whole.k);
        let timeout_us = match self.left(now) {
            Some(left) => u64::try_from(left.as_micros()).unwrap_or(u64::MAX).max(1),
            None => 0,
        };
        RequestRecord {
            call: number,
            tokens,
            timeout_us,
            rows: whole.rows + from * self.row_bytes,
            output: whole.output + from * self.row_bytes,
            ids: whole.ids.wrapping_add(words),
            weights: whole.weights.wrapping_add(words),
            token_ids: whole.token_ids.wrapping_add(from * 4),
            ..whole
        }
    }

    /// The time until the call's deadline, if it has one.
    fn left(&self, now: Instant) -> Option<Duration> {
        let timeout = Duration::from_micros(self.request.timeout_us);
        (!timeout.is_zero()).then(|| timeout.saturating_sub(now.saturating_duration_since(self.begun)))
    }

    /// Adds the completion of a piece to the call's.
    fn add(&mut self, piece: &CompletionRecord) {
        let Some(sum) = self.answer.as_mut() else {
            self.answer = Some(CompletionRecord { call: self.request.call, ..*piece });
            return;
        };
        if sum.code != 0 {
            return;
        }
        if piece.code != 0 {
            *sum = CompletionRecord { call: self.request.call, ..*piece };
            return;
        }
        self.is_mixed |= (sum.weight_version, sum.message) != (piece.weight_version, piece.message);
        // Pieces may share a step, which counts once, with its part of the piece's time.
        let before = sum.first_step.min(piece.last_step + 1).saturating_sub(piece.first_step);
        let after = piece.last_step.saturating_sub(sum.last_step.max(piece.first_step.saturating_sub(1)));
        let steps = (before + after).min(u64::from(piece.steps));
        let add = |sum: &mut u64, ns: u64| {
            *sum = sum.saturating_add(ns.saturating_mul(steps) / u64::from(piece.steps.max(1)));
        };
        sum.steps = sum.steps.saturating_add(steps as u32);
        add(&mut sum.step_ns, piece.step_ns);
        sum.phase_ns.iter_mut().zip(piece.phase_ns).for_each(|(sum, ns)| add(sum, ns));
        sum.generation = sum.generation.max(piece.generation);
        sum.first_step = sum.first_step.min(piece.first_step);
        sum.last_step = sum.last_step.max(piece.last_step);
        sum.ranks = sum.ranks.max(piece.ranks).min(MAX_RANKS as u32);
        for (sum, of_piece) in sum.tokens_per_rank.iter_mut().zip(piece.tokens_per_rank) {
            *sum = sum.saturating_add(of_piece);
        }
    }
}

/// Rows of each piece of a call; as many as the call has if it is too small to be divided.
fn rows_of_pieces(tokens: u32, row_bytes: usize) -> u32 {
    let most = u32::try_from((PIECE_BYTES / row_bytes.max(1)).max(1)).unwrap_or(u32::MAX);
    let count = tokens.div_ceil(most);
    tokens.div_ceil(count).next_multiple_of(UNIT).min(tokens)
}

/// Whether the call writes bytes that it uses otherwise. The service refuses such a call, and may not see it from the pieces.
fn overlap(read: &[Place], written: &[Place]) -> bool {
    let meet = |a: &Place, b: &Place| a.start < b.start + b.bytes && b.start < a.start + a.bytes;
    written.iter().enumerate().any(|(at, place)| {
        // Given routing is returned to its own places.
        read.iter().any(|other| other != place && meet(place, other))
            || written[at + 1..].iter().any(|other| meet(place, other))
    })
}

#[cfg(test)]
mod tests;
