//! The session socket: who may open a session.
//!
//! A session has two threads: one reads its socket, whose end is the session's end, and one takes requests out of its
//! memory.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use expertd_session::socket;
use expertd_session::wire::frame;
use metrics::{counter, gauge};
use tokio_util::sync::CancellationToken;

use super::Steps;
use super::registry::{SessionLimits, SessionRegistry};
use super::session::Opener;
use crate::apart::{Closing, drop_apart};
use crate::api::{Address, BindError, Listener, ModelDescription, PlainSocket, client_key};
use crate::progress;
use crate::steps::{ClientMemory as _, Service};
use crate::telemetry::{Rarely, RequestMetrics, names};
use expertd_ipc::control::DeviceKind;
use expertd_ipc::passing::allow_passed_descriptors;

/// Mode of the socket while only the service's own user may open sessions.
const OWN_MODE: u32 = 0o600;
/// Mode of the socket where other users may; their credentials are checked.
const SHARED_MODE: u32 = 0o666;
/// How long one write to a client's socket may take.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest number of clients that are connected and have not opened a session.
pub const MAX_OPENING: usize = 16;
/// How long the ends of sessions are waited for when the service stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Where and for whom sessions are served.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// The socket, `unix:PATH`.
    pub listen: Address,
    /// Users who may open sessions.
    pub users: Vec<u32>,
    /// How many sessions there may be.
    pub limits: SessionLimits,
    /// How long threads spin before they sleep.
    pub spin: Duration,
    /// How long they spin while no step is in flight.
    pub spin_between_steps: Duration,
}

/// The bound session socket.
pub struct SessionServer {
    listener: Listener,
    shared: Arc<Shared>,
}

/// What the threads of connections share.
pub(super) struct Shared {
    pub(super) config: SessionConfig,
    pub(super) steps: Arc<dyn Steps>,
    pub(super) registry: Arc<SessionRegistry>,
    pub(super) metrics: Arc<RequestMetrics>,
    pub(super) description: ModelDescription,
    /// Number of the next session.
    pub(super) next: AtomicU64,
    connections: AtomicUsize,
    /// Clients by user that are connected and have not opened a session.
    opening: Mutex<HashMap<u32, usize>>,
    /// Clients that are being refused.
    refusing: Closing,
    /// When each of [`REFUSALS`] was logged.
    refused: Mutex<[Rarely; REFUSALS.len()]>,
}

/// Reasons why sessions are refused.
const REFUSALS: [&str; 4] = ["user", "open", "protocol", "limit"];

impl SessionServer {
    /// Binds the session socket.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub async fn bind(config: SessionConfig, service: Arc<Service>) -> Result<SessionServer, BindError> {
        let own = rustix::process::geteuid().as_raw();
        let mode = if config.users.iter().all(|&user| user == own) { OWN_MODE } else { SHARED_MODE };
        let listener = Listener::bind(&config.listen, mode).await?;
        listener.deny_passed_descriptors();
        let registry = Arc::clone(service.sessions());
        Ok(SessionServer { listener, shared: Arc::new(Shared::new(config, service, registry)) })
    }

    /// Serves sessions until `shutdown`, then ends those that are open.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let heartbeat = progress::need("the task that accepts sessions");
        loop {
            heartbeat.tick();
            let may_accept = self.shared.refusing.has_room();
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep(progress::TICK) => {}
                accepted = self.listener.accept(), if may_accept => match accepted {
                    Ok((PlainSocket::Right(stream), _)) => self.shared.connected(stream),
                    Ok(_) => {}
                    Err(error) => {
                        tracing::debug!(%error, "could not accept a session");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                }
            }
        }
        heartbeat.finish();
        for session in self.shared.registry.sessions() {
            session.end("the service ends".to_owned());
        }
        let ended = async {
            while self.shared.connections.load(Ordering::Acquire) > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(STOP_TIMEOUT, ended).await.is_err() {
            tracing::warn!("sessions do not end in time");
        }
    }
}

/// Counts a connection until it is dropped.
pub(super) struct Connected(Arc<Shared>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Release);
    }
}

/// Counts a client until it has opened a session or is gone.
pub(super) struct Opening {
    shared: Arc<Shared>,
    user: u32,
}

impl Drop for Opening {
    fn drop(&mut self) {
        let mut opening = self.shared.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = opening.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                opening.remove(&self.user);
            }
        }
    }
}

impl Shared {
    pub(super) fn new(config: SessionConfig, steps: Arc<dyn Steps>, registry: Arc<SessionRegistry>) -> Self {
        let metrics = Arc::new(RequestMetrics::new("Session"));
        // Counters start at 0, so that a rate includes the first increment.
        for reason in REFUSALS {
            counter!(names::SESSIONS_REFUSED_TOTAL, "reason" => reason).increment(0);
        }
        counter!(names::SESSIONS_OPENED_TOTAL).increment(0);
        gauge!(names::SESSIONS).set(0.0);
        gauge!(names::SESSION_BYTES).set(0.0);
        let (next, connections) = (AtomicU64::new(1), AtomicUsize::new(0));
        let description = ModelDescription::default();
        let (opening, refusing, refused) = (Mutex::default(), Closing::default(), Mutex::default());
        Shared {
            config,
            steps,
            registry,
            metrics,
            description,
            next,
            connections,
            opening,
            refusing,
            refused,
        }
    }

    /// Threads of connections and sessions that have not ended, without those that wait for the clients of ended sessions.
    #[cfg(feature = "fuzzing")]
    pub(super) fn threads(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }

    /// Starts the thread of a connection, or turns it away.
    fn connected(self: &Arc<Self>, stream: tokio::net::UnixStream) {
        let peer = stream.peer_cred();
        let prepared = stream.into_std().and_then(|socket| {
            socket.set_nonblocking(false)?;
            socket.set_write_timeout(Some(SOCKET_TIMEOUT))?;
            Ok(socket)
        });
        let (Ok(peer), Ok(socket)) = (peer, prepared) else { return };
        let user = peer.uid();
        if let Err(text) = self.check_user(user) {
            return self.turn_away(socket, "user", &text);
        }
        let mut opening = match self.begin_opening(user) {
            Ok(opening) => Some(opening),
            Err(text) => return self.turn_away(socket, "limit", &text),
        };
        // Only clients of CUDA sessions pass a descriptor.
        if self.steps.device() == DeviceKind::Cuda {
            let _ = allow_passed_descriptors(&socket, true);
        }
        let connected = self.connected_again();
        let opener = Opener {
            user,
            pid: peer.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
            client: client_key(&format!("uid:{user}")),
        };
        let thread = std::thread::Builder::new().name("session".to_owned());
        let started = thread.spawn(move || {
            let served = connected.0.serve(&socket, opener, &mut opening);
            // A client that keeps its socket does not delay the end of the service.
            drop(connected);
            match served {
                Ok(Some(ended)) => ended.wait_for_client(socket),
                Ok(None) => drop(socket),
                Err(error) => {
                    tracing::debug!(user, %error, "the socket of a client broke");
                    drop(socket);
                }
            }
            // A client counts until its socket is closed, which can take as long as it likes.
            drop(opening);
        });
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start the thread of a session");
        }
    }

    /// Tells a client why it is turned away, and closes its socket on a thread of its own.
    fn turn_away(&self, socket: UnixStream, reason: &'static str, text: &str) {
        // A few bytes, which an empty socket always takes.
        self.refuse(&socket, reason, text);
        drop_apart((socket, self.refusing.begin()));
    }

    /// Tells a client why it is turned away. Users who may not open sessions can connect at will, so that not every line is logged.
    pub(super) fn refuse(&self, socket: &UnixStream, reason: &'static str, text: &str) {
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

    /// The sentence with which a user is refused who may not open sessions.
    fn check_user(&self, user: u32) -> Result<(), String> {
        let users = &self.config.users;
        if users.contains(&user) {
            return Ok(());
        }
        Err(format!(
            "user {user} may not open sessions; the service allows users {users:?} (session-allow-uid)"
        ))
    }

    /// Counts a client that may open a session, or returns the sentence with which it is refused. One of several users leaves
    /// places for the others.
    fn begin_opening(self: &Arc<Self>, user: u32) -> Result<Opening, String> {
        let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = opening.values().sum();
        let own = opening.entry(user).or_default();
        if all >= MAX_OPENING || *own >= self.config.limits.of_user(MAX_OPENING) {
            let text = format!(
                "{all} clients are connected without a session, {own} of them of user {user}, and no more may be; try later"
            );
            if *own == 0 {
                opening.remove(&user);
            }
            return Err(text);
        }
        *own += 1;
        Ok(Opening { shared: Arc::clone(self), user })
    }

    /// Counts a thread of a connection or session.
    pub(super) fn connected_again(self: &Arc<Self>) -> Connected {
        self.connections.fetch_add(1, Ordering::AcqRel);
        Connected(Arc::clone(self))
    }
}
