//! A real server over TCP and a Unix-domain socket, and helpers to call it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{BufMut as _, Bytes, BytesMut};
use expertd_client::transport::Channel;
use expertd_client::{Client, transport};
use expertd_grpc::{Access, AccessConfig, ConnectionLimits, ConnectionTimeouts, Server, ServerConfig};
use expertd_proto::v1::{DType, ForwardRequest};
use http::Request;
use http_body_util::BodyExt as _;
use rand::RngExt as _;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tower::ServiceExt as _;

use expertd_core::backend::Backend as _;

use crate::backend::Fake;

/// Far longer than anything takes that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const FORWARD: &str = "/expertd.v1.Moe/Forward";
pub const FORWARD_STREAM: &str = "/expertd.v1.Moe/ForwardStream";

pub struct Service {
    pub tcp: String,
    pub unix: String,
    pub admin: String,
    pub shutdown: CancellationToken,
    pub running: JoinHandle<()>,
    pub directory: TempDir,
}

impl Service {
    pub async fn start(backend: &Arc<Fake>) -> Service {
        Service::start_with(backend, ConnectionTimeouts::default()).await
    }

    pub async fn start_with(backend: &Arc<Fake>, timeouts: ConnectionTimeouts) -> Service {
        let tcp = backend.model().limits.max_connections as usize;
        // All clients of a test have one address.
        let connections = ConnectionLimits { per_address: tcp, ..ConnectionLimits::for_tcp(tcp) };
        Service::start_guarded(backend, timeouts, connections, &AccessConfig::default(), None).await
    }

    /// Serves with credentials and limits; Admin on a socket unless `admin` says otherwise.
    pub async fn start_guarded(
        backend: &Arc<Fake>,
        timeouts: ConnectionTimeouts,
        connections: ConnectionLimits,
        access: &AccessConfig,
        admin: Option<&str>,
    ) -> Service {
        let directory = tempfile::tempdir().unwrap();
        let socket = |name: &str| format!("unix:{}", directory.path().join(name).display());
        let config = ServerConfig {
            listen: vec!["127.0.0.1:0".parse().unwrap(), socket("api.sock").parse().unwrap()],
            admin: Some(admin.unwrap_or(&socket("admin.sock")).parse().unwrap()),
            insecure: access.insecure,
            connections,
            shutdown_grace: PATIENCE,
            timeouts,
        };
        let access = Arc::new(Access::load(access).unwrap());
        let server = Server::bind(&config, access, Arc::clone(backend) as _).await.unwrap();
        let addresses = server.addresses();
        let admin = server.admin_address().unwrap().to_string();
        let shutdown = CancellationToken::new();
        let running = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { server.run(shutdown).await.unwrap() }
        });
        Service {
            tcp: addresses[0].to_string(),
            unix: addresses[1].to_string(),
            admin,
            shutdown,
            running,
            directory,
        }
    }

    pub async fn client(&self) -> Client {
        Client::connect(&self.tcp).await.unwrap()
    }

    pub async fn channel(&self) -> Channel {
        transport::connect(&self.tcp).await.unwrap()
    }
}

/// New random rows.
pub fn random_rows(bytes: usize) -> Bytes {
    let mut rows = vec![0u8; bytes];
    expertd_test_seed::rng().fill(&mut rows[..]);
    Bytes::from(rows)
}

/// A valid request for `tokens` random f32 rows.
pub fn request(layer: u32, tokens: usize, hidden: usize) -> ForwardRequest {
    ForwardRequest::inline(layer, tokens as u32, DType::DtypeF32, random_rows(tokens * hidden * 4))
}

pub fn rows_of(request: &ForwardRequest) -> Bytes {
    match &request.payload {
        Some(expertd_proto::v1::forward_request::Payload::Inline(rows)) => rows.clone(),
        _ => Bytes::new(),
    }
}

/// The flag and length that precede a gRPC message.
pub fn prefix(length: usize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(5);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    bytes.freeze()
}

/// A call with the given body.
pub fn raw_call(path: &str, body: tonic::body::Body) -> Request<tonic::body::Body> {
    Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .unwrap()
}

/// Makes a call with raw bytes as its whole body and returns its status.
pub async fn raw_status(channel: Channel, path: &str, bytes: Bytes) -> Status {
    let body = tonic::body::Body::new(http_body_util::Full::new(bytes).map_err(|never| match never {}));
    let response = channel.oneshot(raw_call(path, body)).await.unwrap();
    if let Some(status) = Status::from_header_map(response.headers()) {
        return status;
    }
    let trailers = response.into_body().collect().await.unwrap().trailers().cloned().unwrap();
    Status::from_header_map(&trailers).unwrap()
}

/// Waits until `ready` holds; panics after [`PATIENCE`].
pub async fn eventually(what: &str, mut ready: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !ready() {
        assert!(begun.elapsed() < PATIENCE, "did not happen within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Lets time pass in steps of 20 ms, so that a pause of the whole machine uses up one of them and not all.
pub async fn pass(time: Duration) {
    for _ in 0..time.as_millis() / 20 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
