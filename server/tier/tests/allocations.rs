//! The cache of expert slots allocates no memory after its construction.
#![allow(unsafe_code, reason = "implements an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use expertd_tier::slots::{LayerSlots, Policy, SlotCache};
use expertd_types::{ExpertId, LayerId, Sequence};
use rand::RngExt as _;

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work; a thread-local number without a destructor needs no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of this function, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` is from `alloc`, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn steps_and_uploads_allocate_nothing() {
    const LAYER: LayerId = LayerId(3);
    let mut random = expertd_test_seed::rng();
    let shape = |layer| LayerSlots {
        layer,
        experts: 64,
        on_cpus: (10..64).map(ExpertId).collect(),
        slots: 16,
        expert_bytes: 1 << 20,
    };
    let policy = Policy { max_uploads_per_step: 4, bytes_per_second: 1 << 40 };
    let mut cache = SlotCache::new([LayerId(1), LAYER].map(shape).to_vec(), policy);
    let mut uploads = Vec::with_capacity(4);
    let mut rows = vec![0; 64];
    let (before, mut evictions) = (ALLOCATIONS.get(), 0);
    assert!(before > 0, "the allocator does not count");
    for step in 1..2_000 {
        rows.fill(0);
        (0..8).for_each(|_| rows[random.random_range(0..64)] += 1);
        cache.launched(LAYER, Sequence(step)).expect("three steps are in flight at most");
        cache.ended(Sequence(step.saturating_sub(2)));
        cache.observe(LAYER, &rows);
        uploads.extend_from_slice(cache.propose(LAYER, Duration::from_millis(step)));
        for upload in uploads.drain(..) {
            evictions += u64::from(upload.evicts.is_some());
            let told = if step % 7 == 0 { cache.failed(upload) } else { cache.loaded(upload) };
            told.expect("an upload in progress");
        }
        if step % 500 == 0 {
            cache.invalidate();
        }
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(evictions > 100, "{evictions}");
}
