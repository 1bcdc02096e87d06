use std::collections::BTreeSet;
use std::sync::atomic::AtomicUsize;

use super::*;

/// Teams of one thread, of helpers that spin between turns, and of helpers that sleep at once.
fn teams() -> Vec<ThreadTeam> {
    let all = [(1, 0), (2, 0), (2, 200), (5, 0), (5, 200)];
    let start = |(threads, spin)| {
        ThreadTeam::start("team", threads, Duration::from_micros(spin)).expect("threads start")
    };
    all.map(start).into_iter().collect()
}

/// Takes the numbers below `count` from a queue, on the threads of the team, and returns those that each thread took.
fn taken(team: &ThreadTeam, threads: usize, count: usize) -> Vec<Vec<usize>> {
    let next = AtomicUsize::new(0);
    let taken: Vec<Mutex<Vec<usize>>> = (0..team.threads()).map(|_| Mutex::default()).collect();
    team.run(threads, &|thread| {
        let mut mine = taken[thread].try_lock().expect("a number belongs to one call");
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&item| item < count);
        mine.extend(std::iter::from_fn(take));
    });
    taken.into_iter().map(|taken| taken.into_inner().expect("no panic")).collect()
}

#[test]
fn every_item_is_taken_once_and_seen_by_the_caller() {
    for team in teams() {
        for round in 0..300 {
            let count = [0, 1, 2, 7, 500][round % 5];
            let all: Vec<usize> = taken(&team, 1 + round % 6, count).into_iter().flatten().collect();
            assert_eq!(all.len(), count);
            assert_eq!(all.into_iter().collect::<BTreeSet<_>>(), (0..count).collect());
            if round % 60 == 0 {
                // The helpers' time to spin passes.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[test]
fn helpers_work_beside_the_caller() {
    for team in teams() {
        // A call waits until all threads have begun, however late they are.
        let (begun, threads) = (AtomicUsize::new(0), team.threads());
        team.run(threads, &|_| {
            begun.fetch_add(1, Ordering::Relaxed);
            while begun.load(Ordering::Relaxed) < threads {
                std::thread::yield_now();
            }
        });
        assert_eq!(begun.into_inner(), threads);
    }
}

#[test]
fn a_team_of_one_thread_needs_no_helper() {
    let team = ThreadTeam::start("team", 1, Duration::ZERO).expect("no thread to start");
    assert_eq!(taken(&team, 8, 3), [[0, 1, 2]]);
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_goes_on() {
    for team in teams() {
        for culprit in [0, team.threads() - 1] {
            // The last helper may come late to a turn, and then its call is left out.
            let panicked = (0..1000).any(|_| {
                let end = catch_unwind(AssertUnwindSafe(|| {
                    team.run(team.threads(), &|thread| {
                        assert_ne!(thread, culprit, "on purpose");
                        std::thread::sleep(Duration::from_micros(300));
                    });
                }));
                end.is_err()
            });
            assert!(panicked, "{team:?}, thread {culprit}");
            assert_eq!(taken(&team, team.threads(), 20).into_iter().flatten().count(), 20);
        }
    }
}

#[test]
fn a_turn_within_a_turn_panics() {
    // A job must be `Sync` and a team is not, so the job finds the team in the storage of its thread.
    thread_local! {
        static TEAM: std::rc::Rc<ThreadTeam> =
            std::rc::Rc::new(ThreadTeam::start("team", 2, Duration::ZERO).expect("a thread starts"));
    }
    let team = TEAM.with(std::rc::Rc::clone);
    let nested = AtomicBool::new(false);
    team.run(2, &|thread| {
        if thread == 0 {
            let inner = TEAM.with(std::rc::Rc::clone);
            let end = catch_unwind(AssertUnwindSafe(|| inner.run(2, &|_| {})));
            nested.store(end.is_err(), Ordering::Relaxed);
        }
    });
    assert!(nested.load(Ordering::Relaxed));
    assert_eq!(taken(&team, 2, 3).into_iter().flatten().count(), 3);
}

#[test]
fn panics_of_two_threads_end_one_turn() {
    for team in teams() {
        let (begun, both) = (AtomicUsize::new(0), team.threads().min(2));
        let end = catch_unwind(AssertUnwindSafe(|| {
            team.run(team.threads(), &|_| {
                begun.fetch_add(1, Ordering::Relaxed);
                while begun.load(Ordering::Relaxed) < both {
                    std::thread::yield_now();
                }
                panic!("on purpose");
            });
        }));
        assert!(end.is_err());
        assert_eq!(taken(&team, team.threads(), 20).into_iter().flatten().count(), 20);
    }
}

#[test]
fn helpers_beyond_the_number_of_threads_take_no_part() {
    for team in teams() {
        for threads in [1, 2, 3] {
            for _ in 0..50 {
                let taken = taken(&team, threads, 100);
                assert!(taken.iter().skip(threads).all(Vec::is_empty));
            }
        }
    }
}
