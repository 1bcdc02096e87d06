//! Watches over the threads and tasks without which the process would be useless: its supervisor should start another
//! one rather than keep a process that only looks alive.
//!
//! [`watch`] hands out a [`Heartbeat`]; its holder ticks at least once a second. After a standstill of 2 s, [`lost`] says
//! so, which health and readiness report; the process ends if it lasts for 5 s. A process that starves for processor
//! time for a moment recovers. A heartbeat that is dropped without [`Heartbeat::finish`] (its holder panicked or
//! returned) is a loss for good: the process ends 2 s later.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often heartbeats are looked at.
const ROUND: Duration = Duration::from_millis(250);
/// Rounds in a row without a tick that make a standstill: 2 s. Counted rather than timed, so that a stop of the whole
/// process does not count against its threads.
const STILL_ROUNDS: u32 = 8;
/// Rounds in a row without a tick after which the process ends: 5 s.
const END_ROUNDS: u32 = 20;
/// How long probes see a loss before the process ends.
const NOTICE: Duration = Duration::from_secs(2);
/// How often holders without other work should tick.
pub const TICK: Duration = Duration::from_millis(500);

static WATCHED: Mutex<Vec<Arc<Pulse>>> = Mutex::new(Vec::new());
static STOPPED: AtomicBool = AtomicBool::new(false);
static LOST: Mutex<Option<String>> = Mutex::new(None);

#[derive(Debug)]
struct Pulse {
    name: &'static str,
    ticks: AtomicU64,
    dropped: AtomicBool,
    finished: AtomicBool,
}

/// A sign of life of one thread or task.
#[derive(Debug)]
pub struct Heartbeat(Arc<Pulse>);

impl Heartbeat {
    /// Shows life. Costs one atomic addition.
    pub fn tick(&self) {
        self.0.ticks.fetch_add(1, Ordering::Relaxed);
    }

    /// The holder ends as it should.
    pub fn finish(self) {
        self.0.finished.store(true, Ordering::Relaxed);
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.0.dropped.store(true, Ordering::Relaxed);
    }
}

/// Watches over the calling thread or task from now on. `name` says what it does.
#[must_use]
pub fn watch(name: &'static str) -> Heartbeat {
    let pulse = Arc::new(Pulse {
        name,
        ticks: AtomicU64::new(0),
        dropped: AtomicBool::new(false),
        finished: AtomicBool::new(false),
    });
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&pulse));
    Heartbeat(pulse)
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Pulse>>> = const { RefCell::new(None) };
}

/// [`watch`] for a thread: what it calls may [`tick`] for it.
#[must_use]
pub fn watch_thread(name: &'static str) -> Heartbeat {
    let heartbeat = watch(name);
    CURRENT.set(Some(Arc::clone(&heartbeat.0)));
    heartbeat
}

/// Shows life of the calling thread, if it is watched: for whatever may take long on it and knows that it makes
/// progress.
pub fn tick() {
    CURRENT.with_borrow(|pulse| {
        if let Some(pulse) = pulse {
            pulse.ticks.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// What stands still or was lost, if anything is.
#[must_use]
pub fn lost() -> Option<String> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// What a round found.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    Life,
    Standstill(String),
    Loss(String),
}

/// Starts the thread that looks at heartbeats. `end` is called once, when the process is to end; it should
/// end it.
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
                // Probes have seen a standstill for long enough.
                if before.is_none() {
                    std::thread::sleep(NOTICE);
                }
                return end(&reason);
            }
        }
    })?;
    Ok(())
}

/// The process ends in order: heartbeats that end with it are no loss.
pub fn stop() {
    STOPPED.store(true, Ordering::Relaxed);
}

/// One round: `seen` has the ticks of each pulse at its last change and the rounds since.
fn look(watched: &[Arc<Pulse>], seen: &mut Vec<(u64, u32)>) -> Found {
    seen.resize(watched.len(), (u64::MAX, 0));
    let mut found = Found::Life;
    for (pulse, (ticks, still)) in watched.iter().zip(seen) {
        if pulse.finished.load(Ordering::Relaxed) {
            continue;
        }
        if pulse.dropped.load(Ordering::Relaxed) {
            return Found::Loss(format!("{} ended unexpectedly", pulse.name));
        }
        let now = pulse.ticks.load(Ordering::Relaxed);
        *still = if now == *ticks { *still + 1 } else { 0 };
        *ticks = now;
        if *still >= END_ROUNDS {
            return Found::Loss(format!("{} has shown no life for {:?}", pulse.name, ROUND * END_ROUNDS));
        }
        if *still >= STILL_ROUNDS {
            found = Found::Standstill(format!("{} shows no life", pulse.name));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pulse(name: &'static str) -> Arc<Pulse> {
        Arc::new(Pulse {
            name,
            ticks: AtomicU64::new(0),
            dropped: AtomicBool::new(false),
            finished: AtomicBool::new(false),
        })
    }

    #[test]
    fn a_standstill_is_a_loss_and_work_is_not() {
        let watched = [pulse("one"), pulse("two")];
        let mut seen = Vec::new();
        for _ in 0..100 {
            watched.iter().for_each(|pulse| _ = pulse.ticks.fetch_add(3, Ordering::Relaxed));
            assert_eq!(look(&watched, &mut seen), Found::Life);
        }
        for _ in 1..STILL_ROUNDS {
            watched[0].ticks.fetch_add(1, Ordering::Relaxed);
            assert_eq!(look(&watched, &mut seen), Found::Life);
        }
        watched[0].ticks.fetch_add(1, Ordering::Relaxed);
        assert_eq!(look(&watched, &mut seen), Found::Standstill("two shows no life".to_owned()));
        watched.iter().for_each(|pulse| _ = pulse.ticks.fetch_add(1, Ordering::Relaxed));
        assert_eq!(look(&watched, &mut seen), Found::Life, "it recovers");
        for _ in 0..END_ROUNDS {
            watched[0].ticks.fetch_add(1, Ordering::Relaxed);
            look(&watched, &mut seen);
        }
        watched[0].ticks.fetch_add(1, Ordering::Relaxed);
        assert_eq!(look(&watched, &mut seen), Found::Loss("two has shown no life for 5s".to_owned()));
    }

    #[test]
    fn a_panic_is_a_loss_and_an_orderly_end_is_not() {
        let watched = [pulse("one"), pulse("two")];
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
