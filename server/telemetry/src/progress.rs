//! Threads and tasks without which the process is useless. It ends when one of them returns or panics, so that a supervisor starts
//! another process; `/healthz` reports the age of each one's last progress.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Interval at which idle threads and tasks should tick.
pub const TICK: Duration = Duration::from_millis(500);

static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
static NEEDED: Mutex<Vec<Arc<Progress>>> = Mutex::new(Vec::new());
static END: OnceLock<fn(&str)> = OnceLock::new();
static STOPPED: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Progress {
    name: &'static str,
    /// Time of the last progress in milliseconds since [`BEGUN`].
    at_ms: AtomicU64,
}

impl Progress {
    fn tick(&self) {
        self.at_ms.store(now_ms(), Ordering::Relaxed);
    }
}

fn now_ms() -> u64 {
    BEGUN.elapsed().as_millis() as u64
}

/// Held by a thread or task that the process needs. If it is dropped without [`finish`](Self::finish), the process ends.
#[derive(Debug)]
pub struct Needed {
    progress: Arc<Progress>,
    has_finished: bool,
}

impl Needed {
    /// Notes progress.
    pub fn tick(&self) {
        self.progress.tick();
    }

    /// Notes that the holder ends as planned.
    pub fn finish(mut self) {
        self.has_finished = true;
    }
}

impl Drop for Needed {
    fn drop(&mut self) {
        let mut needed = NEEDED.lock().unwrap_or_else(PoisonError::into_inner);
        needed.retain(|progress| !Arc::ptr_eq(progress, &self.progress));
        drop(needed);
        if !self.has_finished && !STOPPED.load(Ordering::Relaxed) {
            let reason = format!("{} ended unexpectedly", self.progress.name);
            tracing::error!(reason, "the process cannot go on");
            if let Some(end) = END.get() {
                end(&reason);
            }
        }
    }
}

/// Declares that the process needs the calling thread or task. `name` says what it does.
#[must_use]
pub fn need(name: &'static str) -> Needed {
    let needed = guard(name);
    NEEDED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&needed.progress));
    needed
}

/// [`need`] without an age, for a thread that may wait for ever.
#[must_use]
pub fn guard(name: &'static str) -> Needed {
    Needed { progress: Arc::new(Progress { name, at_ms: AtomicU64::new(now_ms()) }), has_finished: false }
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Progress>>> = const { RefCell::new(None) };
}

/// [`need`] for a thread; functions that it calls may [`tick`] for it.
#[must_use]
pub fn need_thread(name: &'static str) -> Needed {
    let needed = need(name);
    CURRENT.set(Some(Arc::clone(&needed.progress)));
    needed
}

/// Notes progress of the calling thread if the process needs it. For long operations.
pub fn tick() {
    CURRENT.with_borrow(|progress| progress.iter().for_each(|progress| progress.tick()));
}

/// Sets the function that ends the process after the unexpected end of a thread or task. It is told the reason.
pub fn end_with(end: fn(&str)) {
    let _ = END.set(end);
}

/// Notes that the process ends as planned.
pub fn stop() {
    STOPPED.store(true, Ordering::Relaxed);
}

/// The name of each thread and task that the process needs, and the age of its last progress.
#[must_use]
pub fn ages() -> Vec<(&'static str, Duration)> {
    let needed = NEEDED.lock().unwrap_or_else(PoisonError::into_inner);
    let now = now_ms();
    let age = |progress: &Progress| now.saturating_sub(progress.at_ms.load(Ordering::Relaxed));
    needed.iter().map(|progress| (progress.name, Duration::from_millis(age(progress)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    static ENDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn ends_of(name: &str) -> usize {
        let ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
        ends.iter().filter(|reason| reason.starts_with(name)).count()
    }

    #[test]
    fn a_panic_and_a_return_end_the_process_and_a_planned_end_does_not() {
        end_with(|reason| ENDS.lock().unwrap_or_else(PoisonError::into_inner).push(reason.to_owned()));
        let panicked = std::thread::spawn(|| {
            let _needed = need_thread("panicking");
            std::panic::resume_unwind(Box::new("lost"));
        });
        assert!(panicked.join().is_err());
        drop(need("returning"));
        need("finishing").finish();
        assert_eq!((ends_of("panicking ended"), ends_of("returning ended"), ends_of("finishing")), (1, 1, 0));
    }

    #[test]
    fn ages_begin_anew_with_each_tick_and_end_with_the_thread() {
        let age_of = |name| ages().into_iter().find(|(of, _)| *of == name).map(|(_, age)| age);
        let needed = need_thread("ageing");
        std::thread::sleep(Duration::from_millis(60));
        assert!(age_of("ageing").is_some_and(|age| age >= Duration::from_millis(50)));
        let before = age_of("ageing");
        tick();
        assert!(age_of("ageing") < before);
        needed.finish();
        assert_eq!(age_of("ageing"), None);
    }
}
