//! All sessions.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use expertd_core::backend::SessionStatus;
use expertd_telemetry::names;
use metrics::gauge;

use crate::limits::{RegionCharges, SessionLimits};
use crate::open::OpenSession;

/// The sessions. One that has ended is listed as open until its client has closed the socket.
#[derive(Debug, Default)]
pub(crate) struct SessionRegistry {
    open: Mutex<HashMap<u64, OpenSession>>,
    /// The memories of all sessions, those that have ended included.
    pub(crate) charges: RegionCharges,
}

impl SessionRegistry {
    fn open(&self) -> MutexGuard<'_, HashMap<u64, OpenSession>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an open session.
    ///
    /// # Errors
    /// The error message for the client.
    pub(crate) fn add(&self, limits: &SessionLimits, session: &OpenSession) -> Result<(), String> {
        let mut open = self.open();
        if open.len() >= limits.sessions {
            return Err(format!(
                "{} sessions are open or ended and not yet closed by their clients, as many as max-sessions allows; close one or \
                 raise max-sessions",
                open.len()
            ));
        }
        let user = session.session().user();
        let own = open.values().filter(|session| session.session().user() == user).count();
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

    /// Removes a session that has ended and whose client has closed the socket.
    pub(crate) fn remove(&self, session: u64) {
        let mut open = self.open();
        open.remove(&session);
        gauge!(names::SESSIONS).set(open.len() as f64);
    }

    /// The open sessions.
    pub(crate) fn sessions(&self) -> Vec<OpenSession> {
        self.open().values().cloned().collect()
    }

    /// The open sessions as operators see them, by number.
    pub(crate) fn status(&self) -> Vec<SessionStatus> {
        let mut sessions: Vec<SessionStatus> =
            self.sessions().iter().map(|session| session.status()).collect();
        sessions.sort_by_key(|session| session.session);
        sessions
    }
}
