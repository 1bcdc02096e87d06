//! The scrape endpoint: `/metrics`, and `/healthz` and `/readyz` for probes that speak HTTP.
//!
//! Probes need no credentials and may speak plaintext. A scrape from beyond loopback needs a token, over TLS where that
//! is configured. Every connection is served at once; above a limit, a new connection ends the oldest one.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::Rarely;
use super::recorder::Recorder;
use crate::api::{Access, Protocol, ServerTls};
use crate::watchdog;

/// Largest number of connections. Above it, a new connection ends the oldest one.
const MAX_CONNECTIONS: usize = 64;
/// Time that a client has to send its request, TLS handshake included.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest life of a connection; a scrape is one short exchange.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// The first byte of a TLS handshake, which no HTTP request starts with.
const TLS_HANDSHAKE: u8 = 22;

/// Returns whether requests are admitted, and the reason if they are not.
pub type Probe = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// A bound metrics endpoint.
pub struct MetricsEndpoint {
    listener: TcpListener,
    shared: Arc<Shared>,
}

struct Shared {
    recorder: Recorder,
    ready: Probe,
    access: Arc<Access>,
}

/// Transport and origin of a request.
#[derive(Clone, Copy)]
struct Way {
    loopback: bool,
    encrypted: bool,
}

impl MetricsEndpoint {
    /// Binds the endpoint to `address`.
    ///
    /// # Errors
    /// The error of `bind`.
    pub async fn bind(
        address: SocketAddr,
        recorder: Recorder,
        ready: Probe,
        access: Arc<Access>,
    ) -> std::io::Result<MetricsEndpoint> {
        let shared = Arc::new(Shared { recorder, ready, access });
        Ok(MetricsEndpoint { listener: TcpListener::bind(address).await?, shared })
    }

    /// The address that the endpoint is bound to.
    ///
    /// # Errors
    /// The error of `getsockname`.
    pub fn local_address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until the future is dropped.
    pub async fn run(self) {
        let mut open: VecDeque<CancellationToken> = VecDeque::new();
        let mut failed = Rarely::default();
        loop {
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    if let Some(times) = failed.now() {
                        tracing::warn!(%error, times, "the metrics endpoint could not accept a connection");
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            open.retain(|end| !end.is_cancelled());
            if open.len() >= MAX_CONNECTIONS
                && let Some(oldest) = open.pop_front()
            {
                oldest.cancel();
            }
            let end = CancellationToken::new();
            open.push_back(end.clone());
            let shared = Arc::clone(&self.shared);
            tokio::spawn(async move {
                let over = end.clone().drop_guard();
                let serving = serve(stream, peer.ip().to_canonical().is_loopback(), shared);
                tokio::select! {
                    () = end.cancelled() => {}
                    _ = tokio::time::timeout(CONNECTION_TIMEOUT, serving) => {}
                }
                drop(over);
            });
        }
    }
}

/// Serves one connection, which may start with a TLS handshake if TLS is configured.
async fn serve(stream: TcpStream, loopback: bool, shared: Arc<Shared>) {
    let mut first = [0];
    let Some(tls) = shared.access.tls() else {
        return exchange(stream, Way { loopback, encrypted: false }, shared).await;
    };
    match tokio::time::timeout(HEADER_TIMEOUT, stream.peek(&mut first)).await {
        Ok(Ok(1)) if first == [TLS_HANDSHAKE] => serve_tls(stream, loopback, &tls, shared).await,
        Ok(Ok(1)) => exchange(stream, Way { loopback, encrypted: false }, shared).await,
        _ => {}
    }
}

async fn serve_tls(stream: TcpStream, loopback: bool, tls: &ServerTls, shared: Arc<Shared>) {
    let handshake = tls.acceptor(Protocol::Http1).accept(stream);
    if let Ok(Ok(stream)) = tokio::time::timeout(HEADER_TIMEOUT, handshake).await {
        exchange(stream, Way { loopback, encrypted: true }, shared).await;
    }
}

async fn exchange(stream: impl AsyncRead + AsyncWrite + Unpin, way: Way, shared: Arc<Shared>) {
    let service = service_fn(move |request| {
        let response = answer(&request, way, &shared);
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a scrape ended early");
    }
}

fn answer(request: &Request<Incoming>, way: Way, shared: &Shared) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are allowed\n".to_owned());
    }
    let unwell = watchdog::lost();
    match request.uri().path() {
        "/metrics" => match refusal(request.headers(), way, &shared.access) {
            None => text(StatusCode::OK, shared.recorder.render()),
            Some((status, why)) => text(status, format!("{why}\n")),
        },
        "/healthz" | "/readyz" if unwell.is_some() => {
            text(StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", unwell.unwrap_or_default()))
        }
        "/healthz" => text(StatusCode::OK, "alive\n".to_owned()),
        "/readyz" => match (shared.ready)() {
            Ok(()) => text(StatusCode::OK, "ready\n".to_owned()),
            Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        },
        _ => text(
            StatusCode::NOT_FOUND,
            "not found; the paths are /metrics, /healthz and /readyz\n".to_owned(),
        ),
    }
}

/// The error for a scrape that is refused. If neither tokens nor TLS are configured, `--insecure` has allowed the scrape.
fn refusal(headers: &HeaderMap, way: Way, access: &Access) -> Option<(StatusCode, &'static str)> {
    if way.loopback {
        return None;
    }
    if access.has_tls() && !way.encrypted {
        return Some((StatusCode::FORBIDDEN, "scrapes from other hosts need https"));
    }
    if access.has_tokens() && !access.may_scrape(headers) {
        return Some((
            StatusCode::UNAUTHORIZED,
            "scrapes from other hosts need `authorization: Bearer TOKEN`",
        ));
    }
    None
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
    );
    response
}
