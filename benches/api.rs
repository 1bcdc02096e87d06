//! The latency that the API adds to a bare tonic echo of the same payload: one request outstanding, rounds in turn,
//! medians.
//!
//! `cargo bench -p expertd-benches --bench api [-- unix]`. Each server has a runtime of its own; every call sends fresh
//! rows.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_client::transport;
use expertd_client::transport::Channel;
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::moe_server::{Moe, MoeServer};
use expertd_proto::v1::{
    DType, ForwardRequest, ForwardResponse, ForwardStreamRequest, ForwardStreamResponse, GetModelRequest,
    GetModelResponse, ListModelsRequest, ListModelsResponse,
};
use expertd_router::api::{Access, AccessConfig, ConnectionLimits, ConnectionTimeouts, Server, ServerConfig};
use expertd_router::backend::{ModelInfo, MoeLayerInfo};
use expertd_router::fuzzing;
use expertd_types::{Coverage, Generation, LayerId, LayerRange, WeightFingerprint, WeightVersion};
use rand::RngExt as _;
use tokio_util::sync::CancellationToken;
use tonic::{Request as Call, Response, Status, Streaming};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HIDDEN: usize = 2048;
const MAX_TOKENS: usize = 1024;
const ROUNDS: usize = 20;
const CALLS: usize = 40;

struct Bare;

#[tonic::async_trait]
impl Moe for Bare {
    async fn forward(&self, call: Call<ForwardRequest>) -> Result<Response<ForwardResponse>, Status> {
        let Some(Payload::Inline(rows)) = call.into_inner().payload else {
            return Err(Status::internal("no rows"));
        };
        Ok(Response::new(ForwardResponse { rows, receipt: None }))
    }

    type ForwardStreamStream = tokio_stream::Empty<Result<ForwardStreamResponse, Status>>;

    async fn forward_stream(
        &self,
        _: Call<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Self::ForwardStreamStream>, Status> {
        Err(Status::unimplemented("unary only"))
    }

    async fn list_models(&self, _: Call<ListModelsRequest>) -> Result<Response<ListModelsResponse>, Status> {
        Err(Status::unimplemented("unary only"))
    }

    async fn get_model(&self, _: Call<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        Err(Status::unimplemented("unary only"))
    }
}

/// The model of a backend that echoes.
fn model() -> ModelInfo {
    let layer = MoeLayerInfo {
        num_experts: 64,
        top_k: 8,
        max_k: 8,
        expert_width: 1024,
        shared_width: 0,
        gate: String::new(),
        gate_json: String::new(),
        routes_by_token_id: false,
        vocabulary: 0,
    };
    let limits = expertd_router::backend::Limits {
        max_tokens_per_request: MAX_TOKENS,
        max_tokens_per_step: MAX_TOKENS,
        max_tokens_per_rank: MAX_TOKENS,
        max_message_bytes: expertd_router::backend::Limits::message_bytes(MAX_TOKENS, HIDDEN, 8),
        max_streams_per_connection: 128,
        max_requests_per_stream: 64,
        max_connections: 64,
        max_bytes_in_flight: 256 << 20,
    };
    ModelInfo {
        name: "echo".to_owned(),
        family: "echo".to_owned(),
        weight_version: WeightVersion(1),
        weight_fingerprint: WeightFingerprint { coverage: Coverage::Sampled, digest: [1; 16] },
        generation: Generation(1),
        hidden: HIDDEN,
        num_layers: 1,
        held: LayerRange::whole(1),
        layers: BTreeMap::from([(LayerId(0), layer)]),
        weight_formats: Vec::new(),
        limits,
        placement: Vec::new(),
    }
}

/// Runs `server` until the process ends, on two threads of its own.
fn in_background(server: impl Future<Output = ()> + Send + 'static, runtime: tokio::runtime::Runtime) {
    std::thread::spawn(move || runtime.block_on(server));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn start_bare(unix: Option<&str>) -> String {
    let runtime = runtime();
    let limit = expertd_router::backend::Limits::message_bytes(MAX_TOKENS, HIDDEN, 8);
    let router = tonic::transport::Server::builder()
        .tcp_nodelay(true)
        .initial_stream_window_size(expertd_proto::transport::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(expertd_proto::transport::CONNECTION_WINDOW_BYTES)
        .max_frame_size(expertd_proto::transport::MAX_FRAME_BYTES)
        .add_service(MoeServer::new(Bare).max_decoding_message_size(limit));
    let _guard = runtime.enter();
    if let Some(path) = unix {
        let listener = tokio::net::UnixListener::bind(path).unwrap();
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let serving = router.serve_with_incoming(incoming);
        drop(_guard);
        in_background(async { serving.await.unwrap() }, runtime);
        return format!("unix:{path}");
    }
    let incoming = tonic::transport::server::TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap().to_string();
    let serving = router.serve_with_incoming(incoming.with_nodelay(Some(true)));
    drop(_guard);
    in_background(async { serving.await.unwrap() }, runtime);
    address
}

fn start_service(listen: &str) -> String {
    let runtime = runtime();
    let config = ServerConfig {
        listen: vec![listen.parse().unwrap()],
        admin: None,
        insecure: false,
        connections: ConnectionLimits::for_tcp(64),
        shutdown_grace: Duration::ZERO,
        timeouts: ConnectionTimeouts::default(),
        memory_limit_bytes: 0,
    };
    let access = Arc::new(Access::load(&AccessConfig::default()).unwrap());
    let server = runtime.block_on(Server::bind(&config, access, fuzzing::echo_of(model()))).unwrap();
    let address = server.addresses()[0].to_string();
    in_background(async { server.run(CancellationToken::new()).await.unwrap() }, runtime);
    address
}

async fn client(address: &str) -> MoeClient<Channel> {
    let limit = expertd_router::backend::Limits::message_bytes(MAX_TOKENS, HIDDEN, 8);
    MoeClient::new(transport::connect(address).await.unwrap()).max_decoding_message_size(limit)
}

async fn round(client: &mut MoeClient<Channel>, tokens: usize, times: &mut Vec<Duration>) {
    for call in 0..CALLS {
        let mut rows = vec![0u8; tokens * HIDDEN * 4];
        rand::rng().fill(&mut rows[..]);
        let request = ForwardRequest::inline(0, tokens as u32, DType::DtypeF32, rows.into());
        let sent = Instant::now();
        let answer = client.forward(request).await.unwrap().into_inner();
        let took = sent.elapsed();
        assert_eq!(answer.rows.len(), tokens * HIDDEN * 4);
        if call > 2 {
            times.push(took);
        }
    }
}

fn main() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let unix = std::env::args().any(|argument| argument == "unix");
    let (bare, service) = if unix {
        (start_bare(Some(&path("bare"))), start_service(&format!("unix:{}", path("service"))))
    } else {
        (start_bare(None), start_service("127.0.0.1:0"))
    };
    let local = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    local.block_on(async {
        let (mut bare, mut service) = (client(&bare).await, client(&service).await);
        println!("{} tokens of {HIDDEN} f32, p50 in µs", if unix { "unix," } else { "tcp," });
        println!("{:>8} {:>10} {:>10} {:>10}", "tokens", "bare echo", "service", "added");
        for tokens in [1, 8, 64, 256, 512, 1024] {
            let (mut of_bare, mut of_service) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                round(&mut bare, tokens, &mut of_bare).await;
                round(&mut service, tokens, &mut of_service).await;
            }
            let median = |times: &mut Vec<Duration>| {
                times.sort();
                times[times.len() / 2].as_secs_f64() * 1e6
            };
            let (bare, service) = (median(&mut of_bare), median(&mut of_service));
            println!("{tokens:>8} {bare:>10.0} {service:>10.0} {:>10.0}", service - bare);
        }
    });
}
