//! The scrape endpoint: `/metrics`, and `/healthz` and `/readyz` for probes that speak HTTP.

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

/// Scrapers at once; more wait.
const MAX_CONNECTIONS: usize = 16;
/// How long a client may take to send its request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may last: a scrape is one short exchange.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);

/// Says whether requests are admitted: `Err` with the reason when not.
pub type Probe = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// A bound scrape endpoint.
pub struct MetricsEndpoint {
    listener: TcpListener,
    recorder: Recorder,
    ready: Probe,
}

impl MetricsEndpoint {
    /// Binds it.
    ///
    /// # Errors
    /// What `bind` says.
    pub async fn bind(
        address: SocketAddr,
        recorder: Recorder,
        ready: Probe,
    ) -> std::io::Result<MetricsEndpoint> {
        Ok(MetricsEndpoint { listener: TcpListener::bind(address).await?, recorder, ready })
    }

    /// The address it is bound to.
    ///
    /// # Errors
    /// What `getsockname` says.
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
                    tracing::debug!(%error, "a scrape ended early");
                }
                drop(slot);
            });
        }
    }
}

fn answer(request: &Request<Incoming>, recorder: &Recorder, ready: &Probe) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "use GET\n".to_owned());
    }
    match request.uri().path() {
        "/metrics" => text(StatusCode::OK, recorder.render()),
        "/healthz" => text(StatusCode::OK, "alive\n".to_owned()),
        "/readyz" => match ready() {
            Ok(()) => text(StatusCode::OK, "ready\n".to_owned()),
            Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        },
        _ => text(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n".to_owned()),
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
