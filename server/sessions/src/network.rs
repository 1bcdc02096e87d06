//! Sessions of clients on other hosts: an agent process for each, which opens an ordinary session for its client.
//!
//! The agent inherits two sockets and nothing else: a session socket, as if it had connected to the listener, and its control socket. Its
//! environment holds the variables of UCX and NIXL only. A thread starts it, waits for it and reaps it.

use std::ffi::OsString;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_agent::control::{self, Ready, Setup};
use expertd_core::backend::ClientKey;
use expertd_network::wire::VERSION;
use expertd_network::{Card, Transports};
use expertd_session::wire::MAX_CALLS;
use expertd_shm::region::PAGE;
use tokio::sync::oneshot;

use crate::connection::{SOCKET_TIMEOUT, serve_apart};
use crate::session::Opener;
use crate::shared::{Opening, Shared};
use crate::shares::{Amount, Share, Shares};

/// How long an agent may take until it can be reached.
const START_TIMEOUT: Duration = Duration::from_secs(15);
/// Largest size of an agent's metadata.
const MAX_METADATA: usize = 60 << 10;

/// How agents are started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Transports and ports of the agents.
    pub transports: Transports,
    /// Where NIXL is.
    pub library: Option<PathBuf>,
}

/// The session that a client asks for.
#[derive(Clone, Debug)]
pub struct NetworkRequest {
    /// Version of the protocol.
    pub version: u32,
    /// The client's agent.
    pub card: Card,
    /// Bytes of the row area.
    pub rows_bytes: u64,
    /// Largest number of calls in flight.
    pub calls: u32,
}

impl NetworkRequest {
    /// Refuses what no client of this release sends, with a sentence.
    pub(crate) fn check(&self) -> Result<(), String> {
        let NetworkRequest { version, card, rows_bytes, calls } = self;
        if *version != VERSION {
            return Err(format!(
                "the client speaks version {version} of network sessions, this service version {VERSION}; use client and service of \
                 the same release"
            ));
        }
        if !calls.is_power_of_two() || *calls > MAX_CALLS {
            return Err(format!("calls is {calls}, must be a power of two of at most {MAX_CALLS}"));
        }
        if *rows_bytes == 0 || rows_bytes % PAGE as u64 != 0 {
            return Err(format!("rows_bytes is {rows_bytes}, must be whole pages of {PAGE} bytes"));
        }
        let metadata = card.metadata.len();
        if metadata == 0 || metadata > MAX_METADATA {
            return Err(format!("metadata has {metadata} bytes, must have 1 to {MAX_METADATA}"));
        }
        Ok(())
    }
}

/// Opens network sessions.
pub struct NetworkSessions {
    shared: Arc<Shared>,
    config: NetworkConfig,
    /// Sessions of each client, and their mapped bytes.
    clients: Arc<Shares<ClientKey>>,
}

/// An agent that is starting or serves its client.
pub struct NetworkAgent {
    /// How it can be reached, or the error message for the client.
    pub ready: oneshot::Receiver<Result<Ready, String>>,
    /// Why the session has ended.
    pub ended: oneshot::Receiver<String>,
    /// Ends the agent when it is dropped.
    pub guard: AgentGuard,
}

/// Ends an agent when it is dropped.
pub struct AgentGuard(Option<UnixStream>);

impl Drop for AgentGuard {
    fn drop(&mut self) {
        if let Some(control) = &self.0 {
            let _ = control.shutdown(Shutdown::Both);
        }
    }
}

impl NetworkSessions {
    pub(crate) fn new(shared: Arc<Shared>, config: NetworkConfig) -> Self {
        NetworkSessions { shared, config, clients: Shares::new(None) }
    }

    /// Begins to open a session for a client.
    #[must_use]
    pub fn open(&self, client: ClientKey, request: NetworkRequest) -> NetworkAgent {
        let (to_ready, ready) = oneshot::channel();
        let (to_ended, ended) = oneshot::channel();
        let start = || {
            let (control, theirs) = UnixStream::pair()?;
            let guard = control.try_clone()?;
            let starting = Starting {
                shared: Arc::clone(&self.shared),
                config: self.config.clone(),
                clients: Arc::clone(&self.clients),
                client,
                request,
            };
            // The kernel ends a process with the thread that started it, which therefore stays.
            std::thread::Builder::new().name("agent".to_owned()).spawn(move || {
                let _ = to_ended.send(starting.run(&control, theirs, to_ready));
            })?;
            Ok::<_, io::Error>(guard)
        };
        let guard =
            start().inspect_err(|error| tracing::warn!(%error, "cannot start the thread of an agent"));
        NetworkAgent { ready, ended, guard: AgentGuard(guard.ok()) }
    }
}

/// The arguments of an agent's thread.
struct Starting {
    shared: Arc<Shared>,
    config: NetworkConfig,
    clients: Arc<Shares<ClientKey>>,
    client: ClientKey,
    request: NetworkRequest,
}

impl Starting {
    /// Runs the agent until its session has ended; returns why it has.
    fn run(
        self,
        control: &UnixStream,
        theirs: UnixStream,
        to_ready: oneshot::Sender<Result<Ready, String>>,
    ) -> String {
        let user = rustix::process::geteuid().as_raw();
        // Before there is a process: few are opening at the same time.
        let admitted = self
            .request
            .check()
            .and_then(|()| self.take_share())
            .and_then(|share| Ok((share, self.shared.begin_opening(user)?)));
        let (share, opening) = match admitted {
            Ok(admitted) => admitted,
            Err(reason) => {
                let _ = to_ready.send(Err(reason.clone()));
                return reason;
            }
        };
        let mut child = match self.spawn(theirs) {
            Ok(child) => child,
            Err(error) => {
                let _ = to_ready.send(Err(format!("its agent cannot be started: {error}")));
                return error.to_string();
            }
        };
        let ready = self.begin(control, Opener { user, pid: child.id(), client: self.client }, opening);
        let is_ready = ready.is_ok();
        let told = to_ready.send(ready).is_ok();
        let reason = if is_ready && told { control::receive_ended(control) } else { None };
        let _ = control.shutdown(Shutdown::Both);
        // An agent that is stopped, or stuck in the transport, does not read its control socket.
        let _ = child.kill();
        let status = child.wait();
        drop(share);
        reason.unwrap_or_else(|| match status {
            Ok(status) => format!("its agent has ended ({status})"),
            Err(error) => format!("its agent has ended ({error})"),
        })
    }

    /// Counts the session. One client has three quarters of the sessions and bytes at most, and all clients on other hosts together three
    /// quarters of the bytes.
    fn take_share(&self) -> Result<Share<ClientKey>, String> {
        let limits = &self.shared.config.limits;
        let most = (limits.sessions - limits.sessions / 4).max(1);
        let most_bytes = limits.bytes - limits.bytes / 4;
        let bytes =
            usize::try_from(self.request.rows_bytes).unwrap_or(usize::MAX).saturating_mul(limits.mappings);
        self.clients.take(self.client, bytes, |Amount { bytes: held, .. }, Amount { count: own, .. }| {
            if own >= most {
                let sessions = limits.sessions;
                return Err(format!(
                    "this client has {own} network sessions, as many as one may have; close one or raise max-sessions, which is {sessions}"
                ));
            }
            if held.saturating_add(bytes) > most_bytes {
                return Err(format!(
                    "a session of {} bytes, mapped by {} processes, exceeds {most_bytes} bytes beside {held} bytes of other network \
                     sessions; ask for fewer bytes of rows or raise max-session-bytes, which is {}",
                    self.request.rows_bytes, limits.mappings, limits.bytes
                ));
            }
            Ok(())
        })
    }

    fn spawn(&self, control: UnixStream) -> io::Result<Child> {
        let allowed = |name: &OsString| {
            let name = name.to_string_lossy();
            // The setting names the network device; the variable would win over it.
            let is_device = name == "UCX_NET_DEVICES" && self.config.transports.device.is_some();
            (name.starts_with("UCX_") && !is_device) || name.starts_with("NIXL_") || name == "LD_LIBRARY_PATH"
        };
        Command::new("/proc/self/exe")
            .arg0("expertd")
            .args(["network-agent", "--parent", &std::process::id().to_string()])
            .env_clear()
            .envs(std::env::vars_os().filter(|(name, _)| allowed(name)))
            // Rows lie in host memory. UCX refuses some transports where it sees a GPU.
            .env("CUDA_VISIBLE_DEVICES", "")
            .stdin(Stdio::from(OwnedFd::from(control)))
            .stdout(Stdio::null())
            // NIXL writes a line for whatever a client garbles.
            .stderr(Stdio::null())
            .spawn()
    }

    /// Gives the agent its session, and waits until it can be reached.
    fn begin(&self, control: &UnixStream, opener: Opener, opening: Opening) -> Result<Ready, String> {
        let begun = || {
            let (service, session) = UnixStream::pair()?;
            service.set_write_timeout(Some(SOCKET_TIMEOUT))?;
            serve_apart(&self.shared, service, opener, opening);
            let setup = Setup {
                client: self.request.card.clone(),
                rows_bytes: self.request.rows_bytes,
                calls: self.request.calls,
                transports: self.config.transports.clone(),
                library: self.config.library.clone(),
            };
            control.set_write_timeout(Some(SOCKET_TIMEOUT))?;
            control::send_setup(control, &setup, &session)?;
            drop(session);
            control::receive_ready(control, Instant::now() + START_TIMEOUT)
        };
        begun().map_err(|error| error.to_string())
    }
}
