#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::page_map::PageMap;
use super::pool::Pool;

const PAGE: usize = 16 << 10;

/// An operation on the map; its numbers are taken modulo the number of possibilities.
#[derive(Clone, Debug)]
enum Operation {
    Take(usize),
    Extend(usize, usize),
    Free(usize),
    /// Return idle pages from this page on, and start a new period.
    Release(usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let act = prop_oneof![
        (1usize..6).prop_map(Operation::Take),
        (1usize..150).prop_map(Operation::Take),
        (any::<usize>(), 1usize..70).prop_map(|(of, pages)| Operation::Extend(of, pages)),
        any::<usize>().prop_map(Operation::Free),
        any::<usize>().prop_map(Operation::Free),
        (0usize..70).prop_map(Operation::Release),
    ];
    prop::collection::vec(act, 0..200)
}

proptest! {
    #[test]
    fn allocations_take_the_lowest_range_that_fits(pages in 1usize..400, operations in operations()) {
        let mut map = PageMap::new(pages, 0);
        let mut taken = vec![false; pages];
        let (mut touched, mut used) = (taken.clone(), taken.clone());
        let mut held: Vec<(usize, usize)> = Vec::new();
        for act in operations {
            match act {
                Operation::Take(count) => {
                    let lowest = taken.windows(count).position(|run| run.iter().all(|taken| !taken));
                    prop_assert_eq!(map.take(count), lowest);
                    if let Some(first) = lowest {
                        taken[first..first + count].fill(true);
                        held.push((first, count));
                    }
                }
                Operation::Extend(of, more) if !held.is_empty() => {
                    let index = of % held.len();
                    let (first, count) = held[index];
                    let behind = first + count..first + count + more;
                    let free = taken.get(behind.clone()).is_some_and(|run| run.iter().all(|taken| !taken));
                    prop_assert_eq!(map.take_at(behind.start, more), free);
                    if free {
                        taken[behind].fill(true);
                        held[index].1 += more;
                    }
                }
                Operation::Free(of) if !held.is_empty() => {
                    let (first, count) = held.swap_remove(of % held.len());
                    map.free(first, count);
                    taken[first..first + count].fill(false);
                }
                Operation::Release(from) => {
                    let idle: Vec<_> = (0..pages).map(|at| touched[at] && !taken[at] && !used[at]).collect();
                    let mut at = from.min(pages);
                    while let Some((first, count)) = map.take_idle(at) {
                        prop_assert!(!idle[at..first].contains(&true), "the first idle page");
                        prop_assert!(idle[first..first + count].iter().all(|idle| *idle));
                        prop_assert!(idle.get(first + count) != Some(&true), "the whole run");
                        map.free(first, count);
                        touched[first..first + count].fill(false);
                        at = first + count;
                    }
                    prop_assert!(!idle[at..].contains(&true));
                    map.start_period();
                    used.copy_from_slice(&taken);
                }
                Operation::Extend(..) | Operation::Free(_) => {}
            }
            for at in 0..pages {
                touched[at] |= taken[at];
                used[at] |= taken[at];
            }
            prop_assert_eq!(map.taken(), taken.iter().filter(|taken| **taken).count());
            prop_assert_eq!(map.touched(), touched.iter().filter(|touched| **touched).count());
        }
    }
}

fn fill(address: *mut u8, bytes: usize, with: u8) {
    // SAFETY: the memory belongs to the test.
    unsafe { address.write_bytes(with, bytes) };
}

fn holds(address: *mut u8, bytes: usize, what: u8) -> bool {
    // SAFETY: the memory belongs to the test and has been written.
    unsafe { std::slice::from_raw_parts(address, bytes) }.iter().all(|byte| *byte == what)
}

#[test]
fn a_pool_without_addresses_serves_nothing() {
    let pool = Pool::new();
    assert!(!pool.is_open());
    assert!(pool.take(1).is_null());
    assert!(!pool.owns((&raw const pool).cast_mut().cast()));
    pool.release_unused();
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
    assert_eq!(pool.take(1), all, "the lowest page is taken again");
}

#[test]
fn allocations_grow_in_place_where_there_is_room() {
    let pool = Pool::new();
    pool.reserve(8 * PAGE, 0).unwrap();
    let (one, two) = (pool.take(PAGE), pool.take(PAGE));
    fill(one, PAGE, 1);
    assert!(pool.resize(one, PAGE, 100), "the size is still one page");
    assert!(!pool.resize(one, 100, PAGE + 1), "the next page is taken");
    assert!(pool.resize(two, PAGE, 7 * PAGE));
    assert!(pool.take(1).is_null());
    assert!(pool.resize(two, 7 * PAGE, PAGE));
    assert_eq!(pool.usage().taken, 2 * PAGE);
    assert!(holds(one, PAGE, 1));
}

#[test]
fn memory_of_a_burst_is_returned_a_period_later() {
    let pool = Pool::new();
    pool.reserve(64 * PAGE, 4 * PAGE).unwrap();
    assert_eq!(pool.usage().resident, 4 * PAGE);
    let kept = pool.take(6 * PAGE);
    fill(kept, 6 * PAGE, 6);
    let burst = pool.take(50 * PAGE);
    fill(burst, 50 * PAGE, 5);
    let last = pool.take(PAGE);
    fill(last, PAGE, 7);
    pool.free(burst, 50 * PAGE);
    pool.release_unused();
    assert_eq!(pool.usage().resident, 57 * PAGE, "the pages were used in this period");
    pool.release_unused();
    assert_eq!(pool.usage().resident, 7 * PAGE, "a page behind the burst keeps only itself");
    assert!(holds(kept, 6 * PAGE, 6) && holds(last, PAGE, 7));
    let burst = pool.take(50 * PAGE);
    assert!(holds(burst, 50 * PAGE, 0), "pages that were returned to the system hold zeros");
    pool.free(burst, 50 * PAGE);
    pool.free(kept, 6 * PAGE);
    pool.free(last, PAGE);
    (0..2).for_each(|_| pool.release_unused());
    assert_eq!(pool.usage(), super::PoolUsage { taken: 0, resident: 4 * PAGE });
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
                        pool.release_unused();
                    }
                }
            });
        }
    });
    assert_eq!(pool.usage().taken, 0);
}
