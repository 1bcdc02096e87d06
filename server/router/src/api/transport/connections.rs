//! Accepting connections, driving them, and ending those that leave things undone.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use expertd_proto::transport::{
    CONNECTION_WINDOW_BYTES, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_FRAME_BYTES, STREAM_WINDOW_BYTES,
};
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use metrics::{counter, gauge};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::address::{Listener, Socket};
use super::front::{Front, Services};
use crate::api::framing::budget::{Budget, Connection, Patience};
use crate::backend::ClientKey;
use crate::telemetry::names;

/// How often connections are looked over.
const ROUND: Duration = Duration::from_millis(250);
/// Pause after the system could not give us a connection (no file descriptors left, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Headers of one call.
const MAX_HEADER_BYTES: u32 = 16 << 10;

/// Why the service turns connections away or ends them.
const ENDS: [&str; 5] = ["limit", "silent", "stalled_write", "stalled_request", "stalled_answer"];

/// The connections of one kind of listener.
pub(in crate::api) struct Connections {
    pub(in crate::api) services: Arc<Services>,
    slots: Arc<Semaphore>,
    max_streams: u32,
    open: Mutex<HashMap<u64, Arc<Connection>>>,
    tasks: TaskTracker,
    /// No new connections; those that are open finish their calls.
    closing: CancellationToken,
    /// Everything ends now.
    end: CancellationToken,
}

impl Connections {
    pub(in crate::api) fn new(
        services: Services,
        max_connections: u32,
        max_streams: u32,
        closing: CancellationToken,
        end: CancellationToken,
    ) -> Arc<Connections> {
        // From 0 on, so that a first increment is seen as one.
        for reason in ENDS {
            counter!(names::CONNECTIONS_ENDED_TOTAL, "reason" => reason).increment(0);
        }
        Arc::new(Connections {
            services: Arc::new(services),
            slots: Arc::new(Semaphore::new(max_connections.max(1) as usize)),
            max_streams: max_streams.max(1),
            open: Mutex::default(),
            tasks: TaskTracker::new(),
            closing,
            end,
        })
    }

    /// Accepts until the service closes. A connection above the limit is turned away at once, so that its client knows.
    pub(in crate::api) async fn accept(self: Arc<Self>, listener: Listener) {
        loop {
            let socket = tokio::select! {
                () = self.closing.cancelled() => return,
                accepted = listener.accept() => match accepted {
                    Ok(socket) => socket,
                    Err(error) => {
                        tracing::warn!(%error, "could not accept a connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() else {
                counter!(names::CONNECTIONS_ENDED_TOTAL, "reason" => "limit").increment(1);
                tracing::warn!("turned a connection away: max_connections are open");
                continue;
            };
            counter!(names::CONNECTIONS_ACCEPTED_TOTAL).increment(1);
            self.tasks.spawn(Arc::clone(&self).drive(socket, slot));
        }
    }

    async fn drive(self: Arc<Self>, socket: Socket, _slot: OwnedSemaphorePermit) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let connection = Connection::new(ClientKey(number), self.end.child_token());
        self.open().insert(number, Arc::clone(&connection));
        let io = TokioIo::new(Watched { socket, connection: Arc::clone(&connection) });
        let front = Front { services: Arc::clone(&self.services), connection: Arc::clone(&connection) };
        let mut driving = std::pin::pin!(builder(self.max_streams).serve_connection(io, front));
        let mut closing = false;
        loop {
            tokio::select! {
                result = &mut driving => {
                    if let Err(error) = result {
                        tracing::debug!(connection = number, %error, "a connection ended with an error");
                    }
                    break;
                }
                () = connection.end.cancelled() => break,
                () = self.closing.cancelled(), if !closing => {
                    closing = true;
                    driving.as_mut().graceful_shutdown();
                }
            }
        }
        self.open().remove(&number);
    }

    /// Looks the connections over until the service ends; sets the gauges of `budget`, if there is one.
    pub(in crate::api) async fn watch(self: Arc<Self>, patience: Patience, budget: Option<Arc<Budget>>) {
        let mut rounds = tokio::time::interval(ROUND);
        rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.end.cancelled() => return,
                _ = rounds.tick() => {}
            }
            let short = budget.as_ref().is_some_and(|budget| budget.is_short());
            let open: Vec<_> = self.open().values().cloned().collect();
            if let Some(budget) = &budget {
                gauge!(names::CONNECTIONS).set(open.len() as f64);
                gauge!(names::BYTES_IN_FLIGHT).set(budget.held() as f64);
                gauge!(names::BYTES_IN_FLIGHT_LIMIT).set(budget.total() as f64);
            }
            for connection in open {
                if let Some(reason) = connection.overdue(&patience, short) {
                    counter!(names::CONNECTIONS_ENDED_TOTAL, "reason" => reason).increment(1);
                    tracing::info!(connection = connection.key.0, reason, "ending a connection");
                    connection.end.cancel();
                }
            }
        }
    }

    /// Resolves once no connection is open; call after closing.
    pub(in crate::api) async fn closed(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn open(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
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
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
    builder
}

/// A socket that notes its traffic.
struct Watched {
    socket: Socket,
    connection: Arc<Connection>,
}

impl Watched {
    fn note(&self, result: &Poll<io::Result<usize>>) {
        self.connection.note_write(result.is_pending());
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.socket).poll_read(cx, buf);
        self.connection.note_read(buf.filled().len() - before);
        result
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.note(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.note(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
