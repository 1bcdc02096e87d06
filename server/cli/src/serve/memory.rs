//! Returns memory that a burst needed to the system.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use expertd_memory as memory;

/// Longest time for which threads wait for one another.
const MEETING: Duration = Duration::from_millis(1);

/// Returns unused memory to the system once per period: of the pool, and of the other allocator on each of the runtime's
/// `workers` threads.
pub(super) async fn settle(workers: usize) {
    let mut periods = tokio::time::interval(memory::RELEASE_PERIOD);
    loop {
        periods.tick().await;
        memory::release_unused();
        collect(workers).await;
    }
}

/// Collects on every worker of the runtime, except on those that are busy for longer than [`MEETING`].
async fn collect(workers: usize) {
    let meeting = Arc::new(Meeting::new(workers));
    let tasks = (0..workers).map(|_| {
        let meeting = Arc::clone(&meeting);
        tokio::spawn(async move {
            meeting.attend();
            memory::collect();
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        let _ = task.await;
    }
}

/// A place where tasks wait for one another, so that each of them runs on another thread.
struct Meeting {
    expected: usize,
    end: Instant,
    present: Mutex<usize>,
    arrived: Condvar,
}

impl Meeting {
    fn new(expected: usize) -> Meeting {
        let end = Instant::now() + MEETING;
        Meeting { expected, end, present: Mutex::new(0), arrived: Condvar::new() }
    }

    /// Blocks the thread until all expected tasks are present or [`MEETING`] is over.
    fn attend(&self) {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        *present += 1;
        self.arrived.notify_all();
        let left = self.end.saturating_duration_since(Instant::now());
        let _ = self.arrived.wait_timeout_while(present, left, |present| *present < self.expected);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn tasks_of_a_meeting_run_on_different_threads() {
        let meeting = Meeting { end: Instant::now() + Duration::from_secs(60), ..Meeting::new(4) };
        let meeting = Arc::new(meeting);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build();
        let threads: HashSet<_> = runtime.map_or_else(
            |_| HashSet::new(),
            |runtime| {
                let tasks: Vec<_> = (0..4)
                    .map(|_| {
                        let meeting = Arc::clone(&meeting);
                        runtime.spawn(async move {
                            meeting.attend();
                            std::thread::current().id()
                        })
                    })
                    .collect();
                runtime.block_on(async {
                    let mut threads = HashSet::new();
                    for task in tasks {
                        threads.extend(task.await);
                    }
                    threads
                })
            },
        );
        assert_eq!(threads.len(), 4);
    }

    #[test]
    fn a_meeting_ends_without_those_who_do_not_come() {
        let meeting = Meeting::new(2);
        meeting.attend();
        assert!(Instant::now() >= meeting.end);
    }
}
