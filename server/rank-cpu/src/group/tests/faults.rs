//! Ranks that do not arrive, that leave, or that run different steps.

use std::thread;
use std::time::Duration;

use super::*;
use crate::exchange::{ExchangeError, FaultCause};

#[test]
fn a_peer_that_never_arrives_is_named_and_ends_every_wait() {
    let region = create_windows(&config(3)).expect("memory");
    let attach = |rank, wait_deadline| {
        CpuGroup::attach(&region, EpConfig { rank: Rank(rank), wait_deadline, ..config(3) }).expect("fresh")
    };
    let short = Duration::from_millis(50);
    let (mut first, mut last) = (attach(0, short), attach(2, Duration::from_secs(3600)));
    thread::scope(|s| {
        // Rank 2 would wait for an hour if rank 0 did not report its timeout.
        let last = s.spawn(move || empty_exchange(&mut last, Slot(0)).expect_err("rank 1 is missing"));
        let error = empty_exchange(&mut first, Slot(0)).expect_err("rank 1 is missing");
        // Rank 2's thread may be late as well, but rank 1 is certainly missing.
        let EpError::Exchange(ExchangeError::Missing { phase: "dispatch", peers, waited, .. }) = &error
        else {
            panic!("{error}");
        };
        assert!(peers.contains(&Rank(1)) && !peers.contains(&Rank(0)));
        assert_eq!(*waited, short);
        assert!(!error.is_misuse());
        let reported = last.join().expect("no panic");
        let EpError::Exchange(ExchangeError::Fault { rank: Rank(0), cause: FaultCause::Missed(_) }) =
            reported
        else {
            panic!("{reported}");
        };
    });
    let after = empty_exchange(&mut first, Slot(1)).expect_err("ended");
    assert!(matches!(after, EpError::Exchange(ExchangeError::Ended)), "{after}");
}

#[test]
fn a_peer_missing_in_combine_is_named() {
    let mut groups =
        loopback(&EpConfig { wait_deadline: Duration::from_millis(200), ..config(2) }).expect("memory");
    let mut absent = groups.pop().expect("two");
    let mut present = groups.pop().expect("two");
    let step = no_tokens(2);
    for group in [&mut absent, &mut present] {
        group.prepare(Slot(0), routing(&step, 0)).expect("idle");
        group.dispatch_send(Slot(0), &[], None).expect("open");
    }
    present.dispatch_wait(Slot(0)).expect("both sent");
    let error = present.combine(Slot(0), &mut [], None).expect_err("rank 1 never combines");
    let expected = "combine of exchange 1 waited 200ms for rank(s) 1";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_rank_that_leaves_during_an_exchange_stops_its_peers() {
    for abort in [false, true] {
        let mut groups =
            loopback(&EpConfig { wait_deadline: Duration::from_secs(3600), ..config(3) }).expect("memory");
        let mut leaver = groups.pop().expect("three");
        thread::scope(|s| {
            let waiting: Vec<_> = groups
                .iter_mut()
                .map(|g| s.spawn(move || empty_exchange(g, Slot(0)).expect_err("rank 2 left")))
                .collect();
            let step = no_tokens(3);
            leaver.prepare(Slot(0), routing(&step, 0)).expect("idle");
            leaver.dispatch(Slot(0), &[], None).expect("all arrive");
            if abort {
                leaver.abort();
                assert!(leaver.combine_send(Slot(0)).is_err());
            }
            drop(leaver);
            for rank in waiting {
                let error = rank.join().expect("no panic").to_string();
                assert_eq!(error, "rank 2 failed or left during an exchange");
            }
        });
    }
}

#[test]
fn ranks_that_run_different_steps_get_an_error() {
    // The ranks use different k.
    let mut groups = loopback(&config(2)).expect("memory");
    for (group, k) in groups.iter_mut().zip([1, 2]) {
        let routing = HostRouting {
            owners: &ExpertOwners::single([Rank(0)]),
            turn: 0,
            tokens: 0,
            k,
            ids: &[],
            weights: &[],
        };
        group.prepare(Slot(0), routing).expect("idle");
        group.dispatch_send(Slot(0), &[], None).expect("open");
    }
    let error = groups[0].dispatch_wait(Slot(0)).expect_err("k differs");
    assert!(
        matches!(error, EpError::Exchange(ExchangeError::Head { peer: Rank(1), k: 2, expected_k: 1, .. })),
        "{error}"
    );

    // The ranks run a different number of exchanges: rank 1 has begun one in the other slot first.
    let mut groups = loopback(&config(2)).expect("memory");
    let step = no_tokens(2);
    for (group, slots) in groups.iter_mut().zip([&[0][..], &[1, 0]]) {
        for &slot in slots {
            group.prepare(Slot(slot), routing(&step, 0)).expect("idle");
            group.dispatch_send(Slot(slot), &[], None).expect("open");
        }
    }
    let error = groups[0].dispatch_wait(Slot(0)).expect_err("ahead");
    assert!(matches!(error, EpError::Exchange(ExchangeError::Ahead { peer: Rank(1), .. })), "{error}");
    let error = groups[1].dispatch_wait(Slot(0)).expect_err("rank 0 has reported its fault");
    assert!(matches!(error, EpError::Exchange(ExchangeError::Fault { rank: Rank(0), .. })), "{error}");
}
