//! All sessions: how many there may be, how much memory they hold, what they have done.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::gauge;

pub use super::session::RowsTravel;
use super::session::SessionState;
use crate::telemetry::names;

/// How many sessions there may be and how much memory they may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Sessions that are open at once.
    pub sessions: usize,
    /// Mapped bytes of all sessions, counted once for the router and once for each rank.
    pub bytes: usize,
    /// Processes that map a session: the router and its ranks.
    pub mappings: usize,
}

/// One session as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    /// Number of the session.
    pub session: u64,
    /// User of the client's process.
    pub user: u32,
    /// The client's process, if the system names it; 0 otherwise.
    pub pid: u32,
    /// Since the session was opened.
    pub age: Duration,
    /// Bytes of its region.
    pub bytes: u64,
    /// Calls that ended.
    pub calls_total: u64,
    /// Rows of the calls that were answered.
    pub rows_total: u64,
    /// Calls in flight.
    pub calls_in_flight: u64,
    /// How rows travel between its memory and the ranks.
    pub rows_travel: RowsTravel,
}

/// The open sessions.
#[derive(Debug, Default)]
pub struct SessionRegistry {
    open: Mutex<HashMap<u64, Arc<SessionState>>>,
    charged: Arc<AtomicUsize>,
}

/// Mapped bytes that a session holds against the limit until its memory is released.
#[derive(Debug)]
pub(super) struct Charge {
    charged: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let left = self.charged.fetch_sub(self.bytes, Ordering::Relaxed) - self.bytes;
        gauge!(names::SESSION_BYTES).set(left as f64);
    }
}

impl SessionRegistry {
    fn open(&self) -> MutexGuard<'_, HashMap<u64, Arc<SessionState>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges a region of `bytes` bytes.
    ///
    /// # Errors
    /// The sentence with which the session is refused.
    pub(super) fn charge(&self, limits: &SessionLimits, bytes: usize) -> Result<Charge, String> {
        let wanted = bytes.saturating_mul(limits.mappings);
        let charge = |held: usize| held.checked_add(wanted).filter(|&sum| sum <= limits.bytes);
        match self.charged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge) {
            Ok(held) => {
                gauge!(names::SESSION_BYTES).set((held + wanted) as f64);
                Ok(Charge { charged: Arc::clone(&self.charged), bytes: wanted })
            }
            Err(held) => Err(format!(
                "a session of {bytes} bytes, mapped by {} processes, exceeds max-session-bytes = {} beside {held} bytes of \
                 other sessions; ask for fewer bytes of rows or raise max-session-bytes",
                limits.mappings, limits.bytes
            )),
        }
    }

    /// Adds an open session.
    ///
    /// # Errors
    /// The sentence with which the session is refused.
    pub(super) fn add(&self, limits: &SessionLimits, session: &Arc<SessionState>) -> Result<(), String> {
        let mut open = self.open();
        if open.len() >= limits.sessions {
            return Err(format!(
                "{} sessions are open, as many as max-sessions allows; close one or raise max-sessions",
                open.len()
            ));
        }
        open.insert(session.number(), Arc::clone(session));
        gauge!(names::SESSIONS).set(open.len() as f64);
        Ok(())
    }

    /// Removes a session that has ended.
    pub(super) fn remove(&self, session: u64) {
        let mut open = self.open();
        open.remove(&session);
        gauge!(names::SESSIONS).set(open.len() as f64);
    }

    /// The open sessions.
    pub(super) fn sessions(&self) -> Vec<Arc<SessionState>> {
        self.open().values().cloned().collect()
    }

    /// The open sessions as operators see them, by number.
    #[must_use]
    pub fn status(&self) -> Vec<SessionStatus> {
        let mut sessions: Vec<SessionStatus> =
            self.sessions().iter().map(|session| session.status()).collect();
        sessions.sort_by_key(|session| session.session);
        sessions
    }
}
