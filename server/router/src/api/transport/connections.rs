//! Accepts connections, drives them, and ends those that exceed their limits.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use expertd_proto::transport::{
    CONNECTION_WINDOW_BYTES, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_FRAME_BYTES, STREAM_WINDOW_BYTES,
};
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use metrics::{counter, gauge};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::address::{Listener, PlainSocket, Socket};
use super::front::{Front, Services};
use super::table::{ConnectionTable, Origin};
use super::tarpit::Tarpit;
use super::watched::Watched;
use crate::api::access::{Peer, Protocol, peer_name};
use crate::api::framing::connection::{Connection, ConnectionTimeouts, Verdict};
use crate::progress;
use crate::telemetry::{Rarely, names};

/// Interval at which all connections are checked.
const ROUND: Duration = Duration::from_millis(250);
/// Pause after a failed `accept`, for example if no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Largest size of the headers of one call.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// If the transport holds too many unread bytes, one of this many connections with unread messages is ended per round.
const UNREAD_PART: usize = 8;

/// Reasons why the service refuses or ends connections.
const ENDS: [&str; 15] = [
    "limit",
    "address_limit",
    "unauthenticated_limit",
    "client_limit",
    "evicted",
    "tls",
    "silent",
    "unauthenticated",
    "stalled_write",
    "stalled_request",
    "stalled_answer",
    "unread",
    "flood",
    "idle",
    "age",
];

/// Counts a connection that the service refused or ended.
pub(super) fn count_end(reason: &'static str) {
    counter!(names::CONNECTIONS_ENDED_TOTAL, "reason" => reason).increment(1);
}

/// The connections of one kind of listener.
pub(in crate::api) struct Connections {
    services: Arc<Services>,
    table: Arc<ConnectionTable>,
    tarpit: Arc<Tarpit>,
    timeouts: ConnectionTimeouts,
    max_streams: u32,
    tasks: TaskTracker,
    /// Cancelled when the service accepts no new connections; open ones finish their calls.
    closing: CancellationToken,
    /// Cancelled when all connections end at once.
    end: CancellationToken,
}

impl Connections {
    pub(in crate::api) fn new(
        services: Services,
        table: Arc<ConnectionTable>,
        timeouts: ConnectionTimeouts,
        max_streams: u32,
        closing: CancellationToken,
        end: CancellationToken,
    ) -> Arc<Connections> {
        // Counters start at 0, so that a rate includes the first increment.
        for reason in ENDS {
            counter!(names::CONNECTIONS_ENDED_TOTAL, "reason" => reason).increment(0);
        }
        let tarpit = Arc::new(Tarpit::new(table.tarpit()));
        Arc::new(Connections {
            services: Arc::new(services),
            table,
            tarpit,
            timeouts,
            max_streams: max_streams.max(1),
            tasks: TaskTracker::new(),
            closing,
            end,
        })
    }

    /// Accepts connections until the service closes. A connection above a limit is closed.
    pub(in crate::api) async fn accept(self: Arc<Self>, mut listener: Listener) {
        let (mut refused, mut failed) = (Rarely::default(), Rarely::default());
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
            match self.table.open(origin, &self.end) {
                Ok(connection) => {
                    counter!(names::CONNECTIONS_ACCEPTED_TOTAL).increment(1);
                    self.tasks.spawn(Arc::clone(&self).drive(socket, origin, connection));
                }
                Err(reason) => {
                    count_end(reason);
                    self.tarpit.refuse(socket, origin);
                    if let Some(times) = refused.now() {
                        tracing::warn!(reason, times, "refused connections");
                    }
                }
            }
        }
    }

    async fn drive(self: Arc<Self>, socket: PlainSocket, origin: Origin, connection: Arc<Connection>) {
        let secured = tokio::select! {
            () = connection.end.cancelled() => None,
            secured = tokio::time::timeout(self.timeouts.silent, self.secure(socket, origin)) => {
                secured.ok().and_then(Result::ok)
            }
        };
        match secured {
            Some((socket, peer)) => self.serve(socket, peer, &connection).await,
            None => count_end("tls"),
        }
        connection.forget_unread(&self.services.budget);
        self.table.close(&connection);
    }

    /// Performs the TLS handshake if TLS is configured, and identifies the peer.
    async fn secure(&self, socket: PlainSocket, origin: Origin) -> io::Result<(Socket, Peer)> {
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

    async fn serve(&self, socket: Socket, peer: Peer, connection: &Arc<Connection>) {
        let (budget, tarpit) = (Arc::clone(&self.services.budget), Arc::clone(&self.tarpit));
        let io = TokioIo::new(Watched::new(socket, Arc::clone(connection), budget, tarpit));
        let front =
            Front::new(Arc::clone(&self.services), Arc::clone(connection), Arc::clone(&self.table), peer);
        let mut driving = std::pin::pin!(builder(self.max_streams).serve_connection(io, front));
        let mut closing = false;
        loop {
            let close = async {
                tokio::select! {
                    () = self.closing.cancelled() => {}
                    () = connection.close.cancelled() => {}
                }
            };
            tokio::select! {
                result = &mut driving => {
                    if let Err(error) = result {
                        tracing::debug!(connection = connection.key.0, %error, "a connection ended with an error");
                    }
                    return;
                }
                () = connection.end.cancelled() => return,
                () = close, if !closing => {
                    closing = true;
                    connection.close.cancel();
                    driving.as_mut().graceful_shutdown();
                }
            }
        }
    }

    /// Checks all connections in rounds until the service ends. Sets the gauges if these are the public connections.
    pub(in crate::api) async fn watch(self: Arc<Self>, public: bool) {
        let budget = Arc::clone(&self.services.budget);
        let heartbeat = progress::need("the task that checks connections");
        let mut rounds = tokio::time::interval(ROUND);
        rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.end.cancelled() => return heartbeat.finish(),
                _ = rounds.tick() => heartbeat.tick(),
            }
            self.tarpit.release();
            let open = self.table.all();
            if public {
                gauge!(names::CONNECTIONS).set(open.len() as f64);
                gauge!(names::BYTES_IN_FLIGHT).set(budget.held() as f64);
                gauge!(names::BYTES_IN_FLIGHT_LIMIT).set(budget.total() as f64);
            }
            let short = budget.is_short();
            for (origin, connection) in &open {
                let must_authenticate = self.table.must_authenticate(*origin);
                match connection.verdict(&self.timeouts, short, must_authenticate) {
                    Verdict::Keep => {}
                    Verdict::Close(reason) if !connection.close.is_cancelled() => {
                        count_end(reason);
                        connection.close.cancel();
                    }
                    Verdict::Close(_) => {}
                    Verdict::End(reason) => end(connection, reason),
                }
            }
            if budget.too_much_unread() {
                end_unread(&open);
            }
        }
    }

    /// Resolves when the service closes and every connection has ended.
    pub(in crate::api) async fn closed(&self) {
        self.closing.cancelled().await;
        self.tasks.close();
        self.tasks.wait().await;
    }
}

pub(super) fn end(connection: &Connection, reason: &'static str) {
    if !connection.end.is_cancelled() {
        count_end(reason);
        tracing::debug!(connection = connection.key.0, reason, "ending a connection");
        connection.end.cancel();
    }
}

/// Ends the connections with the most unread bytes in the transport.
fn end_unread(open: &[(Origin, Arc<Connection>)]) {
    let mut unread: Vec<_> =
        open.iter().map(|(_, connection)| connection).filter(|connection| connection.unread() > 0).collect();
    unread.sort_unstable_by_key(|connection| std::cmp::Reverse(connection.unread()));
    unread.iter().take(unread.len().div_ceil(UNREAD_PART)).for_each(|connection| end(connection, "unread"));
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
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
    builder
}
