//! The session socket: who may open a session.
//!
//! A session has two threads: one reads its socket, whose end is the session's end, and one takes requests out of its
//! memory.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use expertd_core::backend::client_key;
use expertd_core::listen::{BindError, UnixSocket};
use expertd_core::steps::{ClientMemory as _, Service};
use expertd_ipc::apart::drop_apart;
use expertd_ipc::control::DeviceKind;
use expertd_ipc::passing::allow_passed_descriptors;
use expertd_telemetry::progress;
use std::os::unix::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::connection::{SOCKET_TIMEOUT, serve_apart};
use crate::network::{NetworkConfig, NetworkSessions};
use crate::registry::SessionRegistry;
use crate::session::Opener;
use crate::shared::{DescribeModel, SessionConfig, Shared};

/// Mode of the socket while only the service's own user may open sessions.
const OWN_MODE: u32 = 0o600;
/// Mode of the socket where other users may; their credentials are checked.
const SHARED_MODE: u32 = 0o666;
/// How long the ends of sessions are waited for when the service stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The bound session socket.
pub struct SessionServer {
    /// `None` if only clients on other hosts open sessions.
    listener: Option<UnixSocket>,
    shared: Arc<Shared>,
}

impl SessionServer {
    /// Binds the session socket.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn bind(
        config: SessionConfig,
        service: Arc<Service>,
        describe: DescribeModel,
    ) -> Result<SessionServer, BindError> {
        let listener = match &config.listen {
            Some(path) => Some(listen(path, &config.users)?),
            None => None,
        };
        let registry = Arc::<SessionRegistry>::default();
        let listed = Arc::clone(&registry);
        service.list_sessions_with(move || listed.status());
        Ok(SessionServer { listener, shared: Arc::new(Shared::new(config, service, registry, describe)) })
    }

    /// Opens sessions for clients on other hosts.
    #[must_use]
    pub fn network(&self, config: NetworkConfig) -> NetworkSessions {
        NetworkSessions::new(Arc::clone(&self.shared), config)
    }

    /// Serves sessions until `shutdown`, then ends those that are open.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let heartbeat = progress::need("the task that accepts sessions");
        loop {
            heartbeat.tick();
            let may_accept = self.shared.refusing.available_permits() > 0;
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep(progress::TICK) => {}
                accepted = accept(self.listener.as_mut()), if may_accept => match accepted {
                    Ok(stream) => connected(&self.shared, stream),
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
            while self.shared.threads() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(STOP_TIMEOUT, ended).await.is_err() {
            tracing::warn!("sessions do not end in time");
        }
    }
}

/// Binds the session socket for these users.
fn listen(path: &Path, users: &[u32]) -> Result<UnixSocket, BindError> {
    let own = rustix::process::geteuid().as_raw();
    let mode = if users.iter().all(|&user| user == own) { OWN_MODE } else { SHARED_MODE };
    let listener = UnixSocket::bind(path, mode)?;
    if let Err(error) = allow_passed_descriptors(listener.listener(), false) {
        tracing::debug!(%error, "this kernel lets clients of a socket pass descriptors");
    }
    Ok(listener)
}

/// The next connection to the socket, if there is one.
async fn accept(listener: Option<&mut UnixSocket>) -> io::Result<tokio::net::UnixStream> {
    match listener {
        Some(listener) => Ok(listener.accept().await?.0),
        None => std::future::pending().await,
    }
}

/// Starts the thread of a connection, or turns it away.
fn connected(shared: &Arc<Shared>, stream: tokio::net::UnixStream) {
    let peer = stream.peer_cred();
    let prepared = stream.into_std().and_then(|socket| {
        socket.set_nonblocking(false)?;
        socket.set_write_timeout(Some(SOCKET_TIMEOUT))?;
        Ok(socket)
    });
    let (Ok(peer), Ok(socket)) = (peer, prepared) else { return };
    let user = peer.uid();
    if let Err(text) = shared.check_user(user) {
        return turn_away(shared, socket, "user", &text);
    }
    let opening = match shared.begin_opening(user) {
        Ok(opening) => opening,
        Err(text) => return turn_away(shared, socket, "limit", &text),
    };
    // Only clients of CUDA sessions pass a descriptor.
    if shared.steps.device() == DeviceKind::Cuda {
        let _ = allow_passed_descriptors(&socket, true);
    }
    let opener = Opener {
        user,
        pid: peer.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
        client: client_key(&format!("uid:{user}")),
    };
    serve_apart(shared, socket, opener, opening);
}

/// Tells a client why it is turned away, and closes its socket on a thread of its own.
fn turn_away(shared: &Shared, socket: UnixStream, reason: &'static str, text: &str) {
    // A few bytes, which an empty socket always takes.
    shared.refuse(&socket, reason, text);
    drop_apart((socket, Arc::clone(&shared.refusing).try_acquire_owned()));
}
