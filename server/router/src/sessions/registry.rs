//! All sessions: how many there may be, how much memory they hold, what they have done.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::gauge;

use super::open::OpenSession;
pub use super::session::RowsTravel;
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
    /// Whether several users may open sessions. Each of them has three quarters of the sessions and bytes at most.
    pub several_users: bool,
}

impl SessionLimits {
    /// The part of a limit that one user may have.
    pub(super) const fn of_user(&self, limit: usize) -> usize {
        if self.several_users { limit - limit / 4 } else { limit }
    }
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
    /// Bytes of its region, or of the client's memory on its GPU.
    pub bytes: u64,
    /// Calls that ended.
    pub calls_total: u64,
    /// Rows of the calls that were answered.
    pub rows_total: u64,
    /// Calls in flight.
    pub calls_in_flight: u64,
    /// How rows travel between its memory and the ranks.
    pub rows_travel: RowsTravel,
    /// UUID of the client's GPU; `None` if the rows lie in host memory.
    pub device: Option<[u8; 16]>,
}

/// The open sessions.
#[derive(Debug, Default)]
pub struct SessionRegistry {
    open: Mutex<HashMap<u64, OpenSession>>,
    charged: Arc<Mutex<Charged>>,
}

/// Mapped bytes of all sessions.
#[derive(Debug, Default)]
struct Charged {
    all: usize,
    users: HashMap<u32, usize>,
}

/// Mapped bytes that a session holds against the limit until its memory is released.
#[derive(Debug)]
pub(super) struct Charge {
    charged: Arc<Mutex<Charged>>,
    user: u32,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut charged = self.charged.lock().unwrap_or_else(PoisonError::into_inner);
        charged.all -= self.bytes;
        gauge!(names::SESSION_BYTES).set(charged.all as f64);
        let left = charged.users.get_mut(&self.user).map(|held| {
            *held -= self.bytes;
            *held
        });
        if left == Some(0) {
            charged.users.remove(&self.user);
        }
    }
}

impl SessionRegistry {
    fn open(&self) -> MutexGuard<'_, HashMap<u64, OpenSession>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges a region of `bytes` bytes to a user.
    ///
    /// # Errors
    /// The sentence with which the session is refused.
    pub(super) fn charge(&self, limits: &SessionLimits, user: u32, bytes: usize) -> Result<Charge, String> {
        let wanted = bytes.saturating_mul(limits.mappings);
        let mut charged = self.charged.lock().unwrap_or_else(PoisonError::into_inner);
        let own = charged.users.get(&user).copied().unwrap_or(0);
        for (held, whose, limit) in
            [(charged.all, "other", limits.bytes), (own, "its user's other", limits.of_user(limits.bytes))]
        {
            if held.checked_add(wanted).is_none_or(|sum| sum > limit) {
                return Err(format!(
                    "a session of {bytes} bytes, mapped by {} processes, exceeds {limit} bytes beside {held} bytes of {whose} \
                     sessions; ask for fewer bytes of rows or raise max-session-bytes, which is {}",
                    limits.mappings, limits.bytes
                ));
            }
        }
        charged.all += wanted;
        *charged.users.entry(user).or_default() += wanted;
        gauge!(names::SESSION_BYTES).set(charged.all as f64);
        Ok(Charge { charged: Arc::clone(&self.charged), user, bytes: wanted })
    }

    /// Adds an open session.
    ///
    /// # Errors
    /// The sentence with which the session is refused.
    pub(super) fn add(&self, limits: &SessionLimits, session: &OpenSession) -> Result<(), String> {
        let mut open = self.open();
        if open.len() >= limits.sessions {
            return Err(format!(
                "{} sessions are open, as many as max-sessions allows; close one or raise max-sessions",
                open.len()
            ));
        }
        let user = session.user();
        let own = open.values().filter(|session| session.user() == user).count();
        if own >= limits.of_user(limits.sessions) {
            return Err(format!(
                "user {user} has {own} sessions, as many as one of several users may have; close one or raise max-sessions, \
                 which is {}",
                limits.sessions
            ));
        }
        open.insert(session.number(), session.clone());
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
    pub(super) fn sessions(&self) -> Vec<OpenSession> {
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
