//! Accepts connections, drives them, and ends those that exceed their limits.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use expertd_proto::transport::{
    CONNECTION_WINDOW_BYTES, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_FRAME_BYTES, STREAM_WINDOW_BYTES,
};
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metrics::{counter, gauge};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::layers::{Admit, Authenticate, Client, Services};
use super::listener::{Listener, PlainSocket, Socket};
use super::places::{Origin, Place, Places, count_end};
use crate::access::{Peer, Protocol, peer_name};
use crate::bytes::activity::{Activity, ConnectionTimeouts, Verdict};
use expertd_telemetry::progress;
use expertd_telemetry::{Rarely, names};

/// Pause after a failed `accept`, for example if no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Largest size of the headers of one call.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Calls of one connection that the peer reset before the service took them. With more, the connection ends.
const MAX_RESETS_BEFORE_ACCEPT: usize = 20;
/// Calls of one connection that ended by an error of the peer. With more, the connection ends.
const MAX_RESETS_BY_ERROR: usize = 256;

/// The connections of one kind of listener.
pub(crate) struct Connections {
    services: Arc<Services>,
    places: Arc<Places>,
    timeouts: ConnectionTimeouts,
    max_streams: u32,
    tasks: TaskTracker,
    /// Cancelled when the service accepts no new connections; open ones finish their calls.
    closing: CancellationToken,
    /// Cancelled when all connections end at once.
    end: CancellationToken,
}

impl Connections {
    pub(crate) fn new(
        services: Services,
        places: Arc<Places>,
        timeouts: ConnectionTimeouts,
        max_streams: u32,
        closing: CancellationToken,
        end: CancellationToken,
    ) -> Arc<Connections> {
        let (services, max_streams) = (Arc::new(services), max_streams.max(1));
        let tasks = TaskTracker::new();
        Arc::new(Connections { services, places, timeouts, max_streams, tasks, closing, end })
    }

    /// Accepts connections until the service closes. A connection above a limit is closed.
    pub(crate) async fn accept(self: Arc<Self>, mut listener: Listener) {
        let (mut refused, mut failed) = (Rarely::default(), Rarely::default());
        let closer = Closer::start();
        let heartbeat = progress::need("the task that accepts connections");
        let mut ticks = tokio::time::interval(progress::TICK);
        loop {
            heartbeat.tick();
            let (socket, origin) = tokio::select! {
                () = self.closing.cancelled() => return heartbeat.finish(),
                _ = ticks.tick() => continue,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        if let Some(times) = failed.now() {
                            tracing::warn!(%error, times, "could not accept a connection");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            let apart = closer.keep(&socket);
            match self.places.take(origin) {
                Ok(place) => {
                    counter!(names::CONNECTIONS_ACCEPTED_TOTAL).increment(1);
                    self.tasks.spawn(Arc::clone(&self).drive(socket, origin, place, apart));
                }
                Err(reason) => {
                    drop((socket, apart));
                    count_end(reason);
                    if let Some(times) = refused.now() {
                        tracing::warn!(reason, times, "refused connections");
                    }
                }
            }
        }
    }

    /// Serves a connection. Its place and the handle for its end are dropped last, also if a call panics.
    async fn drive(
        self: Arc<Self>,
        socket: PlainSocket,
        origin: Origin,
        place: Place,
        _apart: Option<Apart>,
    ) {
        let _open = self.services.public.is_some().then(Open::new);
        let secured = tokio::select! {
            () = self.end.cancelled() => return,
            secured = tokio::time::timeout(self.timeouts.silent, self.secure(socket, origin)) => secured,
        };
        match secured {
            Ok(Ok((socket, peer))) => self.serve(socket, peer, origin, &place).await,
            _ => count_end("tls"),
        }
    }

    /// Performs the TLS handshake if TLS is configured, and identifies the peer.
    async fn secure(&self, socket: PlainSocket, origin: Origin) -> std::io::Result<(Socket, Peer)> {
        let access = &self.services.access;
        match (socket, origin, access.tls()) {
            (Either::Left(stream), _, Some(tls)) => {
                let stream = tls.acceptor(Protocol::Http2).accept(stream).await?;
                let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                let peer = certificate
                    .map_or(Peer::Unknown, |certificate| access.certificate_peer(peer_name(certificate)));
                Ok((Either::Right(Box::new(stream)), peer))
            }
            (socket, Origin::User(user), _) => Ok((Either::Left(socket), Peer::User(user))),
            (socket, Origin::Address(_), _) => Ok((Either::Left(socket), Peer::Unknown)),
        }
    }

    async fn serve(&self, socket: Socket, peer: Peer, origin: Origin, place: &Place) {
        let activity = Activity::new();
        let client = Arc::new(Client::new(&self.services, peer, &activity, &self.places, place));
        let (key, close) = (client.key, client.close.clone());
        let services = Arc::clone(&self.services);
        let admit = Admit::new(services.routes.clone(), services, Arc::clone(&activity), self.timeouts);
        let service = Authenticate::new(admit, client);
        let io = TokioIo::new(socket);
        let serving = builder(self.max_streams).serve_connection(io, TowerToHyperService::new(service));
        let mut driving = std::pin::pin!(serving);
        let must_authenticate = self.services.must_authenticate(origin);
        // Spread over an eighth of the age, so that connections opened together do not reconnect together.
        let max_age = self.timeouts.max_age + self.timeouts.max_age / 64 * (key.0 % 8) as u32;
        let mut rounds = tokio::time::interval(self.timeouts.round());
        let mut closing = false;
        loop {
            tokio::select! {
                result = &mut driving => {
                    if let Err(error) = result {
                        tracing::debug!(connection = key.0, %error, "a connection ended with an error");
                    }
                    return;
                }
                () = self.end.cancelled() => return,
                () = self.closing.cancelled(), if !closing => close.cancel(),
                () = close.cancelled(), if !closing => {
                    closing = true;
                    driving.as_mut().graceful_shutdown();
                }
                _ = rounds.tick() => match activity.verdict(&self.timeouts, must_authenticate, max_age) {
                    Verdict::Keep => {}
                    Verdict::Close(_) if closing => {}
                    Verdict::Close(reason) => {
                        count_end(reason);
                        close.cancel();
                    }
                    Verdict::End(reason) => {
                        count_end(reason);
                        tracing::debug!(connection = key.0, reason, "ending a connection");
                        return;
                    }
                },
            }
        }
    }

    /// Resolves when the service closes and every connection has ended.
    pub(crate) async fn closed(&self) {
        self.closing.cancelled().await;
        self.tasks.close();
        self.tasks.wait().await;
    }
}

fn builder(max_streams: u32) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .adaptive_window(false)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(MAX_FRAME_BYTES)
        .max_concurrent_streams(max_streams)
        .max_header_list_size(MAX_HEADER_BYTES)
        .max_pending_accept_reset_streams(MAX_RESETS_BEFORE_ACCEPT)
        .max_local_error_reset_streams(MAX_RESETS_BY_ERROR)
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
    builder
}

/// Counts an open connection in the gauge.
struct Open;

impl Open {
    fn new() -> Open {
        gauge!(names::CONNECTIONS).increment(1);
        Open
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        gauge!(names::CONNECTIONS).decrement(1);
    }
}

/// A thread that closes Unix-domain sockets. Where the kernel lets peers pass descriptors (before Linux 6.16), closing a socket closes
/// them too, which can take as long as a peer likes.
struct Closer(mpsc::Sender<OwnedFd>);

impl Closer {
    fn start() -> Closer {
        let (sender, sockets) = mpsc::channel::<OwnedFd>();
        let closing = std::thread::Builder::new().name("closer".to_owned());
        if let Err(error) = closing.spawn(move || sockets.into_iter().for_each(drop)) {
            tracing::warn!(%error, "cannot start the thread that closes sockets; others close them");
        }
        Closer(sender)
    }

    /// Keeps a Unix-domain socket open until the handle is dropped; the thread then closes it.
    fn keep(&self, socket: &PlainSocket) -> Option<Apart> {
        let Either::Right(stream) = socket else { return None };
        let descriptor = stream.as_fd().try_clone_to_owned().ok()?;
        Some(Apart { closer: self.0.clone(), descriptor: Some(descriptor) })
    }
}

/// A further descriptor of a socket, which the closer's thread closes.
struct Apart {
    closer: mpsc::Sender<OwnedFd>,
    descriptor: Option<OwnedFd>,
}

impl Drop for Apart {
    fn drop(&mut self) {
        if let Some(descriptor) = self.descriptor.take() {
            let _ = self.closer.send(descriptor);
        }
    }
}
