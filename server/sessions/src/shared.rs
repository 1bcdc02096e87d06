//! What the threads of the session socket share, and who may open a session.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use expertd_core::backend::ModelInfo;
use expertd_core::listen::MAX_TURNED_AWAY;
use expertd_session::socket;
use expertd_session::wire::frame;
use expertd_telemetry::{Rarely, RequestMetrics, names};
use metrics::{counter, gauge};
use tokio::sync::Semaphore;

use crate::limits::{MAX_OPENING, SessionLimits};
use crate::registry::SessionRegistry;
use crate::shares::{Amount, Share, Shares};
use expertd_core::steps::Steps;

/// Encodes the description of a model, as GetModel answers it.
pub type DescribeModel = Box<dyn Fn(&Arc<ModelInfo>) -> Bytes + Send + Sync>;

/// Where and for whom sessions are served.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Path of the socket, if there is one.
    pub listen: Option<PathBuf>,
    /// Users who may open sessions.
    pub users: Vec<u32>,
    /// How many sessions there may be.
    pub limits: SessionLimits,
    /// How long clients spin before they sleep; if it is not zero, threads of CUDA sessions spin as well.
    pub spin: Duration,
    /// How long the thread of a host session spins for another request after it took one. Zero where the cores are those of CPU ranks, from
    /// which it would take time while they compute that request.
    pub spin_after_request: Duration,
    /// How long it spins for the next request after an answer, while no step is in flight.
    pub spin_between_steps: Duration,
}

/// The state that threads of connections share.
pub(crate) struct Shared {
    pub(crate) config: SessionConfig,
    pub(crate) steps: Arc<dyn Steps>,
    pub(crate) registry: Arc<SessionRegistry>,
    pub(crate) metrics: Arc<RequestMetrics>,
    pub(crate) describe: DescribeModel,
    /// Number of the next session.
    pub(crate) next: AtomicU64,
    /// Threads of connections and sessions.
    connections: AtomicUsize,
    /// Clients by user that are connected and have not opened a session.
    opening: Arc<Shares<u32>>,
    /// Clients that are being refused.
    pub(crate) refusing: Arc<Semaphore>,
    /// When each of [`REFUSALS`] was logged.
    refused: Mutex<[Rarely; REFUSALS.len()]>,
}

/// Reasons why sessions are refused.
const REFUSALS: [&str; 4] = ["user", "open", "protocol", "limit"];

/// Counts a connection until it is dropped.
pub(crate) struct Connected(Arc<Shared>);

impl Connected {
    /// The state that the threads share.
    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Release);
    }
}

/// Counts a client until it has opened a session or is gone.
pub(crate) type Opening = Share<u32>;

impl Shared {
    pub(crate) fn new(
        config: SessionConfig,
        steps: Arc<dyn Steps>,
        registry: Arc<SessionRegistry>,
        describe: DescribeModel,
    ) -> Self {
        let metrics = Arc::new(RequestMetrics::new("Session"));
        // Counters start at 0, so that a rate includes the first increment.
        for reason in REFUSALS {
            counter!(names::SESSIONS_REFUSED_TOTAL, "reason" => reason).increment(0);
        }
        counter!(names::SESSIONS_OPENED_TOTAL).increment(0);
        gauge!(names::SESSIONS).set(0.0);
        gauge!(names::SESSION_BYTES).set(0.0);
        let (next, connections) = (AtomicU64::new(1), AtomicUsize::new(0));
        let refusing = Arc::new(Semaphore::new(MAX_TURNED_AWAY));
        let (opening, refused) = (Shares::new(None), Mutex::default());
        Shared { config, steps, registry, metrics, describe, next, connections, opening, refusing, refused }
    }

    /// Threads of connections and sessions that have not ended, without those that wait for the clients of ended sessions.
    pub(crate) fn threads(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }

    /// Tells a client why it is turned away. Users who may not open sessions can connect at will, so that not every line is logged.
    pub(crate) fn refuse(&self, socket: &UnixStream, reason: &'static str, text: &str) {
        counter!(names::SESSIONS_REFUSED_TOTAL, "reason" => reason).increment(1);
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let of_reason = refused.iter_mut().zip(REFUSALS).find(|(_, name)| *name == reason);
        let logged = of_reason.and_then(|(refused, _)| refused.now());
        drop(refused);
        if let Some(times) = logged {
            tracing::info!(reason, text, times, "sessions are refused");
        }
        let _ = socket::send(socket, frame::REFUSED, text.as_bytes());
    }

    /// The error message for a user who may not open sessions.
    pub(crate) fn check_user(&self, user: u32) -> Result<(), String> {
        let users = &self.config.users;
        if users.contains(&user) {
            return Ok(());
        }
        Err(format!(
            "user {user} may not open sessions; the service allows users {users:?} (session-allow-uid)"
        ))
    }

    /// Counts a client that may open a session, or returns the error message for it. One of several users leaves places for the
    /// others.
    pub(crate) fn begin_opening(&self, user: u32) -> Result<Opening, String> {
        self.opening.take(user, 0, |Amount { count: all, .. }, Amount { count: own, .. }| {
            if all < MAX_OPENING && own < self.config.limits.of_user(MAX_OPENING) {
                return Ok(());
            }
            Err(format!(
                "{all} clients are connected without a session, {own} of them of user {user}, and no more may be; try later"
            ))
        })
    }

    /// Counts a thread of a connection or session.
    pub(crate) fn connected_again(self: &Arc<Self>) -> Connected {
        self.connections.fetch_add(1, Ordering::AcqRel);
        Connected(Arc::clone(self))
    }
}
