#![allow(clippy::unwrap_used)]

use bytemuck::Zeroable as _;
use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

use super::*;
use crate::places::Places;
use crate::wire::ALIGN;

const MOST_ROWS: u32 = 8192;
const HIDDEN: usize = 2048;
const PLACES: Places = Places { hidden: HIDDEN, rows_bytes: usize::MAX };
const ROWS_PER_PIECE: u32 = (PIECE_BYTES / (2 * HIDDEN)) as u32;

/// A call in bf16 with places of its own for everything that it may read and write.
fn call(number: u64, tokens: u32) -> RequestRecord {
    let (base, rows) = (number << 40, u64::from(tokens) * 2 * HIDDEN as u64);
    let words = (u64::from(tokens) * 32).next_multiple_of(ALIGN as u64);
    RequestRecord {
        call: number,
        rows: base,
        output: base + rows,
        ids: base + 2 * rows,
        weights: base + 2 * rows + words,
        token_ids: base + 2 * rows + 2 * words,
        tokens,
        k: 8,
        dtype: 1,
        flags: RequestRecord::GIVEN_ROUTING | RequestRecord::RETURN_ROUTING | RequestRecord::TOKEN_IDS,
        ..RequestRecord::zeroed()
    }
}

fn start(pieces: &mut Pieces, request: RequestRecord, now: Instant) {
    let (read, written) = (PLACES.of_request(&request).unwrap(), PLACES.of_answer(&request).unwrap());
    pieces.start(request, &read, &written, now);
}

/// The answer of a piece that step `step` has computed.
fn done(piece: &RequestRecord, step: u64, weights: u64) -> CompletionRecord {
    let mut tokens_per_rank = [0; MAX_RANKS];
    tokens_per_rank[0] = piece.tokens;
    let record = CompletionRecord {
        call: piece.call,
        generation: 1,
        weight_version: weights,
        first_step: step,
        last_step: step,
        steps: 1,
        ranks: 1,
        step_ns: 10,
        phase_ns: [1; 7],
        tokens_per_rank,
        ..CompletionRecord::zeroed()
    };
    record.with_text(&weights.to_string())
}

fn sent(pieces: &mut Pieces, now: Instant) -> Vec<RequestRecord> {
    std::iter::from_fn(|| pieces.next(false, now)).collect()
}

#[test]
fn a_large_call_travels_in_order_with_few_pieces_ahead() {
    let now = Instant::now();
    let mut pieces = Pieces::new(1, Pieces::of_calls(1, 1024), MOST_ROWS);
    let whole = RequestRecord { timeout_us: 5_000, ..call(7, 2048) };
    start(&mut pieces, whole, now);
    let mut waiting = VecDeque::from([pieces.next(true, now).unwrap()]);
    assert!(pieces.next(true, now).is_none(), "the link is busy");
    let (mut at, mut rows, mut ended) = (now, 0, None);
    while let Some(piece) = waiting.pop_front() {
        assert!(ended.is_none());
        let timeout_us = if rows == 0 { 5_000 } else { piece.timeout_us };
        let wanted = RequestRecord {
            call: piece.call,
            tokens: ROWS_PER_PIECE,
            timeout_us,
            rows: whole.rows + rows * 4096,
            output: whole.output + rows * 4096,
            ids: whole.ids + rows * 32,
            weights: whole.weights + rows * 32,
            token_ids: whole.token_ids + rows * 4,
            ..whole
        };
        assert_eq!(piece, wanted);
        rows += u64::from(piece.tokens);
        let before = waiting.len();
        waiting.extend(sent(&mut pieces, at));
        assert!(waiting.len() < AHEAD);
        let left = 5_000 - (at - now).as_micros() as u64;
        assert!(waiting.iter().skip(before).all(|piece| piece.timeout_us == left));
        at += Duration::from_micros(100);
        // Two pieces share each step.
        ended = pieces.complete(&done(&piece, 40 + (piece.call - 1) / 2, 3), at);
    }
    assert_eq!(rows, 2048);
    let ended = ended.unwrap();
    assert_eq!((ended.call, ended.code, ended.weight_version), (7, 0, 3));
    assert_eq!((ended.first_step, ended.last_step, ended.steps), (40, 43, 4));
    assert_eq!((ended.step_ns, ended.phase_ns, ended.tokens_per_rank[0]), (40, [4; 7], 2048));
    assert!(pieces.is_empty() && pieces.next(false, at).is_none());
}

#[test]
fn steps_that_pieces_share_count_once() {
    let now = Instant::now();
    for (order, steps) in [([0, 1], [(4, 5), (5, 6)]), ([1, 0], [(4, 5), (5, 6)]), ([0, 1], [(4, 5), (8, 9)])]
    {
        let mut pieces = Pieces::new(1, 4, MOST_ROWS);
        start(&mut pieces, call(7, 2 * ROWS_PER_PIECE), now);
        let sent = sent(&mut pieces, now);
        let completion = |at: usize| {
            let (first_step, last_step) = steps[at];
            let record =
                CompletionRecord { first_step, last_step, steps: 2, step_ns: 20, ..done(&sent[at], 0, 1) };
            CompletionRecord { phase_ns: [6; 7], ..record }
        };
        assert!(pieces.complete(&completion(order[0]), now).is_none());
        let whole = pieces.complete(&completion(order[1]), now).unwrap();
        let count = if steps[1].0 == 5 { 3 } else { 4 };
        assert_eq!((whole.first_step, whole.last_step, whole.steps), (4, steps[1].1, count));
        assert_eq!((whole.step_ns, whole.phase_ns), (u64::from(count) * 10, [u64::from(count) * 3; 7]));
    }
}

#[test]
fn calls_that_are_not_divided() {
    let now = Instant::now();
    let alone = |pieces: &mut Pieces, request: RequestRecord| {
        start(pieces, request, now);
        let piece = pieces.next(true, now).unwrap();
        assert_eq!(RequestRecord { call: request.call, ..piece }, request);
        assert!(pieces.next(false, now).is_none());
        assert_eq!(pieces.complete(&done(&piece, 1, 1), now).unwrap().call, request.call);
    };
    let mut pieces = Pieces::new(4, 8, MOST_ROWS);
    alone(&mut pieces, call(1, 1));
    alone(&mut pieces, call(2, ROWS_PER_PIECE));
    // The service finds that the call writes what it reads.
    let wrong = call(3, 2048);
    alone(&mut pieces, RequestRecord { output: wrong.rows + 4096 * 1024, ..wrong });
    alone(&mut pieces, RequestRecord { ids: wrong.output + 4096 * 1024, ..wrong });
    // The service refuses it.
    alone(&mut pieces, call(5, MOST_ROWS + 1));
    // There is no room for more than one piece of each call.
    alone(&mut Pieces::new(1024, Pieces::of_calls(1024, 1024), MOST_ROWS), call(4, 2048));
}

/// The first pieces of a call, of which the second one has other weights than the first.
fn mixed(pieces: &mut Pieces, now: Instant) -> RequestRecord {
    start(pieces, RequestRecord { timeout_us: 1000, ..call(1, 2048) }, now);
    let first = sent(pieces, now);
    assert_eq!(first.len(), AHEAD);
    for (piece, weights) in first.iter().zip([1, 2]) {
        assert!(pieces.complete(&done(piece, weights, weights), now).is_none());
        let goes_on = weights == 1;
        let next = pieces.next(goes_on, now);
        assert!(next.is_none());
    }
    assert!(sent(pieces, now).is_empty(), "no further piece is sent");
    first[2]
}

#[test]
fn a_call_whose_weights_change_is_computed_again_at_once() {
    let now = Instant::now();
    let mut pieces = Pieces::new(1, 4, MOST_ROWS);
    let last = mixed(&mut pieces, now);
    assert!(pieces.complete(&done(&last, 2, 2), now).is_none());
    let again = sent(&mut pieces, now + Duration::from_micros(400));
    assert_eq!(again, [RequestRecord { call: again[0].call, timeout_us: 600, ..call(1, 2048) }]);
    let ended = pieces.complete(&done(&again[0], 3, 2), now).unwrap();
    assert_eq!((ended.call, ended.code, ended.weight_version, ended.steps), (1, 0, 2, 1));
    assert!(pieces.is_empty());

    let last = mixed(&mut pieces, now);
    let ended = pieces.complete(&done(&last, 2, 2), now + Duration::from_micros(1000)).unwrap();
    assert_eq!((ended.call, ended.code), (1, DEADLINE_EXCEEDED));
    assert!(pieces.is_empty() && sent(&mut pieces, now).is_empty());
}

#[test]
fn a_failed_piece_fails_its_call_when_no_other_is_in_flight() {
    let now = Instant::now();
    for failing in 0..AHEAD {
        let mut pieces = Pieces::new(1, 4, MOST_ROWS);
        start(&mut pieces, call(1, 2048), now);
        let first = sent(&mut pieces, now);
        let mut ended = None;
        for (at, piece) in first.iter().enumerate() {
            assert!(ended.is_none());
            let completion = match at.cmp(&failing) {
                std::cmp::Ordering::Less => done(piece, at as u64 + 1, 1),
                // Later failures, and weights that have changed since, do not matter.
                _ if at % 2 == 0 => CompletionRecord::failed(piece.call, 8, &format!("piece {at}")),
                _ => CompletionRecord { code: 14, ..done(piece, 9, 9) },
            };
            ended = pieces.complete(&completion, now);
            if at >= failing {
                assert!(sent(&mut pieces, now).is_empty(), "nothing is sent after a failure");
            }
        }
        let mut left = sent(&mut pieces, now);
        while ended.is_none() {
            ended = pieces.complete(&done(&left.pop().unwrap(), 10, 1), now);
        }
        let ended = ended.unwrap();
        assert_eq!((ended.call, ended.code), (1, if failing % 2 == 0 { 8 } else { 14 }));
        assert!(pieces.is_empty());
    }
}

proptest! {
    /// Calls of random sizes, whose pieces end in a random order: every row is computed once, no limit is exceeded, and each call ends
    /// once, after its last piece.
    #[test]
    fn every_call_ends_once_with_all_its_rows(seed in any::<u64>(), capacity in 0_u32..5, fails in any::<bool>()) {
        let mut random = SmallRng::seed_from_u64(seed);
        let now = Instant::now();
        let calls = 1 << capacity;
        let most = Pieces::of_calls(calls, 1024);
        let mut pieces = Pieces::new(calls, most, MOST_ROWS);
        let mut rows: HashMap<u64, Vec<u8>> = HashMap::new();
        let mut failed: HashMap<u64, bool> = HashMap::new();
        let mut in_flight: Vec<RequestRecord> = Vec::new();
        let (mut next, mut ended) = (1, 0);
        while ended < 40 {
            if next <= 40 && rows.len() < calls as usize && random.random_range(0..3) > 0 {
                let tokens = match random.random_range(0..3) {
                    0 => random.random_range(1..64),
                    _ => random.random_range(1..3000),
                };
                start(&mut pieces, call(next, tokens), now);
                rows.insert(next, vec![0; tokens as usize]);
                next += 1;
            }
            while let Some(piece) = pieces.next(random.random_range(0..3) == 0, now) {
                let owner = piece.rows >> 40;
                let whole = call(owner, rows[&owner].len() as u32);
                let from = (piece.rows - whole.rows) / 4096;
                prop_assert_eq!(piece.rows % ALIGN as u64, 0);
                prop_assert_eq!(piece.ids % ALIGN as u64, 0);
                prop_assert_eq!(piece.token_ids % ALIGN as u64, 0);
                prop_assert_eq!(piece.output - whole.output, from * 4096);
                for row in &mut rows.get_mut(&owner).unwrap()[from as usize..][..piece.tokens as usize] {
                    *row += 1;
                }
                prop_assert!(in_flight.iter().all(|other| other.call != piece.call));
                in_flight.push(piece);
                prop_assert!(in_flight.len() <= most as usize);
                let of_call = in_flight.iter().filter(|other| other.rows >> 40 == owner).count();
                prop_assert!(of_call <= AHEAD);
            }
            // Each call that is not complete has a piece in flight.
            for owner in rows.keys() {
                prop_assert!(in_flight.iter().any(|piece| piece.rows >> 40 == *owner), "call {} waits", owner);
            }
            if in_flight.is_empty() {
                continue;
            }
            let piece = in_flight.swap_remove(random.random_range(0..in_flight.len()));
            let owner = piece.rows >> 40;
            let completion = match fails && random.random_range(0..10) == 0 {
                true => CompletionRecord::failed(piece.call, 14, "a fault"),
                false => done(&piece, piece.call, 1),
            };
            *failed.entry(owner).or_default() |= completion.code != 0;
            let is_last = in_flight.iter().all(|other| other.rows >> 40 != owner);
            let Some(whole) = pieces.complete(&completion, now) else { continue };
            prop_assert!(is_last);
            prop_assert_eq!(whole.call, owner);
            prop_assert_eq!(whole.code != 0, failed[&owner]);
            let computed = rows.remove(&owner).unwrap();
            prop_assert!(computed.iter().all(|&times| times <= 1));
            if whole.code == 0 {
                prop_assert!(computed.iter().all(|&times| times == 1));
                prop_assert_eq!(whole.tokens_per_rank[0] as usize, computed.len());
            }
            ended += 1;
        }
        prop_assert!(pieces.is_empty());
        prop_assert!(pieces.next(false, now).is_none());
        let unknown = CompletionRecord::failed(u64::MAX, 0, "");
        prop_assert!(pieces.complete(&unknown, now).is_none(), "a call that was not made");
    }
}
