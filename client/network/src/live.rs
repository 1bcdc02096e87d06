//! The ends of sessions: a relay is ended from outside. Before this process runs exit handlers its relays end, because those of UCX take
//! down what a relay's thread is using.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use expertd_shm::wait::Doorbell;

/// Ends a session of the network from outside.
#[derive(Clone, Debug)]
pub struct End(Arc<EndState>);

#[derive(Debug)]
struct EndState {
    reason: Mutex<Option<String>>,
    has_ended: AtomicBool,
    bell: Doorbell,
}

impl End {
    /// `bell` wakes the relay's thread.
    pub(crate) fn new(bell: Doorbell) -> End {
        End(Arc::new(EndState { reason: Mutex::default(), has_ended: AtomicBool::new(false), bell }))
    }

    /// Ends the session: waiting calls fail with `reason`, unless it has ended already.
    pub fn end(&self, reason: &str) {
        self.0.reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.to_owned());
        self.0.has_ended.store(true, Ordering::Release);
        self.0.bell.ring();
    }

    pub(crate) fn is_same(&self, other: &End) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.0.has_ended.load(Ordering::Acquire)
    }

    pub(crate) fn reason(&self) -> String {
        self.0.reason.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }
}

/// How long the exit of the process waits for relays.
const PATIENCE: Duration = Duration::from_secs(2);

static LIVE: Mutex<Vec<(u32, End)>> = Mutex::new(Vec::new());
static GONE: Condvar = Condvar::new();
static AT_EXIT: Once = Once::new();

/// A relay that runs. Its thread drops this after its endpoint.
#[derive(Debug)]
pub(crate) struct Live(End);

impl Live {
    /// After NIXL was loaded, whose handlers therefore run later.
    pub(crate) fn new(end: &End) -> Live {
        AT_EXIT.call_once(register);
        live().push((std::process::id(), end.clone()));
        Live(end.clone())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        live().retain(|(_, end)| !end.is_same(&self.0));
        GONE.notify_all();
    }
}

fn live() -> MutexGuard<'static, Vec<(u32, End)>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[allow(unsafe_code, reason = "registers an exit handler")]
fn register() {
    // SAFETY: the handler is a function of this program, takes nothing and does not unwind. Without room for it, exits are as before.
    unsafe { libc::atexit(end_all) };
}

/// Ends the relays of this process. A fork has none: their threads are its parent's.
extern "C" fn end_all() {
    let process = std::process::id();
    let mut left = live();
    for (_, end) in left.iter().filter(|(owner, _)| *owner == process) {
        end.end("the process exits");
    }
    let is_mine = |relays: &mut Vec<(u32, End)>| relays.iter().any(|(owner, _)| *owner == process);
    if is_mine(&mut left) {
        drop(GONE.wait_timeout_while(left, PATIENCE, is_mine));
    }
}
