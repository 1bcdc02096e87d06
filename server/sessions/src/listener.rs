//! The session socket: who may open a session.
//!
//! A session has two threads: one reads its socket, whose end is the session's end, and one takes requests out of its
//! memory.

use std::sync::Arc;
use std::time::Duration;

use expertd_core::apart::drop_apart;
use expertd_core::backend::client_key;
use expertd_core::listen::{BindError, UnixSocket};
use expertd_core::steps::{ClientMemory as _, Service};
use expertd_ipc::control::DeviceKind;
use expertd_ipc::passing::allow_passed_descriptors;
use expertd_telemetry::progress;
use std::os::unix::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::connection::serve;
use crate::registry::SessionRegistry;
use crate::session::Opener;
use crate::shared::{DescribeModel, SessionConfig, Shared};

/// Mode of the socket while only the service's own user may open sessions.
const OWN_MODE: u32 = 0o600;
/// Mode of the socket where other users may; their credentials are checked.
const SHARED_MODE: u32 = 0o666;
/// How long one write to a client's socket may take.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the ends of sessions are waited for when the service stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The bound session socket.
pub struct SessionServer {
    listener: UnixSocket,
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
        let own = rustix::process::geteuid().as_raw();
        let mode = if config.users.iter().all(|&user| user == own) { OWN_MODE } else { SHARED_MODE };
        let listener = UnixSocket::bind(&config.listen, mode)?;
        if let Err(error) = allow_passed_descriptors(listener.listener(), false) {
            tracing::debug!(%error, "this kernel lets clients of a socket pass descriptors");
        }
        let registry = Arc::<SessionRegistry>::default();
        let listed = Arc::clone(&registry);
        service.list_sessions_with(move || listed.status());
        Ok(SessionServer { listener, shared: Arc::new(Shared::new(config, service, registry, describe)) })
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
                    Ok((stream, _)) => connected(&self.shared, stream),
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
    let mut opening = match shared.begin_opening(user) {
        Ok(opening) => Some(opening),
        Err(text) => return turn_away(shared, socket, "limit", &text),
    };
    // Only clients of CUDA sessions pass a descriptor.
    if shared.steps.device() == DeviceKind::Cuda {
        let _ = allow_passed_descriptors(&socket, true);
    }
    let connected = shared.connected_again();
    let opener = Opener {
        user,
        pid: peer.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
        client: client_key(&format!("uid:{user}")),
    };
    let thread = std::thread::Builder::new().name("session".to_owned());
    let started = thread.spawn(move || {
        let served = serve(connected.shared(), &socket, opener, &mut opening);
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
fn turn_away(shared: &Shared, socket: UnixStream, reason: &'static str, text: &str) {
    // A few bytes, which an empty socket always takes.
    shared.refuse(&socket, reason, text);
    drop_apart((socket, shared.refusing.begin()));
}
