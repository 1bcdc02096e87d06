#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::pool::Pool;
use super::runs::Runs;

const PAGE: usize = 16 << 10;

/// What a test does with the map next; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Act {
    Take(usize),
    Extend(usize, usize),
    Free(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        (1usize..6).prop_map(Act::Take),
        (1usize..150).prop_map(Act::Take),
        (any::<usize>(), 1usize..70).prop_map(|(of, pages)| Act::Extend(of, pages)),
        any::<usize>().prop_map(Act::Free),
        any::<usize>().prop_map(Act::Free),
    ];
    prop::collection::vec(act, 0..200)
}

proptest! {
    #[test]
    fn runs_are_the_lowest_that_fit(pages in 1usize..400, acts in acts()) {
        let mut runs = Runs::new(pages);
        let mut taken = vec![false; pages];
        let mut held: Vec<(usize, usize)> = Vec::new();
        for act in acts {
            match act {
                Act::Take(count) => {
                    let lowest = taken.windows(count).position(|run| run.iter().all(|taken| !taken));
                    prop_assert_eq!(runs.take(count), lowest);
                    if let Some(first) = lowest {
                        taken[first..first + count].fill(true);
                        held.push((first, count));
                    }
                }
                Act::Extend(of, more) if !held.is_empty() => {
                    let index = of % held.len();
                    let (first, count) = held[index];
                    let behind = first + count..first + count + more;
                    let free = taken.get(behind.clone()).is_some_and(|run| run.iter().all(|taken| !taken));
                    prop_assert_eq!(runs.take_at(behind.start, more), free);
                    if free {
                        taken[behind].fill(true);
                        held[index].1 += more;
                    }
                }
                Act::Free(of) if !held.is_empty() => {
                    let (first, count) = held.swap_remove(of % held.len());
                    runs.free(first, count);
                    taken[first..first + count].fill(false);
                }
                Act::Extend(..) | Act::Free(_) => {}
            }
            prop_assert_eq!(runs.taken(), taken.iter().filter(|taken| **taken).count());
            prop_assert_eq!(runs.end(), taken.iter().rposition(|taken| *taken).map_or(0, |last| last + 1));
        }
    }
}

fn fill(address: *mut u8, bytes: usize, with: u8) {
    // SAFETY: a test's own memory.
    unsafe { address.write_bytes(with, bytes) };
}

fn holds(address: *mut u8, bytes: usize, what: u8) -> bool {
    // SAFETY: a test's own memory, written before.
    unsafe { std::slice::from_raw_parts(address, bytes) }.iter().all(|byte| *byte == what)
}

#[test]
fn a_pool_without_addresses_serves_nothing() {
    let pool = Pool::new();
    assert!(!pool.is_open());
    assert!(pool.take(1).is_null());
    assert!(!pool.owns((&raw const pool).cast_mut().cast()));
    pool.settle();
}

#[test]
fn a_full_pool_serves_nothing_more() {
    let pool = Pool::new();
    pool.reserve(4 * PAGE, PAGE).unwrap();
    assert!(pool.take(4 * PAGE + 1).is_null());
    let all = pool.take(3 * PAGE + 1);
    assert!(
        pool.owns(all) && pool.owns(all.wrapping_add(4 * PAGE - 1)) && !pool.owns(all.wrapping_add(4 * PAGE))
    );
    assert!(pool.take(1).is_null());
    pool.free(all, 3 * PAGE + 1);
    assert_eq!(pool.take(1), all, "the lowest page again");
}

#[test]
fn what_was_taken_grows_where_there_is_room() {
    let pool = Pool::new();
    pool.reserve(8 * PAGE, 0).unwrap();
    let (one, two) = (pool.take(PAGE), pool.take(PAGE));
    fill(one, PAGE, 1);
    assert!(pool.resize(one, PAGE, 100), "still a page");
    assert!(!pool.resize(one, 100, PAGE + 1), "another one is behind it");
    assert!(pool.resize(two, PAGE, 7 * PAGE));
    assert!(pool.take(1).is_null());
    assert!(pool.resize(two, 7 * PAGE, PAGE));
    assert_eq!(pool.usage().taken, 2 * PAGE);
    assert!(holds(one, PAGE, 1));
}

#[test]
fn what_a_burst_took_is_given_back_two_periods_later() {
    let pool = Pool::new();
    pool.reserve(64 * PAGE, 4 * PAGE).unwrap();
    assert_eq!(pool.usage().resident, 4 * PAGE);
    let kept = pool.take(6 * PAGE);
    fill(kept, 6 * PAGE, 6);
    let burst = pool.take(50 * PAGE);
    fill(burst, 50 * PAGE, 5);
    pool.free(burst, 50 * PAGE);
    pool.settle();
    pool.settle();
    assert_eq!(pool.usage().resident, 56 * PAGE, "it was used in the period before");
    pool.settle();
    assert_eq!(pool.usage().resident, 6 * PAGE);
    assert!(holds(kept, 6 * PAGE, 6));
    let burst = pool.take(50 * PAGE);
    assert!(holds(burst, 50 * PAGE, 0), "the system has had it meanwhile");
    pool.free(burst, 50 * PAGE);
    pool.free(kept, 6 * PAGE);
    (0..3).for_each(|_| pool.settle());
    assert_eq!(pool.usage(), super::PoolUse { taken: 0, resident: 4 * PAGE });
}

#[test]
fn threads_never_share_a_page() {
    let pool = Pool::new();
    pool.reserve(256 * PAGE, 0).unwrap();
    std::thread::scope(|scope| {
        for mark in 1..=4u8 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..2000 {
                    let bytes = 1 + (round * 7919 * usize::from(mark)) % (40 * PAGE);
                    let address = pool.take(bytes);
                    if !address.is_null() {
                        fill(address, bytes, mark);
                        assert!(holds(address, bytes, mark));
                        pool.free(address, bytes);
                    }
                    if round % 100 == 0 {
                        pool.settle();
                    }
                }
            });
        }
    });
    assert_eq!(pool.usage().taken, 0);
}
