//! The HTTP endpoint for scrapers (`/metrics`) and probes (`/healthz`, `/readyz`).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::recorder::Recorder;

/// Largest number of open connections; further ones wait.
const MAX_CONNECTIONS: usize = 16;
/// Time limit for a client to send its request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest duration of a connection, which serves one short scrape.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns whether requests are admitted, and the reason if they are not.
pub type Probe = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// A bound metrics endpoint.
pub struct MetricsEndpoint {
    listener: TcpListener,
    recorder: Recorder,
    ready: Probe,
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
    ) -> std::io::Result<MetricsEndpoint> {
        Ok(MetricsEndpoint { listener: TcpListener::bind(address).await?, recorder, ready })
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
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "the metrics endpoint could not accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let recorder = self.recorder.clone();
            let ready = Arc::clone(&self.ready);
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let response = answer(&request, &recorder, &ready);
                    async move { Ok::<_, Infallible>(response) }
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_TIMEOUT)
                    .serve_connection(TokioIo::new(stream), service);
                if let Ok(Err(error)) = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
                    tracing::debug!(%error, "a connection to the metrics endpoint failed");
                }
                drop(slot);
            });
        }
    }
}

fn answer(request: &Request<Incoming>, recorder: &Recorder, ready: &Probe) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are allowed\n".to_owned());
    }
    match request.uri().path() {
        "/metrics" => text(StatusCode::OK, recorder.render()),
        "/healthz" => text(StatusCode::OK, "alive\n".to_owned()),
        "/readyz" => match ready() {
            Ok(()) => text(StatusCode::OK, "ready\n".to_owned()),
            Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        },
        _ => text(
            StatusCode::NOT_FOUND,
            "not found; the paths are /metrics, /healthz and /readyz\n".to_owned(),
        ),
    }
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
