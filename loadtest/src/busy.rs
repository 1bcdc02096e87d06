//! Memory traffic like that of a step, for an echo that is found as cold as a service is after streaming weights.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// More than the last level of cache of a host.
const BYTES: usize = 256 << 20;
/// Read between two looks at the clock.
const BLOCK: usize = 64 << 10;

/// Cores that stream memory for a while before each answer.
#[derive(Debug)]
pub struct Busy {
    memory: Vec<u64>,
    threads: usize,
    asked_ns: AtomicU64,
    took_ns: AtomicU64,
}

impl Busy {
    /// Streams over `threads` threads once it is asked to.
    #[must_use]
    pub fn new(threads: usize) -> Arc<Busy> {
        let memory = (0..(BYTES / size_of::<u64>()) as u64).collect();
        let (asked_ns, took_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Busy { memory, threads: threads.max(1), asked_ns, took_ns })
    }

    /// How long each answer is kept waiting from now on; zero is not at all.
    pub fn ask(&self, time: Duration) {
        self.asked_ns.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How long the last answer was kept waiting.
    #[must_use]
    pub fn took(&self) -> Duration {
        Duration::from_nanos(self.took_ns.load(Ordering::Relaxed))
    }

    /// Reads memory on all threads for as long as was asked.
    pub async fn stream(self: &Arc<Busy>) {
        let begun = Instant::now();
        let until = begun + Duration::from_nanos(self.asked_ns.load(Ordering::Relaxed));
        if until == begun {
            return;
        }
        let share = self.memory.len() / self.threads;
        let threads = (0..self.threads).map(|thread| {
            let busy = Arc::clone(self);
            tokio::task::spawn_blocking(move || {
                let mine = &busy.memory[thread * share..][..share];
                for block in mine.chunks(BLOCK / size_of::<u64>()).cycle() {
                    black_box(block.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
                    if Instant::now() >= until {
                        break;
                    }
                }
            })
        });
        // A thread that could not run leaves the caches warmer, which shows in no other way.
        let _ = futures_util::future::join_all(threads).await;
        self.took_ns.store(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}
