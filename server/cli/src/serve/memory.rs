//! Returns memory that a burst needed to the system.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use expertd_memory as memory;

/// Longest time for which threads wait for one another.
const MEETING: Duration = Duration::from_millis(1);

/// Number of the current period.
static PERIOD: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The last period in which this thread has collected.
    static COLLECTED: Cell<u64> = const { Cell::new(0) };
}

/// Returns the calling thread's unused memory to the system if it has not done so in this period. Each thread of the runtime
/// calls it before it sleeps.
pub(super) fn collect_once() {
    let period = PERIOD.load(Ordering::Relaxed);
    if COLLECTED.replace(period) != period {
        memory::collect();
    }
}

/// Variable in the environment of ranks and loaders if the router alone does without huge pages.
const HUGE_PAGES: &str = "EXPERTD_CHILD_HUGE_PAGES";

/// Disables transparent huge pages in this process: with them, the allocators' first small object in a range of 2 MiB makes the
/// whole range resident, and a range that was returned to the system becomes resident again as one. Child processes inherit
/// this; the returned variable in their environment lets [`restore_huge_pages`] undo it. `None`: they were disabled before.
///
/// # Errors
/// If the system refuses it. The process then has huge pages, as before.
pub(super) fn disable_huge_pages() -> io::Result<Option<(String, String)>> {
    if rustix::thread::transparent_huge_pages_are_disabled()? {
        return Ok(None);
    }
    rustix::thread::disable_transparent_huge_pages(true)?;
    Ok(Some((HUGE_PAGES.to_owned(), "1".to_owned())))
}

/// Gives a rank or loader the huge pages that its router does without.
pub(crate) fn restore_huge_pages() {
    if std::env::var_os(HUGE_PAGES).is_some()
        && let Err(error) = rustix::thread::disable_transparent_huge_pages(false)
    {
        tracing::warn!(%error, "weights and rows are in small pages, which may be slower");
    }
}

/// Returns unused memory to the system once per period: of the pool, and of the other allocator on each of the runtime's
/// `workers` threads.
pub(super) async fn settle(workers: usize) {
    let mut periods = tokio::time::interval(memory::RELEASE_PERIOD);
    loop {
        periods.tick().await;
        memory::release_unused();
        PERIOD.fetch_add(1, Ordering::Relaxed);
        collect(workers).await;
    }
}

/// Wakes every worker of the runtime, so that each collects: at once, or before it sleeps again if it came too late for the
/// meeting. Busy workers collect before they sleep next.
async fn collect(workers: usize) {
    let meeting = Arc::new(Meeting::new(workers));
    let tasks = (0..workers).map(|_| {
        let meeting = Arc::clone(&meeting);
        tokio::spawn(async move {
            meeting.attend();
            collect_once();
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
