//! A watchdog for the threads and tasks without which the process is useless. It ends such a process, so that a supervisor
//! starts another one.
//!
//! [`watch`] returns a [`Heartbeat`], whose holder ticks at least once a second. After a standstill of 2 s, [`lost`] reports
//! it, and health and readiness turn negative; after 5 s the process ends. A process that lacks processor time for a moment
//! recovers. A heartbeat that is dropped without [`Heartbeat::finish`] (its holder panicked or returned) is lost
//! permanently: the process ends 2 s later.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Interval at which heartbeats are checked.
const ROUND: Duration = Duration::from_millis(250);
/// Consecutive rounds without a tick that count as a standstill: 2 s. Counted rather than timed, so that a stop of the whole
/// process does not count against its threads.
const STILL_ROUNDS: u32 = 8;
/// Consecutive rounds without a tick after which the process ends: 5 s.
const END_ROUNDS: u32 = 20;
/// Time for probes to see a loss before the process ends.
const NOTICE: Duration = Duration::from_secs(2);
/// Interval at which idle holders should tick.
pub const TICK: Duration = Duration::from_millis(500);

static WATCHED: Mutex<Vec<Arc<Watch>>> = Mutex::new(Vec::new());
static STOPPED: AtomicBool = AtomicBool::new(false);
static LOST: Mutex<Option<String>> = Mutex::new(None);

#[derive(Debug)]
struct Watch {
    name: &'static str,
    ticks: AtomicU64,
    dropped: AtomicBool,
    finished: AtomicBool,
}

/// A sign of life of one thread or task.
#[derive(Debug)]
pub struct Heartbeat(Arc<Watch>);

impl Heartbeat {
    /// Shows life. Costs one atomic addition.
    pub fn tick(&self) {
        self.0.ticks.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the watch, because the holder ends as planned.
    pub fn finish(self) {
        self.0.finished.store(true, Ordering::Relaxed);
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.0.dropped.store(true, Ordering::Relaxed);
    }
}

/// Starts to watch the calling thread or task. `name` says what it does.
#[must_use]
pub fn watch(name: &'static str) -> Heartbeat {
    let watch = Arc::new(Watch {
        name,
        ticks: AtomicU64::new(0),
        dropped: AtomicBool::new(false),
        finished: AtomicBool::new(false),
    });
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&watch));
    Heartbeat(watch)
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Watch>>> = const { RefCell::new(None) };
}

/// [`watch`] for a thread; functions that it calls may [`tick`] for it.
#[must_use]
pub fn watch_thread(name: &'static str) -> Heartbeat {
    let heartbeat = watch(name);
    CURRENT.set(Some(Arc::clone(&heartbeat.0)));
    heartbeat
}

/// Shows life of the calling thread if it is watched. For long operations that make progress.
pub fn tick() {
    CURRENT.with_borrow(|watch| {
        if let Some(watch) = watch {
            watch.ticks.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// The thread or task that makes no progress or was lost, if there is one.
#[must_use]
pub fn lost() -> Option<String> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Result of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    Life,
    Standstill(String),
    Loss(String),
}

/// Starts the thread that checks heartbeats. It calls `end` once to end the process.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(end: impl FnOnce(&str) + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
        let mut seen = Vec::new();
        loop {
            std::thread::sleep(ROUND);
            let watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if STOPPED.load(Ordering::Relaxed) {
                return;
            }
            let found = look(&watched, &mut seen);
            let reason = match &found {
                Found::Life => None,
                Found::Standstill(reason) | Found::Loss(reason) => Some(reason.clone()),
            };
            let before =
                std::mem::replace(&mut *LOST.lock().unwrap_or_else(PoisonError::into_inner), reason.clone());
            if let (Some(reason), None) = (&reason, &before) {
                tracing::error!(reason, "the service does not serve");
            }
            if let Found::Loss(reason) = found {
                // Probes have had time to see the standstill.
                if before.is_none() {
                    std::thread::sleep(NOTICE);
                }
                return end(&reason);
            }
        }
    })?;
    Ok(())
}

/// Notes that the process ends as planned, so that dropped heartbeats are no loss.
pub fn stop() {
    STOPPED.store(true, Ordering::Relaxed);
}

/// One round. `seen` holds each watch's ticks at the last change, and the rounds since then.
fn look(watched: &[Arc<Watch>], seen: &mut Vec<(u64, u32)>) -> Found {
    seen.resize(watched.len(), (u64::MAX, 0));
    let mut found = Found::Life;
    for (watch, (ticks, still)) in watched.iter().zip(seen) {
        if watch.finished.load(Ordering::Relaxed) {
            continue;
        }
        if watch.dropped.load(Ordering::Relaxed) {
            return Found::Loss(format!("{} ended unexpectedly", watch.name));
        }
        let now = watch.ticks.load(Ordering::Relaxed);
        *still = if now == *ticks { *still + 1 } else { 0 };
        *ticks = now;
        if *still >= END_ROUNDS {
            return Found::Loss(format!("{} has not responded for {:?}", watch.name, ROUND * END_ROUNDS));
        }
        if *still >= STILL_ROUNDS {
            found = Found::Standstill(format!("{} does not respond", watch.name));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(name: &'static str) -> Arc<Watch> {
        Arc::new(Watch {
            name,
            ticks: AtomicU64::new(0),
            dropped: AtomicBool::new(false),
            finished: AtomicBool::new(false),
        })
    }

    #[test]
    fn a_standstill_is_a_loss_and_work_is_not() {
        let watched = [watch("one"), watch("two")];
        let mut seen = Vec::new();
        for _ in 0..100 {
            watched.iter().for_each(|watch| _ = watch.ticks.fetch_add(3, Ordering::Relaxed));
            assert_eq!(look(&watched, &mut seen), Found::Life);
        }
        for _ in 1..STILL_ROUNDS {
            watched[0].ticks.fetch_add(1, Ordering::Relaxed);
            assert_eq!(look(&watched, &mut seen), Found::Life);
        }
        watched[0].ticks.fetch_add(1, Ordering::Relaxed);
        assert_eq!(look(&watched, &mut seen), Found::Standstill("two does not respond".to_owned()));
        watched.iter().for_each(|watch| _ = watch.ticks.fetch_add(1, Ordering::Relaxed));
        assert_eq!(look(&watched, &mut seen), Found::Life, "it recovers");
        for _ in 0..END_ROUNDS {
            watched[0].ticks.fetch_add(1, Ordering::Relaxed);
            look(&watched, &mut seen);
        }
        watched[0].ticks.fetch_add(1, Ordering::Relaxed);
        assert_eq!(look(&watched, &mut seen), Found::Loss("two has not responded for 5s".to_owned()));
    }

    #[test]
    fn a_panic_is_a_loss_and_an_orderly_end_is_not() {
        let watched = [watch("one"), watch("two")];
        let mut seen = Vec::new();
        Heartbeat(Arc::clone(&watched[0])).finish();
        assert_eq!(look(&watched, &mut seen), Found::Life);
        let heartbeat = Heartbeat(Arc::clone(&watched[1]));
        let panicked = std::thread::spawn(move || {
            heartbeat.tick();
            std::panic::resume_unwind(Box::new("lost"));
        });
        assert!(panicked.join().is_err());
        assert_eq!(look(&watched, &mut seen), Found::Loss("two ended unexpectedly".to_owned()));
    }
}
