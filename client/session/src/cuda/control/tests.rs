use proptest::prelude::*;

use super::*;

fn pair(doorbells: u32) -> (ControlMemory, ControlMemory) {
    let service = ControlMemory::create(doorbells, 200).unwrap();
    let opened = service.opened(3, 64);
    let client = ControlMemory::join(service.region().try_clone_fd().unwrap(), &opened).unwrap();
    (service, client)
}

#[test]
fn a_ring_is_taken_once_and_its_completion_raises_the_word() {
    let (service, client) = pair(3);
    assert_eq!(service.take(2, 0), None);
    let ring = Ring { prepared: 5, rows: 8 };
    client.ring(2, ring);
    assert_eq!((service.take(1, 0), service.take(2, 0), service.take(2, 0)), (None, Some(ring), None));
    assert_eq!(client.completion(2), PENDING);
    let mut status = StatusRecord::zeroed();
    let answered = CompletionRecord { call: 9, weight_version: 7, ..CompletionRecord::zeroed() };
    service.complete(2, &answered, &mut status);
    assert_eq!(client.completion(2), DONE);
    let read = client.status(2).unwrap();
    assert_eq!((read.calls, read.failures, read.last.call), (1, 0, 9));
    assert_eq!(client.counts(2), Some(Counts { calls: 1, failures: 0, weight_version: 7, moves: 0 }));
    client.ring(2, ring);
    service.complete(2, &CompletionRecord::failed(10, 14, "gone"), &mut status);
    assert_eq!(client.completion(2), FAILED);
    assert_eq!(client.counts(2), Some(Counts { calls: 2, failures: 1, weight_version: 0, moves: 0 }));
    service.complete(2, &CompletionRecord { call: 11, ..CompletionRecord::zeroed() }, &mut status);
    let read = client.status(2).unwrap();
    assert_eq!((read.calls, read.failures, read.last.call, read.last_failure.call), (3, 1, 11, 10));
    assert_eq!(read.last_failure.text(), "gone");
}

#[test]
fn a_word_that_a_killed_rank_left_is_raised_unless_the_client_has_seen_it() {
    let (service, client) = pair(1);
    let ring = Ring { prepared: 0, rows: 1 };
    // The rank was killed before it raised the word, or after.
    for by_rank in [PENDING, DONE] {
        client.ring(0, ring);
        assert!(service.take(0, 0).is_some());
        service.raise(0, by_rank);
        service.raise_unseen(0);
        assert_eq!(client.completion(0), DONE);
    }
    // The stream has gone on and rung for its next call.
    client.ring(0, ring);
    service.raise_unseen(0);
    assert_eq!((client.completion(0), service.take(0, 1)), (PENDING, Some(ring)));
}

/// A client's stream, a rank that raises its word and the router, each on a thread of its own. The router learns of a call's end after the
/// stream, which has rung for its next call by then or rings meanwhile. Every ring is taken, once.
#[test]
fn a_ring_that_follows_a_word_of_a_rank_is_taken() {
    const CALLS: u64 = 5_000;
    let (service, client) = pair(1);
    // Numbers of calls: rung by the stream, taken by the router, and ended as far as the router knows.
    let [rung, taken, ended] = [const { AtomicU64::new(0) }; 3];
    let is_over = || ended.load(Ordering::Acquire) >= CALLS;
    let ring = |call: u64| Ring { prepared: call as u32, rows: 1 };
    let stream = || {
        for call in 1..=CALLS {
            rung.store(call, Ordering::Release);
            client.ring(0, ring(call));
            while client.completion(0) != DONE && !is_over() {
                std::thread::yield_now();
            }
        }
    };
    let rank = || {
        for call in 1..=CALLS {
            while taken.load(Ordering::Acquire) < call && !is_over() {
                std::thread::yield_now();
            }
            service.raise(0, DONE);
            for _ in 0..call % 4 {
                std::thread::yield_now();
            }
            ended.fetch_max(call, Ordering::AcqRel);
        }
    };
    let mut wrong = None;
    std::thread::scope(|scope| {
        scope.spawn(stream);
        scope.spawn(rank);
        while !is_over() {
            let call = taken.load(Ordering::Relaxed) + 1;
            let in_flight = call - 1 - ended.load(Ordering::Acquire).min(call - 1);
            match service.take(0, in_flight as u32) {
                Some(found) if found == ring(call) => taken.store(call, Ordering::Release),
                // The stream rings again once it has seen the word, so it is never more than a call ahead.
                None if rung.load(Ordering::Acquire) <= call => std::thread::yield_now(),
                found => {
                    wrong = Some((call, found));
                    ended.store(CALLS, Ordering::Release);
                }
            }
        }
    });
    assert_eq!(wrong, None, "this call's ring was lost or taken twice");
}

#[test]
fn moves_to_other_weights_are_counted_and_failures_are_none() {
    let (service, client) = pair(1);
    let mut status = StatusRecord::zeroed();
    let answered = |weight_version| CompletionRecord { weight_version, ..CompletionRecord::zeroed() };
    let failed = CompletionRecord { code: 14, ..CompletionRecord::zeroed() };
    let calls =
        [(answered(7), 0), (answered(7), 0), (failed, 0), (answered(8), 1), (failed, 1), (answered(9), 2)];
    for (record, moves) in calls {
        service.complete(0, &record, &mut status);
        assert_eq!(client.counts(0).unwrap().moves, moves);
    }
}

#[test]
fn a_ring_waits_while_two_calls_are_in_flight() {
    let (service, client) = pair(1);
    let ring = Ring { prepared: 0, rows: 1 };
    client.ring(0, ring);
    assert_eq!((service.take(0, 2), service.take(0, 1), service.take(0, 1)), (None, Some(ring), None));
}

#[test]
fn only_waiting_words_are_released() {
    let (service, client) = pair(2);
    let mut status = StatusRecord::zeroed();
    client.ring(0, Ring { prepared: 0, rows: 1 });
    client.ring(1, Ring { prepared: 0, rows: 1 });
    service.complete(0, &CompletionRecord::zeroed(), &mut status);
    assert_eq!((client.release(0), client.release(1)), (false, true));
    assert_eq!((client.completion(0), client.completion(1)), (DONE, RELEASED));
    assert!(!client.release(1));
}

#[test]
fn words_of_idle_doorbells_are_not_released() {
    let (_service, client) = pair(2);
    client.ring(0, Ring { prepared: 0, rows: 1 });
    client.raise_idle();
    assert_eq!((client.completion(0), client.completion(1)), (DONE, DONE));
    client.ring(1, Ring { prepared: 0, rows: 1 });
    assert_eq!((client.release(0), client.release(1)), (false, true));
}

#[test]
fn a_failure_is_counted_before_its_word_is_raised() {
    let (service, client) = pair(1);
    let mut status = StatusRecord::zeroed();
    let failed = CompletionRecord { code: 14, ..CompletionRecord::zeroed() };
    for (record, failures) in [(&failed, 1), (&CompletionRecord::zeroed(), 1), (&failed, 2)] {
        client.ring(0, Ring { prepared: 0, rows: 1 });
        std::thread::scope(|scope| {
            scope.spawn(|| service.complete(0, record, &mut status));
            while client.completion(0) == PENDING {
                std::hint::spin_loop();
            }
            assert_eq!(client.failures(0), failures);
        });
    }
}

#[test]
fn routing_is_copied_within_its_doorbells_area_only() {
    let (service, client) = pair(3);
    assert_eq!(service.routing_bytes(), 256);
    let bytes: Vec<u8> = (0..64).collect();
    client.write_routing(1, 192, &bytes).unwrap();
    assert_eq!(service.copy_routing(1, 192, 64).unwrap(), bytes);
    assert_eq!(service.copy_routing(2, 0, 64).unwrap(), [0; 64]);
    assert_eq!(service.copy_routing(1, 196, 64), None);
    assert_eq!(service.copy_routing(1, usize::MAX - 3, 8), None);
    assert_eq!(service.copy_routing(3, 0, 4), None);
    assert_eq!(service.write_routing(0, 256, &bytes), None);
}

#[test]
fn offsets_beyond_the_region_are_refused() {
    let service = ControlMemory::create(2, 64).unwrap();
    let fd = || service.region().try_clone_fd().unwrap();
    let opened = service.opened(1, 64);
    for wrong in [
        OpenedCuda { doorbells_offset: opened.region_bytes, ..opened },
        OpenedCuda { statuses_offset: u64::MAX - 7, ..opened },
        OpenedCuda { routing_offset: opened.statuses_offset, ..opened },
        OpenedCuda { routing_bytes: u32::MAX, ..opened },
        OpenedCuda { doorbells: 0, ..opened },
        OpenedCuda { region_bytes: 4096, ..opened },
    ] {
        assert!(ControlMemory::join(fd(), &wrong).is_err(), "{wrong:?}");
    }
}

proptest! {
    /// Whatever a client writes into the region, each ring of a doorbell is taken once, and a status that the client reads
    /// is one that the service wrote, or none.
    #[test]
    fn scribbles_are_rings_or_nothing(
        writes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>()), 0..200),
    ) {
        let (service, client) = pair(4);
        let all = client.region().slice::<u64>(0, client.region().len() / 8).unwrap();
        for (at, word) in writes {
            all.atomics()[at.index(all.len())].store(word, Ordering::Relaxed);
        }
        let mut status = StatusRecord::zeroed();
        for doorbell in 0..4 {
            if let Some(ring) = service.take(doorbell, 0) {
                prop_assert!(ring.to_word() != 0);
            }
            prop_assert_eq!(service.take(doorbell, 0), None);
            service.complete(doorbell, &CompletionRecord::zeroed(), &mut status);
            prop_assert_eq!(client.completion(doorbell), DONE);
            prop_assert_eq!(client.status(doorbell).unwrap().calls, u64::from(doorbell) + 1);
        }
    }
}
