//! Settings of host sessions.

use super::PlanError;
use super::values::{derive, value, within};
use crate::serve::settings::Given;
use expertd_sessions::{MAX_OPENING, SessionLimits};

/// Where and for whom sessions are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionPlan {
    /// Address of the session socket; `None` if only clients on other hosts open sessions.
    pub listen: Option<String>,
    /// Users who may open sessions.
    pub users: Vec<u32>,
    /// How many sessions there may be.
    pub limits: SessionLimits,
}

impl SessionPlan {
    /// File descriptors of all sessions: one for each client's socket, with and without a session, and for each memory a duplicate of
    /// the socket, the region, and the memory on a GPU.
    pub const fn descriptors(&self) -> usize {
        self.limits.sessions + MAX_OPENING + 3 * self.limits.memories()
    }

    /// What network sessions have besides: two for each agent, and four while it opens.
    pub const fn agent_descriptors(&self) -> usize {
        2 * self.limits.sessions + 4 * MAX_OPENING
    }

    /// Bytes that the router maps of all sessions, at most.
    pub const fn router_bytes(&self) -> usize {
        self.limits.bytes / self.limits.mappings
    }

    pub(super) fn new(given: &mut Given, ranks: u32) -> Result<Option<Self>, PlanError> {
        let users = match &given.session_allow_uid.0 {
            Some(text) => {
                let users = text.split(',').map(|user| user.trim().parse());
                let users: Result<Vec<u32>, _> = users.collect();
                users.map_err(|_| {
                    value(
                        "session-allow-uid",
                        format!("is `{text}`, must be user ids separated by commas, e.g. 1000,1001"),
                    )
                })?
            }
            None => vec![rustix::process::geteuid().as_raw()],
        };
        let list = users.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        derive(&mut given.session_allow_uid, list, "the service's own user");
        let sessions = within("max-sessions", given.max_sessions.0.unwrap_or(0), 1, 1024)?;
        let bytes = given.max_session_bytes.0.unwrap_or(0);
        let listen = given.session_listen.0.clone();
        if listen.is_none() && given.network_listen.0.is_none() {
            return Ok(None);
        }
        if let Some(listen) = listen.as_ref().filter(|listen| !listen.starts_with("unix:")) {
            return Err(value(
                "session-listen",
                format!(
                    "is `{listen}`, must be unix:PATH: sessions share memory; clients on other hosts need --network-listen"
                ),
            ));
        }
        let limits = SessionLimits {
            sessions: sessions as usize,
            bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
            mappings: ranks as usize + 1,
            several_users: users.len() > 1,
        };
        Ok(Some(SessionPlan { listen, users, limits }))
    }
}
