//! The scrape endpoint: `/metrics`, `/healthz` and `/readyz` for probes that speak HTTP, and a status page at `/` that
//! reads `/status.json`, `/experts.json` and `/metrics`.
//!
//! Probes need no credentials and may speak plaintext. Metrics and state from beyond loopback need a token, over TLS where
//! that is configured; the page itself holds neither and needs TLS only. Requests from loopback need a `Host` header that names this
//! host, probes excepted.
//!
//! Every connection is served at once; above a limit, a new connection ends the oldest one of the address that has the most.
//! Requests beyond the first few on a connection are answered at a pace, so that neither costs the service much processor time.

mod host;
mod page;
mod ranks;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
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

use expertd_core::backend::Backend;
use expertd_telemetry::{Rarely, Recorder, progress};

use self::ranks::RankGauges;
use crate::access::{Access, Protocol, ServerTls};
use crate::service::health::readiness;
use crate::transport::places::Origin;

/// Largest number of connections. Above it, a new connection ends another one.
const MAX_CONNECTIONS: usize = 64;
/// Requests of a connection that are answered without a pause.
const REQUESTS_AT_ONCE: u32 = 32;
/// Pause before each further request.
const REQUEST_PAUSE: Duration = Duration::from_millis(50);
/// Time that a client has to send its request, TLS handshake included.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest life of a connection; a scrape is one short exchange.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// The first byte of a TLS handshake, which no HTTP request starts with.
const TLS_HANDSHAKE: u8 = 22;

/// A bound metrics endpoint.
pub struct MetricsPort {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    recorder: Recorder,
    ranks: RankGauges,
    backend: Arc<dyn Backend>,
    health_timeout: Duration,
    access: Arc<Access>,
}

/// Transport and origin of a request.
#[derive(Clone, Copy)]
struct Way {
    loopback: bool,
    encrypted: bool,
}

impl MetricsPort {
    /// Binds the endpoint to `address`. `/healthz` answers 503 if a thread that the process needs has made no progress for longer than
    /// `health_timeout`.
    ///
    /// # Errors
    /// The error of `bind` or `getsockname`.
    pub async fn bind(
        address: SocketAddr,
        recorder: Recorder,
        backend: Arc<dyn Backend>,
        access: Arc<Access>,
        health_timeout: Duration,
    ) -> std::io::Result<MetricsPort> {
        let shared =
            Arc::new(Shared { recorder, ranks: RankGauges::default(), backend, health_timeout, access });
        let listener = TcpListener::bind(address).await?;
        Ok(MetricsPort { address: listener.local_addr()?, listener, shared })
    }

    /// The address that the endpoint is bound to.
    #[must_use]
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until the future is dropped.
    pub async fn run(self) {
        let mut open = OpenConnections::default();
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
            let end = open.add(Origin::address(peer.ip()));
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

/// The open connections, the oldest first.
#[derive(Default)]
struct OpenConnections(VecDeque<(Origin, CancellationToken)>);

impl OpenConnections {
    /// Adds a connection, if there are too many after ending the oldest one of the address that has the most. The returned
    /// token ends the new one, and is cancelled at its end.
    fn add(&mut self, origin: Origin) -> CancellationToken {
        self.0.retain(|(_, end)| !end.is_cancelled());
        if self.0.len() >= MAX_CONNECTIONS {
            let count = |of: Origin| self.0.iter().filter(|(origin, _)| *origin == of).count();
            // The address with the most connections; of several, the one with the oldest connection.
            let largest = (0..self.0.len()).rev().max_by_key(|&at| count(self.0[at].0));
            let at = largest.and_then(|at| self.0.iter().position(|(origin, _)| *origin == self.0[at].0));
            if let Some((_, oldest)) = at.and_then(|at| self.0.remove(at)) {
                oldest.cancel();
            }
        }
        let end = CancellationToken::new();
        self.0.push_back((origin, end.clone()));
        end
    }
}

/// Serves one connection, which may start with a TLS handshake if TLS is configured.
async fn serve(stream: TcpStream, loopback: bool, shared: Arc<Shared>) {
    let mut first = [0];
    let Some(tls) = shared.access.tls() else {
        return serve_http(stream, Way { loopback, encrypted: false }, shared).await;
    };
    match tokio::time::timeout(HEADER_TIMEOUT, stream.peek(&mut first)).await {
        Ok(Ok(1)) if first == [TLS_HANDSHAKE] => serve_tls(stream, loopback, &tls, shared).await,
        Ok(Ok(1)) => serve_http(stream, Way { loopback, encrypted: false }, shared).await,
        _ => {}
    }
}

async fn serve_tls(stream: TcpStream, loopback: bool, tls: &ServerTls, shared: Arc<Shared>) {
    let handshake = tls.acceptor(Protocol::Http1).accept(stream);
    if let Ok(Ok(stream)) = tokio::time::timeout(HEADER_TIMEOUT, handshake).await {
        serve_http(stream, Way { loopback, encrypted: true }, shared).await;
    }
}

async fn serve_http(stream: impl AsyncRead + AsyncWrite + Unpin, way: Way, shared: Arc<Shared>) {
    let requests = AtomicU32::new(0);
    let service = service_fn(move |request| {
        let shared = Arc::clone(&shared);
        let pause = requests.fetch_add(1, Ordering::Relaxed) >= REQUESTS_AT_ONCE;
        async move {
            if pause {
                tokio::time::sleep(REQUEST_PAUSE).await;
            }
            Ok::<_, Infallible>(answer(&request, way, &shared))
        }
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
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are allowed\n");
    }
    let (headers, access) = (request.headers(), &*shared.access);
    let path = request.uri().path();
    let is_probe = matches!(path, "/healthz" | "/readyz");
    if way.loopback && !is_probe && !host::is_named(headers, access) && !access.may_scrape(headers) {
        return text(StatusCode::FORBIDDEN, host::REFUSAL);
    }
    match path {
        "/" => match plaintext(way, access) {
            None => shown("text/html; charset=utf-8", page::PAGE),
            Some(refused) => refused,
        },
        "/metrics" => match refusal(headers, way, access) {
            None => {
                shared.ranks.record(&shared.backend.status().ranks);
                shared.access.record_expiry();
                text(StatusCode::OK, shared.recorder.render())
            }
            Some(refused) => refused,
        },
        "/status.json" | "/experts.json" => match refusal(headers, way, access) {
            None => {
                let backend = &*shared.backend;
                let document =
                    if path == "/status.json" { page::document(backend) } else { page::experts(backend) };
                shown("application/json", document.to_string())
            }
            Some(refused) => refused,
        },
        "/healthz" => health(shared.health_timeout),
        "/readyz" => match readiness(&*shared.backend) {
            Ok(()) => text(StatusCode::OK, "ready\n"),
            Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        },
        _ => text(
            StatusCode::NOT_FOUND,
            "not found; the paths are /, /status.json, /experts.json, /metrics, /healthz and /readyz\n",
        ),
    }
}

/// The age of each thread's last progress.
fn health(timeout: Duration) -> Response<Full<Bytes>> {
    let (mut status, mut body) = (StatusCode::OK, "alive\n".to_owned());
    for (name, age) in progress::ages() {
        let late = if age > timeout { ", which is too long" } else { "" };
        if age > timeout {
            status = StatusCode::SERVICE_UNAVAILABLE;
        }
        let _ = writeln!(body, "{name}: {:.1} s since its last progress{late}", age.as_secs_f64());
    }
    if status != StatusCode::OK {
        body = body.replacen("alive", "unhealthy", 1);
    }
    text(status, body)
}

/// The answer to a scrape that is refused. If neither tokens nor TLS are configured, `--insecure` has allowed the scrape.
fn refusal(headers: &HeaderMap, way: Way, access: &Access) -> Option<Response<Full<Bytes>>> {
    let without_token = || {
        let refused = !way.loopback && access.has_tokens() && !access.may_scrape(headers);
        let why = "scrapes from other hosts need `authorization: Bearer TOKEN`\n";
        refused.then(|| text(StatusCode::UNAUTHORIZED, why))
    };
    plaintext(way, access).or_else(without_token)
}

/// The answer to a request of another host in plaintext where TLS is configured.
fn plaintext(way: Way, access: &Access) -> Option<Response<Full<Bytes>>> {
    let refused = !way.loopback && access.has_tls() && !way.encrypted;
    refused.then(|| text(StatusCode::FORBIDDEN, "scrapes from other hosts need https\n"))
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    response(status, "text/plain; version=0.0.4; charset=utf-8", body.into())
}

/// The status page, or the state of the service.
fn shown(kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = response(StatusCode::OK, kind, body.into());
    response.headers_mut().extend(page::headers());
    response
}

fn response(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::access::AccessConfig;

    const TOKEN: &str = "scraper-token-0123456789";

    fn status_of(way: Way, token: Option<&str>, access: &Access) -> StatusCode {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            headers.insert(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
        }
        refusal(&headers, way, access).map_or(StatusCode::OK, |refused| refused.status())
    }

    #[test]
    fn the_address_with_the_most_connections_makes_way() {
        let from = |last: u8| Origin::address(std::net::Ipv4Addr::new(10, 0, 0, last).into());
        let mut open = OpenConnections::default();
        let probe = open.add(from(1));
        let first = open.add(from(2));
        let flood: Vec<_> = (0..10 * MAX_CONNECTIONS).map(|_| open.add(from(2))).collect();
        assert!(first.is_cancelled() && !probe.is_cancelled());
        assert_eq!(flood.iter().filter(|end| !end.is_cancelled()).count(), MAX_CONNECTIONS - 1);
        assert!(!flood[flood.len() - 1].is_cancelled(), "the oldest goes first");
        probe.cancel();
        open.add(from(1));
        assert_eq!(
            flood.iter().filter(|end| !end.is_cancelled()).count(),
            MAX_CONNECTIONS - 1,
            "there is room"
        );
        // Two addresses have as many connections: the oldest connection is ended.
        let mut open = OpenConnections::default();
        let all: Vec<_> = (0..MAX_CONNECTIONS).map(|at| open.add(from(at as u8 % 2))).collect();
        open.add(from(3));
        assert_eq!(all.iter().position(CancellationToken::is_cancelled), Some(0));
    }

    #[test]
    fn metrics_and_state_need_a_token_beyond_loopback() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokens");
        std::fs::write(&file, format!("prometheus {TOKEN}\n")).unwrap();
        let config = AccessConfig { token_file: Some(file), ..AccessConfig::default() };
        let access = Access::load(&config).unwrap();
        let (near, far) =
            (Way { loopback: true, encrypted: false }, Way { loopback: false, encrypted: false });
        assert_eq!(status_of(near, None, &access), StatusCode::OK);
        assert_eq!(status_of(far, None, &access), StatusCode::UNAUTHORIZED);
        assert_eq!(status_of(far, Some("scraper-token-other-0123"), &access), StatusCode::UNAUTHORIZED);
        assert_eq!(status_of(far, Some(TOKEN), &access), StatusCode::OK);
    }
}
