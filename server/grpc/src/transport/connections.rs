//! Accepts connections, drives them, and ends those that exceed their limits.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use expertd_proto::transport::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_FRAME_BYTES};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use metrics::{counter, gauge};
use tokio::sync::Semaphore;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::calls::{ServedConnection, Services};
use super::listener::{Listener, PlainSocket, Socket};
use super::passed::{PassedDescriptors, Receiving};
use super::places::{ConnectionPlace, ConnectionPlaces, Origin, count_end};
use crate::access::{Peer, Protocol, peer_name};
use crate::bytes::activity::{Activity, ConnectionTimeouts, Verdict};
use crate::bytes::windows::{ReceiveWindow, ReceiveWindows};
use expertd_core::listen::MAX_TURNED_AWAY;
use expertd_ipc::apart::drop_apart;
use expertd_telemetry::{Rarely, names, progress};

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
    places: Arc<ConnectionPlaces>,
    windows: Arc<ReceiveWindows>,
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
        places: Arc<ConnectionPlaces>,
        timeouts: ConnectionTimeouts,
        max_streams: u32,
        closing: CancellationToken,
        end: CancellationToken,
    ) -> Arc<Connections> {
        let windows = ReceiveWindows::new(services.budget.total() / 2);
        let (services, max_streams) = (Arc::new(services), max_streams.max(1));
        let tasks = TaskTracker::new();
        Arc::new(Connections { services, places, windows, timeouts, max_streams, tasks, closing, end })
    }

    /// Accepts connections until the service closes. A connection above a limit is closed.
    pub(crate) async fn accept(self: Arc<Self>, mut listener: Listener) {
        let (mut refused, mut failed) = (Rarely::default(), Rarely::default());
        let refusing = Arc::new(Semaphore::new(MAX_TURNED_AWAY));
        let heartbeat = progress::need("the task that accepts connections");
        let mut ticks = tokio::time::interval(progress::TICK);
        loop {
            heartbeat.tick();
            let may_accept = refusing.available_permits() > 0;
            let (socket, origin) = tokio::select! {
                () = self.closing.cancelled() => return heartbeat.finish(),
                _ = ticks.tick() => continue,
                accepted = listener.accept(), if may_accept => match accepted {
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
            match self.places.take(origin) {
                Ok(place) => {
                    counter!(names::CONNECTIONS_ACCEPTED_TOTAL).increment(1);
                    let seated = Seated::new(&socket, place);
                    self.tasks.spawn(Arc::clone(&self).drive(socket, origin, seated));
                }
                Err(reason) => {
                    if let Either::Right(unix) = socket {
                        drop_apart((unix, Arc::clone(&refusing).try_acquire_owned()));
                    }
                    count_end(reason);
                    if let Some(times) = refused.now() {
                        tracing::warn!(reason, times, "refused connections");
                    }
                }
            }
        }
    }

    /// Serves a connection. Its place is dropped last, also if a call panics.
    async fn drive(self: Arc<Self>, socket: PlainSocket, origin: Origin, seated: Seated) {
        let Some((_, passed, place)) = &seated.0 else { return };
        let _open = self.services.public.is_some().then(OpenConnection::new);
        let secured = tokio::select! {
            () = self.end.cancelled() => return,
            secured = tokio::time::timeout(self.timeouts.silent, self.secure(socket, origin, passed)) => secured,
        };
        match secured {
            Ok(Ok((socket, peer))) => self.serve(socket, peer, origin, place).await,
            _ => count_end("tls"),
        }
    }

    /// Performs the TLS handshake if TLS is configured, and identifies the peer.
    async fn secure(
        &self,
        socket: PlainSocket,
        origin: Origin,
        passed: &PassedDescriptors,
    ) -> std::io::Result<(Socket, Peer)> {
        let access = &self.services.access;
        match (socket, origin, access.tls()) {
            (Either::Left(stream), _, Some(tls)) => {
                let stream = tls.acceptor(Protocol::Http2).accept(stream).await?;
                let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                let peer = certificate
                    .map_or(Peer::Unknown, |certificate| access.certificate_peer(peer_name(certificate)));
                Ok((Either::Right(Box::new(stream)), peer))
            }
            (Either::Left(stream), ..) => Ok((Either::Left(Either::Left(stream)), Peer::Unknown)),
            (Either::Right(stream), origin, _) => {
                let peer = match origin {
                    Origin::User(user) => Peer::User(user),
                    Origin::Address(_) => Peer::Unknown,
                };
                Ok((Either::Left(Either::Right(Receiving::new(stream, passed))), peer))
            }
        }
    }

    async fn serve(&self, socket: Socket, peer: Peer, origin: Origin, place: &ConnectionPlace) {
        let activity = Activity::new();
        let client =
            ServedConnection::new(&self.services, peer, &activity, self.timeouts, &self.places, place);
        let (key, close) = (client.key, client.close.clone());
        let service = service_fn(move |request| client.answer(request));
        let io = TokioIo::new(socket);
        let window = self.windows.take();
        let serving = builder(self.max_streams, &window).serve_connection(io, service);
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

fn builder(max_streams: u32, window: &ReceiveWindow) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .adaptive_window(false)
        .initial_stream_window_size(window.of_stream())
        .initial_connection_window_size(window.of_connection())
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
struct OpenConnection;

impl OpenConnection {
    fn new() -> OpenConnection {
        gauge!(names::CONNECTIONS).increment(1);
        OpenConnection
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        gauge!(names::CONNECTIONS).decrement(1);
    }
}

/// The place of a connection. For a Unix-domain socket a thread closes the socket, with the descriptors that were passed over it,
/// and then releases the place.
struct Seated(Option<(Option<OwnedFd>, PassedDescriptors, ConnectionPlace)>);

impl Seated {
    fn new(socket: &PlainSocket, place: ConnectionPlace) -> Seated {
        let socket = match socket {
            Either::Left(_) => None,
            // Without a further handle the socket is closed by the runtime.
            Either::Right(stream) => stream.as_fd().try_clone_to_owned().ok(),
        };
        Seated(Some((socket, PassedDescriptors::default(), place)))
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        match self.0.take() {
            Some(held @ (Some(_), ..)) => drop_apart(held),
            other => drop(other),
        }
    }
}
