//! The protocol of the wire, with threads as ranks.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use expertd_shm::SharedRegion;
use expertd_types::{Generation, Rank, Sequence, Slot};
use half::bf16;

use super::*;

const SHAPE: TierShape = TierShape { workers: 2, slots: 2, hidden: 5, max_top_k: 2, max_tokens: 6 };
const GENERATION: Generation = Generation(7);
const LIMIT: Duration = Duration::from_secs(60);

fn create() -> Arc<SharedRegion> {
    TierLayout::new(SHAPE).unwrap().create(GENERATION).unwrap()
}

fn source(region: &SharedRegion) -> SourceWire {
    SourceWire::join(SHAPE, GENERATION, region.try_clone_fd().unwrap()).unwrap()
}

fn worker(region: &SharedRegion, rank: u32) -> WorkerWire {
    WorkerWire::join(SHAPE, GENERATION, Rank(rank), region.try_clone_fd().unwrap()).unwrap()
}

/// Sends `tokens` rows whose elements are `n` plus the row's number, each with the ids `n` and -1.
fn send(source: &mut SourceWire, slot: Slot, n: u64, tokens: usize) {
    let stride = SHAPE.stride();
    let out = source.outgoing(slot, tokens, 2).unwrap();
    for (row, place) in out.rows.chunks_exact_mut(stride).enumerate() {
        place.fill(bf16::from_f32((n % 100) as f32 + row as f32).to_bits());
    }
    out.ids.chunks_exact_mut(2).for_each(|ids| ids.copy_from_slice(&[n as i32, -1]));
    out.weights.fill(0.5);
    source.send(slot, Sequence(n));
}

#[test]
fn rows_and_sums_of_many_steps_arrive() {
    // In each slot several steps of both kinds follow one another.
    let is_spared = |n: u64| n % 16 >= 10;
    let region = create();
    let mut source = source(&region);
    // What the router does: a slot's next step begins once every rank has completed the previous one.
    let completed: Vec<_> = (0..2).map(|_| std::sync::mpsc::channel::<u64>()).collect();
    let (senders, receivers): (Vec<_>, Vec<_>) = completed.into_iter().unzip();
    thread::scope(|scope| {
        for (rank, sender) in (1..).zip(senders) {
            let mut wire = worker(&region, rank);
            scope.spawn(move || {
                for n in 1..=200_u64 {
                    let (slot, tokens) = (Slot((n % 2) as u32), n as usize % 7);
                    let arrival = wire.wait(slot, Sequence(n), Duration::ZERO, LIMIT).unwrap();
                    assert_eq!(arrival == Arrival::Spared, is_spared(n), "step {n}");
                    if is_spared(n) {
                        sender.send(n).unwrap();
                        continue;
                    }
                    let (incoming, sums) = wire.step(slot, Sequence(n), tokens, 2).unwrap();
                    assert!(incoming.ids.chunks_exact(2).all(|ids| ids == [n as i32, -1]));
                    assert!(incoming.weights.iter().all(|&weight| weight == 0.5));
                    for (sum, row) in sums.iter_mut().zip(incoming.rows) {
                        *sum = row.to_f32() * rank as f32;
                    }
                    wire.finish(slot, Sequence(n));
                    sender.send(n).unwrap();
                }
            });
        }
        for n in 1..=200_u64 {
            let (slot, tokens) = (Slot((n % 2) as u32), n as usize % 7);
            if is_spared(n) {
                source.spare(slot, Sequence(n));
                assert!(receivers.iter().all(|receiver| receiver.recv() == Ok(n)));
                continue;
            }
            send(&mut source, slot, n, tokens);
            source.wait(slot, Sequence(n), Duration::ZERO, LIMIT).unwrap();
            for worker in 0..2 {
                let sums = source.sums(slot, Sequence(n), worker, tokens).unwrap();
                for (row, sums) in sums.chunks_exact(SHAPE.stride()).enumerate() {
                    let expected = ((n % 100) as f32 + row as f32) * (worker + 1) as f32;
                    assert!(sums[..5].iter().all(|&sum| sum == expected), "step {n}, row {row}: {sums:?}");
                }
            }
            assert!(receivers.iter().all(|receiver| receiver.recv() == Ok(n)));
        }
    });
}

#[test]
fn a_step_of_a_poisoned_wire_finds_nothing_of_the_step_before() {
    let region = create();
    let (mut source, mut one, mut two) = (source(&region), worker(&region, 1), worker(&region, 2));
    source.is_poisoned = true;
    one.is_poisoned = true;
    for n in [1, 3] {
        source.begin(Slot(1));
        one.begin(Slot(1));
        two.begin(Slot(1));
        if n == 1 {
            send(&mut source, Slot(1), n, 6);
        } else {
            // A source that writes nothing.
            source.send(Slot(1), Sequence(n));
        }
        let (incoming, sums) = one.step(Slot(1), Sequence(n), 6, 2).unwrap();
        assert!(sums.iter().all(|sum| sum.is_nan()), "step {n}");
        sums.fill(1.0);
        let poisoned = incoming.rows.iter().all(|row| row.is_nan())
            && incoming.weights.iter().all(|weight| weight.is_nan())
            && incoming.ids.iter().all(|&id| id == 0);
        assert_eq!(poisoned, n == 3);
        let (_, sums) = two.step(Slot(1), Sequence(n), 6, 2).unwrap();
        assert!(sums.iter().all(|&sum| sum == if n == 1 { 0.0 } else { 2.0 }), "step {n}: not poisoned");
        sums.fill(2.0);
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let region = create();
    let mut source = source(&region);
    let (mut one, two) = (worker(&region, 1), worker(&region, 2));
    let limit = Duration::from_millis(20);
    let error = two.wait(Slot(1), Sequence(4), Duration::ZERO, limit).unwrap_err();
    assert!(matches!(error, WireError::Late { sequence: Sequence(4), .. }), "{error}");
    assert!(one.step(Slot(1), Sequence(4), 1, 1).is_err(), "the rows have not come");

    send(&mut source, Slot(1), 4, 3);
    one.step(Slot(1), Sequence(4), 3, 2).unwrap();
    one.finish(Slot(1), Sequence(4));
    assert!(!source.arrived(Slot(1), Sequence(4)).unwrap());
    let error = source.wait(Slot(1), Sequence(4), Duration::ZERO, limit).unwrap_err();
    assert!(matches!(&error, WireError::Missing { ranks, .. } if ranks == &[2]), "{error}");
    source.sums(Slot(1), Sequence(4), 0, 3).unwrap();
    assert!(source.sums(Slot(1), Sequence(4), 1, 3).is_err());
    // What an earlier step left in the slot does not count for the next one.
    assert!(!source.arrived(Slot(1), Sequence(6)).unwrap());
    assert!(source.sums(Slot(1), Sequence(6), 0, 3).is_err());
    assert!(one.step(Slot(1), Sequence(6), 3, 2).is_err());
}

#[test]
fn ranks_at_different_steps_and_steps_that_do_not_fit_are_errors() {
    let region = create();
    let mut source = source(&region);
    let mut one = worker(&region, 1);
    send(&mut source, Slot(0), 9, 1);
    let ahead = |error: WireError| matches!(error, WireError::Ahead { found: Sequence(9), .. });
    assert!(ahead(one.wait(Slot(0), Sequence(8), Duration::ZERO, LIMIT).unwrap_err()));
    one.finish(Slot(0), Sequence(9));
    assert!(ahead(source.arrived(Slot(0), Sequence(8)).unwrap_err()));
    for (tokens, k, what) in
        [(7, 1, "7 rows, expected at most 6"), (1, 3, "3 experts per token, expected at most 2")]
    {
        let errors =
            [source.outgoing(Slot(0), tokens, k).err(), one.step(Slot(0), Sequence(9), tokens, k).err()];
        for error in errors.map(|error| error.unwrap().to_string()) {
            assert!(error.contains(what), "{error}");
        }
    }
}

#[test]
fn memory_is_for_one_generation_and_each_place_for_one_rank() {
    let region = create();
    let fd = || region.try_clone_fd().unwrap();
    let _source = source(&region);
    let _one = worker(&region, 1);
    let again = SourceWire::join(SHAPE, GENERATION, fd()).unwrap_err();
    assert!(matches!(again, WireError::Claimed { rank: 0, .. }), "{again}");
    assert!(matches!(
        WorkerWire::join(SHAPE, GENERATION, Rank(1), fd()),
        Err(WireError::Claimed { rank: 1, .. })
    ));
    for rank in [0, 3] {
        assert!(
            matches!(WorkerWire::join(SHAPE, GENERATION, Rank(rank), fd()), Err(WireError::Rank { .. })),
            "{rank}"
        );
    }
    let other = WorkerWire::join(SHAPE, Generation(8), Rank(2), fd()).unwrap_err().to_string();
    assert!(other.contains("created with generation = 7, this rank expects 8"), "{other}");
    // Equal lengths: only the shape tells them apart.
    let shape = TierShape { hidden: 6, ..SHAPE };
    let other = WorkerWire::join(shape, GENERATION, Rank(2), fd()).unwrap_err().to_string();
    assert!(other.contains("hidden = 5, this rank expects 6"), "{other}");
    assert!(matches!(TierLayout::new(TierShape { workers: 8, ..SHAPE }), Err(WireError::Limit { .. })));
    worker(&region, 2);
}

/// A word of an earlier generation, which a rank that wakes up late might store, is no word of this one.
#[test]
fn words_of_other_generations_do_not_count() {
    for (generation, sequence) in [(6, 5), (6, (1 << 40) - 1), (8, 5)] {
        let found = word(Generation(generation), Sequence(sequence));
        assert!(
            !has_come(found, word(GENERATION, Sequence(5)), "a rank").unwrap(),
            "{generation} {sequence}"
        );
    }
    assert!(has_come(word(GENERATION, Sequence(5)), word(GENERATION, Sequence(5)), "a rank").unwrap());
    assert!(!has_come(0, word(GENERATION, Sequence(5)), "a rank").unwrap());
}

#[test]
fn places_of_a_device_are_those_of_the_host() {
    let region = create();
    let mut source = source(&region);
    send(&mut source, Slot(1), 3, 2);
    let bytes = region.slice::<u8>(0, region.len()).unwrap();
    let SlotPlaces { sent, ids, rows, done, sums, .. } = source.places()[1].clone();
    assert_eq!(source.pages().1, region.len());
    let read = |at: usize| {
        let mut word = [0; 8];
        bytes.load_bytes(at, &mut word);
        u64::from_le_bytes(word)
    };
    assert_eq!(read(sent), word(GENERATION, Sequence(3)));
    assert_eq!(read(ids), 3 | 0xffff_ffff << 32);
    assert_eq!(read(rows) as u16, bf16::from_f32(3.0).to_bits());
    for (at, value) in [(done[1], word(GENERATION, Sequence(3))), (sums[1], u64::from(1.5_f32.to_bits()))] {
        bytes.store_bytes(at, &value.to_le_bytes());
    }
    assert_eq!(source.sums(Slot(1), Sequence(3), 1, 2).unwrap()[0], 1.5);
}
