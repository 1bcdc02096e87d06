//! The ring, the doorbell and the turns of a team under loom, which runs each small scenario in every interleaving
//! that the memory model allows (of some, with at most three preemptions). The algorithms are generic over their atomics, so loom checks the production code.

#![allow(unsafe_code, reason = "loom's cells are accessed through raw pointers")]

use std::sync::atomic::Ordering;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::ring::{RingConsumer, RingMemory, RingProducer, Word64};
use crate::team::Turn;
use crate::wait::{Doorbell, FutexWord, WaitPolicy};

impl Word64 for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

/// A word without atomicity: loom fails if two threads could access it at once, one of them writing.
struct ModelCell(UnsafeCell<u64>);

impl Word64 for ModelCell {
    fn load(&self, _: Ordering) -> u64 {
        // SAFETY: loom checks every access before it happens.
        self.0.with(|word| unsafe { *word })
    }
    fn store(&self, value: u64, _: Ordering) {
        // SAFETY: loom checks every access before it happens.
        self.0.with_mut(|word| unsafe { *word = value });
    }
}

struct ModelRing {
    pushed: AtomicU64,
    popped: AtomicU64,
    cells: Vec<ModelCell>,
}

// SAFETY: the cells are shared between threads so that loom can check the accesses to them.
unsafe impl Sync for ModelRing {}
// SAFETY: as above.
unsafe impl Send for ModelRing {}

impl ModelRing {
    fn new(words: usize) -> Arc<Self> {
        let cells = (0..words).map(|_| ModelCell(UnsafeCell::new(0))).collect();
        Arc::new(Self { pushed: AtomicU64::new(0), popped: AtomicU64::new(0), cells })
    }
}

impl RingMemory for Arc<ModelRing> {
    type Word = AtomicU64;
    type Cell = ModelCell;
    fn pushed(&self) -> &AtomicU64 {
        &self.pushed
    }
    fn popped(&self) -> &AtomicU64 {
        &self.popped
    }
    fn cells(&self) -> &[ModelCell] {
        &self.cells
    }
}

type Record = [u64; 2];

fn record(n: u64) -> Record {
    [n + 10, !n]
}

/// Records come out whole and in order, cells are not overwritten before they are read, and neither end reports an error.
#[test]
fn loom_ring() {
    for capacity in [1, 2] {
        loom::model(move || {
            let memory = ModelRing::new(capacity * 3);
            let mut tx = RingProducer::<Record, _>::new(Arc::clone(&memory)).expect("fresh");
            let mut rx = RingConsumer::<Record, _>::new(memory).expect("fresh");
            let producer = thread::spawn(move || {
                for _ in 0..3 {
                    tx.try_push(&record(tx.pushed())).expect("sound");
                }
                tx
            });
            for _ in 0..3 {
                let n = rx.popped();
                if let Some(found) = rx.try_pop().expect("sound") {
                    assert_eq!(found, record(n));
                }
            }
            let mut tx = producer.join().expect("no panic");
            while rx.popped() < tx.pushed() {
                let n = rx.popped();
                assert_eq!(rx.try_pop().expect("sound"), Some(record(n)));
            }
            assert_eq!(rx.try_pop().expect("sound"), None);
            assert!(tx.try_push(&record(0)).expect("sound"), "an empty ring takes a record");
        });
    }
}

/// A model of the kernel's futex: comparing and going to sleep are one atomic step with respect to a wake-up.
struct ModelFutex {
    word: AtomicU32,
    queue: Mutex<()>,
    awake: Condvar,
}

impl FutexWord for Arc<ModelFutex> {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(order)
    }
    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_add(value, order)
    }
    fn fetch_or(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_or(value, order)
    }
    fn fetch_and(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_and(value, order)
    }
    fn fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
    fn sleep(&self, expected: u32, _: Duration) {
        // Without a time limit: a lost wake-up is a deadlock, which loom reports.
        let queue = self.queue.lock().expect("no panic");
        if self.word.load(Ordering::SeqCst) == expected {
            drop(self.awake.wait(queue).expect("no panic"));
        }
    }
    fn wake(&self) {
        let _queue = self.queue.lock().expect("no panic");
        self.awake.notify_all();
    }
}

fn model_doorbell() -> Doorbell<Arc<ModelFutex>> {
    Doorbell::over(Arc::new(ModelFutex {
        word: AtomicU32::new(0),
        queue: Mutex::new(()),
        awake: Condvar::new(),
    }))
}

/// In every interleaving the waiter returns and sees what the ringer published.
#[test]
fn loom_doorbell() {
    loom::model(|| {
        let bell = model_doorbell();
        let data = Arc::new(AtomicU64::new(0));
        let flag = Arc::new(AtomicU64::new(0));
        let ringer = {
            let (bell, data, flag) = (bell.clone(), Arc::clone(&data), Arc::clone(&flag));
            thread::spawn(move || {
                data.store(7, Ordering::Relaxed);
                flag.store(1, Ordering::Release);
                bell.ring();
            })
        };
        bell.wait_until(WaitPolicy::unlimited(Duration::ZERO), || flag.load(Ordering::Acquire) == 1)
            .expect("no deadline");
        assert_eq!(data.load(Ordering::Relaxed), 7);
        ringer.join().expect("no panic");
    });
}

/// A rank waits for two peers, whose flags arrive separately and share one doorbell.
#[test]
fn loom_doorbell_two_ringers() {
    let mut model = loom::model::Builder::new();
    // More than three preemptions per execution find nothing new here and take minutes.
    model.preemption_bound = Some(3);
    model.check(|| {
        let bell = model_doorbell();
        let flags = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let ringers: Vec<_> = (0..2)
            .map(|i| {
                let (bell, flags) = (bell.clone(), Arc::clone(&flags));
                thread::spawn(move || {
                    flags[i].store(1, Ordering::Release);
                    bell.ring();
                })
            })
            .collect();
        for flag in flags.iter() {
            bell.wait_until(WaitPolicy::unlimited(Duration::ZERO), || flag.load(Ordering::Acquire) == 1)
                .expect("no deadline");
        }
        for ringer in ringers {
            ringer.join().expect("no panic");
        }
    });
}

/// The caller of a team writes a job only when no helper reads the previous one, each helper does a turn at most once, and the
/// caller sees what helpers did.
#[test]
fn loom_team() {
    struct Team {
        turn: Turn<AtomicU64>,
        job: UnsafeCell<u64>,
        done: [UnsafeCell<u64>; 2],
    }
    // SAFETY: shared so that loom can check the accesses.
    unsafe impl Sync for Team {}
    // SAFETY: as above.
    unsafe impl Send for Team {}
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let team = Arc::new(Team {
            turn: Turn::over(AtomicU64::new(0)),
            job: UnsafeCell::new(0),
            done: [UnsafeCell::new(0), UnsafeCell::new(0)],
        });
        let helpers: Vec<_> = (0..2)
            .map(|helper| {
                let team = Arc::clone(&team);
                thread::spawn(move || {
                    let (mut last, mut turns) = (0, 0);
                    for _ in 0..2 {
                        if team.turn.enter(helper, &mut last).is_some() {
                            // SAFETY: loom checks every access before it happens.
                            let job = team.job.with(|job| unsafe { *job });
                            // SAFETY: as above.
                            team.done[helper].with_mut(|done| unsafe { *done += job });
                            team.turn.leave();
                            turns += job;
                        }
                    }
                    turns
                })
            })
            .collect();
        let mut seen = [0; 2];
        for (job, helpers) in [(1, 2), (10, 1)] {
            // SAFETY: loom checks every access before it happens.
            team.job.with_mut(|at| unsafe { *at = job });
            team.turn.open(helpers);
            team.turn.close();
            while !team.turn.is_empty() {
                thread::yield_now();
            }
            // SAFETY: as above.
            seen = team.done.each_ref().map(|done| done.with(|done| unsafe { *done }));
            assert!([0, 1, 10, 11].contains(&seen[0]) && seen[1] <= 1);
        }
        for (helper, seen) in helpers.into_iter().zip(seen) {
            assert_eq!(helper.join().expect("sound"), seen);
        }
    });
}
