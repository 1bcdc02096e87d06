//! All sessions: how many there may be, how much memory they hold, what they have done.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use expertd_shm::SharedRegion;
use metrics::gauge;

use super::listener::MAX_OPENING;
use super::open::OpenSession;
use super::release::HeldRegion;
use crate::steps::Attachment;
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

    /// Largest number of memories that the service holds: one for each open session and for each client that opens one, and as many
    /// again as open sessions for sessions that have ended and whose calls or ranks still use the memory.
    #[must_use]
    pub const fn memories(&self) -> usize {
        2 * self.sessions + MAX_OPENING
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
    /// What ranks have of its memory.
    pub attachment: Attachment,
    /// UUID of the client's GPU; `None` if the rows lie in host memory.
    pub device: Option<[u8; 16]>,
}

/// The sessions. One that has ended is listed as open until its client has closed the socket.
#[derive(Debug, Default)]
pub struct SessionRegistry {
    open: Mutex<HashMap<u64, OpenSession>>,
    charged: Arc<Mutex<Charged>>,
}

/// The memories of all sessions.
#[derive(Debug, Default)]
struct Charged {
    all: Memories,
    users: HashMap<u32, Memories>,
}

/// Memories that are held, and their mapped bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Memories {
    count: usize,
    bytes: usize,
}

impl Memories {
    const fn add(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes += bytes;
    }

    const fn remove(&mut self, bytes: usize) {
        self.count -= 1;
        self.bytes -= bytes;
    }
}

/// Mapped bytes that a session holds against the limit until the pages of its memory are freed.
#[derive(Debug)]
pub(super) struct Charge {
    charged: Arc<Mutex<Charged>>,
    user: u32,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut charged = self.charged.lock().unwrap_or_else(PoisonError::into_inner);
        charged.all.remove(self.bytes);
        gauge!(names::SESSION_BYTES).set(charged.all.bytes as f64);
        if let Some(own) = charged.users.get_mut(&self.user) {
            own.remove(self.bytes);
            if own.count == 0 {
                charged.users.remove(&self.user);
            }
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
        let own = charged.users.get(&user).copied().unwrap_or_default();
        for (held, whose, bytes_limit, memories) in [
            (charged.all, "other", limits.bytes, limits.memories()),
            (own, "its user's other", limits.of_user(limits.bytes), limits.of_user(limits.memories())),
        ] {
            if held.count >= memories {
                return Err(format!(
                    "{} memories of {whose} sessions are held, most of them of sessions that have ended and whose calls are under way; \
                     at most {memories} may be held; try later",
                    held.count
                ));
            }
            if held.bytes.checked_add(wanted).is_none_or(|sum| sum > bytes_limit) {
                return Err(format!(
                    "a session of {bytes} bytes, mapped by {} processes, exceeds {bytes_limit} bytes beside {} bytes of {whose} \
                     sessions; ask for fewer bytes of rows or raise max-session-bytes, which is {}",
                    limits.mappings, held.bytes, limits.bytes
                ));
            }
        }
        charged.all.add(wanted);
        charged.users.entry(user).or_default().add(wanted);
        gauge!(names::SESSION_BYTES).set(charged.all.bytes as f64);
        Ok(Charge { charged: Arc::clone(&self.charged), user, bytes: wanted })
    }

    /// Takes over a region that was made for a client, and the memory that the client passed, which are charged together.
    pub(super) fn hold(
        &self,
        region: &Arc<SharedRegion>,
        memory: Option<OwnedFd>,
        charge: Charge,
    ) -> HeldRegion {
        HeldRegion::new(region, memory, charge)
    }

    /// Adds an open session.
    ///
    /// # Errors
    /// The sentence with which the session is refused.
    pub(super) fn add(&self, limits: &SessionLimits, session: &OpenSession) -> Result<(), String> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memories_are_limited_in_number_and_bytes() {
        let limits = SessionLimits { sessions: 2, bytes: 1000, mappings: 4, several_users: true };
        let registry = SessionRegistry::default();
        // One user of several may have three quarters of each.
        let error = registry.charge(&limits, 1, 200).unwrap_err();
        assert!(error.contains("exceeds 750 bytes beside 0 bytes of its user's other"), "{error}");
        let large = registry.charge(&limits, 1, 187).unwrap();
        let error = registry.charge(&limits, 2, 100).unwrap_err();
        assert!(error.contains("exceeds 1000 bytes beside 748 bytes of other sessions"), "{error}");
        drop(large);
        let own: Vec<_> = (0..15).map(|_| registry.charge(&limits, 1, 1).unwrap()).collect();
        let error = registry.charge(&limits, 1, 1).unwrap_err();
        assert!(error.contains("15 memories of its user's other sessions are held"), "{error}");
        let others: Vec<_> = (0..5).map(|_| registry.charge(&limits, 2, 1).unwrap()).collect();
        let error = registry.charge(&limits, 3, 1).unwrap_err();
        assert!(error.contains("20 memories of other sessions are held"), "{error}");
        drop(own);
        assert!(registry.charge(&limits, 1, 1).is_ok());
        drop(others);
        let charged = registry.charged.lock().unwrap();
        assert!(charged.all == Memories::default() && charged.users.is_empty());
    }
}
