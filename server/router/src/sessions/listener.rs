//! The session socket: who may open a session, and what the socket of a session carries.
//!
//! A session has two threads: one reads its socket, whose end is the session's end, and one takes requests out of its
//! memory.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use expertd_session::cuda::wire::KIND_CUDA;
use expertd_session::memory::SessionMemory;
use expertd_session::socket;
use expertd_session::wire::{KIND_HOST, MAX_CALLS, MAX_CLIENT_FRAME, Open, RegionLayout, VERSION, frame};
use metrics::{counter, gauge};
use prost::Message as _;
use tokio_util::sync::CancellationToken;

use super::Steps;
use super::open::OpenSession;
use super::registry::{SessionLimits, SessionRegistry};
use super::session::{Opener, SessionState, Spin};
use crate::api::{Address, BindError, Listener, PlainSocket, client_key, encode_model};
use crate::steps::Service;
use crate::telemetry::{RequestMetrics, names};
use crate::watchdog;

/// Mode of the socket while only the service's own user may open sessions.
const OWN_MODE: u32 = 0o600;
/// Mode of the socket where other users may; their credentials are checked.
const SHARED_MODE: u32 = 0o666;
/// How long one write to a client's socket may take.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to open a session after it has connected.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);
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
    /// Number of the next session.
    pub(super) next: AtomicU64,
    connections: AtomicUsize,
    /// Clients by user that are connected and have not opened a session.
    opening: Mutex<HashMap<u32, usize>>,
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
        let registry = Arc::clone(service.sessions());
        Ok(SessionServer { listener, shared: Arc::new(Shared::new(config, service, registry)) })
    }

    /// Serves sessions until `shutdown`, then ends those that are open.
    pub async fn run(self, shutdown: CancellationToken) {
        let heartbeat = watchdog::watch("the task that accepts sessions");
        loop {
            heartbeat.tick();
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep(watchdog::TICK) => {}
                accepted = self.listener.accept() => match accepted {
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
            session.close(Some("the service ends"));
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
        Shared { config, steps, registry, metrics, next, connections, opening: Mutex::default() }
    }

    /// Threads of connections and sessions that have not ended.
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
        // Refusals are a few bytes, which an empty socket always takes.
        if let Err(text) = self.check_user(user) {
            return refuse(&socket, "user", &text);
        }
        let opening = match self.begin_opening(user) {
            Ok(opening) => opening,
            Err(text) => return refuse(&socket, "limit", &text),
        };
        let connected = self.connected_again();
        let opener = Opener {
            user,
            pid: peer.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
            client: client_key(&format!("uid:{user}")),
        };
        let thread = std::thread::Builder::new().name("session".to_owned());
        let started = thread.spawn(move || {
            if let Err(error) = connected.0.serve(&socket, opener, Some(opening)) {
                tracing::debug!(user, %error, "the socket of a session broke");
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start the thread of a session");
        }
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

    /// Serves the connection of a user who may open sessions until its end. `opening` counts it until it has opened one.
    pub(super) fn serve(
        self: &Arc<Self>,
        socket: &UnixStream,
        opener: Opener,
        opening: Option<Opening>,
    ) -> io::Result<()> {
        let deadline = Instant::now() + OPENING_TIMEOUT;
        loop {
            let (kind, payload) = match socket::receive_until(socket, MAX_CLIENT_FRAME, deadline) {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(()),
                Err(error) => {
                    refuse(socket, "protocol", &unreadable(&error));
                    return Err(error);
                }
            };
            match kind {
                frame::GET_MODEL => self.send_model(socket)?,
                frame::OPEN => {
                    let opened = kind_of(&payload).and_then(|kind| match kind {
                        KIND_CUDA => self.open_cuda(socket, opener, &payload, opening).map(OpenSession::Cuda),
                        _ => self.open(socket, opener, &payload, opening).map(OpenSession::Host),
                    });
                    return match opened {
                        Ok(session) => self.follow_to_the_end(socket, &session),
                        Err(reason) => {
                            refuse(socket, "open", &reason);
                            Ok(())
                        }
                    };
                }
                other => {
                    let text = format!(
                        "a frame of kind {other} before a session was opened; expected OPEN or GET_MODEL"
                    );
                    refuse(socket, "protocol", &text);
                    return Ok(());
                }
            }
        }
    }

    pub(super) fn send_model(&self, socket: &UnixStream) -> io::Result<()> {
        socket::send(socket, frame::MODEL, &encode_model(&self.steps.model()).encode_to_vec())
    }

    /// Makes a session and hands it to the client, which `opening` counts until the session does.
    fn open(
        self: &Arc<Self>,
        socket: &UnixStream,
        opener: Opener,
        payload: &[u8],
        opening: Option<Opening>,
    ) -> Result<Arc<SessionState>, String> {
        let open: Open = socket::record(payload).map_err(|error| error.to_string())?;
        if open.kind != KIND_HOST {
            return Err(format!(
                "sessions of kind {} are not served, only kinds {KIND_HOST} (host memory) and {KIND_CUDA} (a GPU's memory)",
                open.kind
            ));
        }
        if open.reserved != 0 {
            return Err(format!(
                "OPEN ends with {}, expected 0 in this version of the protocol",
                open.reserved
            ));
        }
        if open.calls == 0 || open.calls > MAX_CALLS || open.rows_bytes == 0 {
            return Err(format!(
                "a session needs 1 to {MAX_CALLS} calls and at least one byte of rows; the client asks for {} calls and {} bytes",
                open.calls, open.rows_bytes
            ));
        }
        let calls = open.calls.next_power_of_two();
        let rows_bytes = usize::try_from(open.rows_bytes).map_err(|error| error.to_string())?;
        let layout = RegionLayout::new(calls, rows_bytes).map_err(|error| error.to_string())?;
        let charge = self.registry.charge(&self.config.limits, opener.user, layout.bytes)?;
        let (memory, rings) = SessionMemory::create(calls, rows_bytes).map_err(|error| error.to_string())?;
        let number = self.next_number()?;
        let spin_us = u32::try_from(self.config.spin.as_micros()).unwrap_or(u32::MAX);
        let hidden = u32::try_from(self.steps.model().hidden).unwrap_or(u32::MAX);
        let opened = memory.opened(number, spin_us, hidden);
        let writing = socket.try_clone().map_err(|error| error.to_string())?;
        let metrics = Arc::clone(&self.metrics);
        let session = SessionState::new(number, opener, memory, rings.completions, writing, metrics, charge);
        self.registry.add(&self.config.limits, &OpenSession::Host(Arc::clone(&session)))?;
        drop(opening);
        let sent = socket::send(socket, frame::OPENED, bytemuck::bytes_of(&opened))
            .and_then(|()| socket::send_region(socket, session.memory().region()))
            .and_then(|()| socket.set_read_timeout(None));
        let (of_thread, steps) = (Arc::clone(&session), Arc::clone(&self.steps));
        let spin = Spin { waiting: self.config.spin, answered: self.config.spin_between_steps };
        let thread = std::thread::Builder::new().name(format!("session-{number}"));
        let started = sent.and_then(|()| {
            let connected = self.connected_again();
            thread.spawn(move || {
                let session = OpenSession::Host(Arc::clone(&of_thread));
                session.end_if_it_panics(|| of_thread.take_requests(rings.requests, &*steps, spin));
                drop(session);
                // The memory is released before the thread counts as ended.
                drop(of_thread);
                drop(connected);
            })
        });
        if let Err(error) = started {
            OpenSession::Host(session).close(None);
            self.registry.remove(number);
            return Err(error.to_string());
        }
        self.steps.session_opened(OpenSession::Host(Arc::clone(&session)));
        counter!(names::SESSIONS_OPENED_TOTAL).increment(1);
        tracing::info!(
            session = number,
            user = opener.user,
            pid = opener.pid,
            bytes = opened.region_bytes,
            calls,
            "session opened"
        );
        Ok(session)
    }

    /// Counts a thread of a connection or session.
    pub(super) fn connected_again(self: &Arc<Self>) -> Connected {
        self.connections.fetch_add(1, Ordering::AcqRel);
        Connected(Arc::clone(self))
    }

    /// Reads the socket of an open session until its end, which ends the session.
    fn follow_to_the_end(&self, socket: &UnixStream, session: &OpenSession) -> io::Result<()> {
        let (name, followed) = match session {
            OpenSession::Host(_) => ("session", self.follow(socket)),
            OpenSession::Cuda(session) => ("CUDA session", self.follow_cuda(socket, session)),
        };
        session.close(followed.as_ref().ok().and_then(Option::as_deref));
        self.registry.remove(session.number());
        self.steps.session_ended(session.memory_id());
        let status = session.status();
        let (calls, rows) = (status.calls_total, status.rows_total);
        tracing::info!(session = session.number(), calls, rows, "{name} ended");
        followed.map(drop)
    }

    /// Answers frames of an open host session until the socket ends; returns why the service ends it.
    fn follow(&self, socket: &UnixStream) -> io::Result<Option<String>> {
        loop {
            match socket::receive(socket, MAX_CLIENT_FRAME) {
                Ok(Some((frame::GET_MODEL, _))) => self.send_model(socket)?,
                Ok(Some((kind, _))) => {
                    return Ok(Some(format!(
                        "a frame of kind {kind} on the socket of an open session; expected GET_MODEL"
                    )));
                }
                Ok(None) => return Ok(None),
                Err(error) => return Ok(Some(unreadable(&error))),
            }
        }
    }
}

/// What a client is told whose bytes are no frame.
pub(super) fn unreadable(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            format!("no whole frame has come within {OPENING_TIMEOUT:?}; expected OPEN or GET_MODEL")
        }
        ErrorKind::UnexpectedEof => "the socket ended within a frame".to_owned(),
        _ => error.to_string(),
    }
}

/// The kind of session that an OPEN frame asks for. The version comes first, so that clients of other versions are told so whatever
/// else they send.
fn kind_of(payload: &[u8]) -> Result<u32, String> {
    let word = |at: usize| payload.get(at..at + 4)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    let version = word(0);
    if version != Some(VERSION) {
        let found = version.map_or_else(|| "none".to_owned(), |version| version.to_string());
        return Err(format!(
            "the client speaks version {found} of the session protocol, this service version {VERSION}; use client and service of \
             the same release"
        ));
    }
    word(4).ok_or_else(|| format!("an OPEN frame of {} bytes has no kind of session", payload.len()))
}

/// Tells a client why it is turned away.
fn refuse(socket: &UnixStream, reason: &'static str, text: &str) {
    counter!(names::SESSIONS_REFUSED_TOTAL, "reason" => reason).increment(1);
    tracing::info!(reason, text, "a session is refused");
    let _ = socket::send(socket, frame::REFUSED, text.as_bytes());
}
