//! Memory traffic for the echo: it leaves the caches as cold as a step that streams weights leaves them for the service.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Size of the memory that is read: more than the last-level cache of a host.
const BYTES: usize = 256 << 20;
/// Bytes read between two checks of the clock.
const BLOCK: usize = 64 << 10;

/// Threads that stream memory for a while before each answer of the echo.
#[derive(Debug)]
pub struct MemoryTraffic {
    memory: Vec<u64>,
    threads: usize,
    asked_ns: AtomicU64,
    took_ns: AtomicU64,
}

impl MemoryTraffic {
    /// Prepares streaming on `threads` threads; none happens before [`Self::ask`].
    #[must_use]
    pub fn new(threads: usize) -> Arc<MemoryTraffic> {
        let memory = (0..(BYTES / size_of::<u64>()) as u64).collect();
        let (asked_ns, took_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(MemoryTraffic { memory, threads: threads.max(1), asked_ns, took_ns })
    }

    /// Sets the time that later answers are delayed by; zero disables the traffic.
    pub fn ask(&self, time: Duration) {
        self.asked_ns.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The delay of the last answer.
    #[must_use]
    pub fn took(&self) -> Duration {
        Duration::from_nanos(self.took_ns.load(Ordering::Relaxed))
    }

    /// Reads memory on all threads for the requested time.
    pub async fn stream(self: &Arc<MemoryTraffic>) {
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
        // A thread that fails only leaves the caches warmer.
        let _ = futures_util::future::join_all(threads).await;
        self.took_ns.store(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}
