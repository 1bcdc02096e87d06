use std::thread;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::wait::{Doorbell, WaitPolicy};

type Record = [u64; 3];

fn ring_memory(capacity: usize) -> SharedRing {
    let mut layout = Layout::new();
    let place = RingLayout::<Record>::reserve(&mut layout, capacity).expect("small");
    let region = SharedRegion::create("ring", layout.len()).expect("memfd");
    place.memory(&region).expect("in bounds")
}

fn ring(capacity: usize) -> (SharedRing, RingProducer<Record>, RingConsumer<Record>) {
    let memory = ring_memory(capacity);
    (
        memory.clone(),
        RingProducer::new(memory.clone()).expect("fresh"),
        RingConsumer::new(memory).expect("fresh"),
    )
}

proptest! {
    #[test]
    fn behaves_like_a_bounded_queue(log in 0u32..4, pushes in prop::collection::vec(any::<bool>(), 0..200)) {
        let capacity = 1 << log;
        let (_, mut tx, mut rx) = ring(capacity);
        let mut model = std::collections::VecDeque::new();
        for (i, push) in pushes.into_iter().enumerate() {
            if push {
                let record = [i as u64, !(i as u64), 0x5555];
                let pushed = tx.try_push(&record).expect("sound");
                prop_assert_eq!(pushed, model.len() < capacity);
                if pushed { model.push_back(record); }
            } else {
                prop_assert_eq!(rx.try_pop().expect("sound"), model.pop_front());
            }
        }
        prop_assert_eq!(tx.pushed() - rx.popped(), model.len() as u64);
    }

    #[test]
    fn both_ends_return_after_any_word_is_overwritten(at in 0usize..40, value in any::<u64>(), small in 0u64..9) {
        for value in [value, small] {
            let (memory, mut tx, mut rx) = ring(4);
            for i in 0..6u64 {
                if i >= 3 { rx.try_pop().expect("sound"); }
                prop_assert!(tx.try_push(&[i; 3]).expect("sound"));
            }
            let words = memory.0.atomics();
            words[at % words.len()].store(value, Ordering::Relaxed);
            for _ in 0..10 {
                let _ = tx.try_push(&[1; 3]);
                let _ = rx.try_pop();
            }
        }
    }
}

#[test]
fn impossible_counters_are_errors() {
    let (memory, mut tx, mut rx) = ring(4);
    for i in 0..3 {
        assert!(tx.try_push(&[i; 3]).expect("sound"));
        rx.try_pop().expect("sound").expect("pushed");
    }
    // Further ahead than the capacity, backwards, and far away.
    for pushed in [3 + 5, 2, u64::MAX, 1 << 63] {
        memory.pushed().store(pushed, Ordering::Relaxed);
        assert!(matches!(rx.try_pop(), Err(RingError::Counter { side: "pushed", last: 3, .. })), "{pushed}");
    }
    // Within bounds, but the cell was not written.
    memory.pushed().store(4, Ordering::Relaxed);
    assert_eq!(rx.try_pop(), Err(RingError::Stamp { record: 3, found: 0 }));

    while tx.try_push(&[9; 3]).expect("sound") {}
    for popped in [8, 2, u64::MAX] {
        memory.popped().store(popped, Ordering::Relaxed);
        assert!(matches!(tx.try_push(&[9; 3]), Err(RingError::Counter { side: "popped", .. })), "{popped}");
    }
}

#[test]
fn counters_wrap() {
    let (memory, mut tx, mut rx) = ring(4);
    let start = u64::MAX - 7;
    for end in [&mut tx.0.position, &mut tx.0.other, &mut rx.0.position, &mut rx.0.other] {
        *end = start;
    }
    memory.pushed().store(start, Ordering::Relaxed);
    memory.popped().store(start, Ordering::Relaxed);
    assert!(tx.try_push(&[0; 3]).expect("sound"));
    assert!(tx.try_push(&[1; 3]).expect("sound"));
    for i in 2..20 {
        assert!(tx.try_push(&[i; 3]).expect("sound"));
        assert!(tx.try_push(&[i; 3]).expect("sound"));
        assert!(!tx.try_push(&[i; 3]).expect("sound"), "full");
        for _ in 0..2 {
            rx.try_pop().expect("sound").expect("pushed");
        }
        assert_eq!(tx.pushed().wrapping_sub(rx.popped()), 2);
    }
}

#[test]
fn used_rings_and_unsupported_record_sizes_are_refused() {
    let (memory, mut tx, mut rx) = ring(2);
    tx.try_push(&[1; 3]).expect("sound");
    assert!(RingConsumer::<Record>::new(memory.clone()).is_ok(), "the producer may be early");
    assert!(matches!(RingProducer::<Record>::new(memory.clone()), Err(RingError::Used { count: 1, .. })));
    rx.try_pop().expect("sound");
    assert!(matches!(RingConsumer::<Record>::new(memory.clone()), Err(RingError::Used { .. })));
    assert!(matches!(RingProducer::<[u8; 9], _>::new(memory.clone()), Err(RingError::Shape { .. })));
    assert!(matches!(RingProducer::<[u64; 9], _>::new(memory), Err(RingError::Shape { capacity: 0, .. })));
}

#[test]
fn threads_exchange_records_with_doorbells() {
    let (_, mut tx, mut rx) = ring(4);
    let bells = SharedRegion::create("bells", 4096).expect("memfd");
    let full = Doorbell::new(bells.slice(0, 1).expect("in bounds"));
    let empty = Doorbell::new(bells.slice(64, 1).expect("in bounds"));
    let policy = WaitPolicy::within(Duration::from_micros(1), Duration::from_secs(60));
    let count = 20_000u64;
    thread::scope(|s| {
        s.spawn(|| {
            for i in 0..count {
                full.wait_until(policy, || tx.try_push(&[i, i * 3, !i]).expect("sound")).expect("popped");
                empty.ring();
            }
        });
        for i in 0..count {
            let record = empty.wait_for(policy, || rx.try_pop().expect("sound")).expect("pushed");
            full.ring();
            assert_eq!(record, [i, i * 3, !i]);
        }
    });
}
