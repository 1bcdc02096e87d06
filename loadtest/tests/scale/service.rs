//! A simulated service: the fake with a share of the layers, health, weights that can be replaced, and ways to fail.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use expertd_proto::v1::moe_server::{Moe, MoeServer};
use expertd_proto::v1::*;
use expertd_types::{DType, rows};
use futures_util::{Stream, StreamExt as _};
use tokio::sync::{oneshot, watch};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::fake::Fake;

/// Number of layers of the model.
pub const LAYERS: u32 = 40;
/// Number of shares that the layers are divided into.
pub const SHARES: u32 = 8;
const LAYERS_OF_SHARE: u32 = LAYERS / SHARES;

/// Fingerprints of the old and of the new weights. The output of content `c` is that of the fake times `c + 1`.
pub const CONTENTS: [&str; 2] =
    ["sampled:000000000000000000000000000000aa", "sampled:000000000000000000000000000000bb"];

/// What a service does with calls and probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Serves,
    /// It refuses new calls, answers those that it has, and says so to probes.
    Drains,
    /// It has no room for calls. Probes are answered as if it served.
    Refuses,
    /// It answers nothing and its connections stay open, as those of a stopped process do; it goes on afterwards.
    Hangs,
}

/// What the test sets and reads while a service runs.
#[derive(Debug)]
pub struct Controls {
    pub mode: watch::Sender<Mode>,
    /// Index of its weights in [`CONTENTS`].
    pub content: AtomicUsize,
    /// Number of calls that have reached it.
    pub calls: AtomicU64,
    /// Number of calls that are in it now.
    pub working: AtomicU64,
    /// Number of probes that it has answered.
    pub probes: AtomicU64,
    /// Number of probes that their clients gave up.
    pub missed: AtomicU64,
}

impl Controls {
    async fn until_it_runs(&self) {
        let mut mode = self.mode.subscribe();
        let _ = mode.wait_for(|mode| *mode != Mode::Hangs).await;
    }

    fn mode(&self) -> Mode {
        *self.mode.borrow()
    }

    fn content(&self) -> usize {
        self.content.load(Ordering::SeqCst)
    }
}

/// Counts a call as long as it is there.
struct Working<'a>(&'a AtomicU64);

impl<'a> Working<'a> {
    fn new(count: &'a AtomicU64) -> Working<'a> {
        count.fetch_add(1, Ordering::SeqCst);
        Working(count)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Counts a probe as missed if it is dropped before it is answered.
struct Missed<'a>(Option<&'a AtomicU64>);

impl Drop for Missed<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.0 {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[derive(Clone)]
struct Simulated {
    fake: Fake,
    share: u32,
    controls: Arc<Controls>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Moe for Simulated {
    async fn forward(&self, request: Request<ForwardRequest>) -> Result<Response<ForwardResponse>, Status> {
        let controls = &*self.controls;
        let _working = Working::new(&controls.working);
        controls.calls.fetch_add(1, Ordering::SeqCst);
        controls.until_it_runs().await;
        match controls.mode() {
            Mode::Drains => {
                let details = ErrorDetails::with_error_info("DRAINING", "expertd.v1", HashMap::new());
                return Err(Status::with_error_details(Code::Unavailable, "the service drains", details));
            }
            Mode::Refuses => return Err(Status::resource_exhausted("the queue is full")),
            Mode::Serves | Mode::Hangs => {}
        }
        if request.get_ref().layer / LAYERS_OF_SHARE != self.share {
            return Err(Status::internal("a call of a layer that the service does not hold"));
        }
        let content = controls.content();
        let dtype = DType::from_code(request.get_ref().dtype as u32).unwrap_or(DType::Bf16);
        let mut answer = self.fake.forward(request).await?;
        controls.until_it_runs().await;
        let ForwardResponse { rows: output, receipt } = answer.get_mut();
        let values = rows::decode(output, dtype).into_iter().map(|value| value * (content + 1) as f32);
        *output = rows::encode(&values.collect::<Vec<_>>(), dtype);
        let receipt = receipt.get_or_insert_default();
        CONTENTS[content].clone_into(&mut receipt.weight_fingerprint);
        receipt.weight_version = 1 + content as u64;
        Ok(answer)
    }

    type ForwardStreamStream = Answers<ForwardStreamResponse>;

    async fn forward_stream(
        &self,
        _: Request<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Self::ForwardStreamStream>, Status> {
        Err(Status::unimplemented("several services take unary calls only"))
    }

    async fn list_models(
        &self,
        request: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        self.fake.list_models(request).await
    }

    async fn get_model(
        &self,
        request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        self.controls.until_it_runs().await;
        let mut answer = self.fake.get_model(request).await?;
        let (model, content) = (answer.get_mut(), self.controls.content());
        let like = model.moe_layers[0].clone();
        let held = LAYERS_OF_SHARE * self.share..LAYERS_OF_SHARE * (self.share + 1);
        model.num_layers = LAYERS;
        model.moe_layers = held.map(|layer| MoeLayer { layer, ..like.clone() }).collect();
        CONTENTS[content].clone_into(&mut model.weight_fingerprint);
        model.weight_version = 1 + content as u64;
        Ok(answer)
    }
}

#[tonic::async_trait]
impl Health for Simulated {
    async fn check(&self, _: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let mut missed = Missed(Some(&self.controls.missed));
        self.controls.until_it_runs().await;
        missed.0 = None;
        self.controls.probes.fetch_add(1, Ordering::SeqCst);
        let drains = self.controls.mode() == Mode::Drains;
        let status = if drains { ServingStatus::NotServing } else { ServingStatus::Serving };
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }

    type WatchStream = Answers<HealthCheckResponse>;

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("clients of several services ask again"))
    }
}

/// A service at an address of its own.
pub struct Service {
    pub address: SocketAddr,
    pub controls: Arc<Controls>,
    share: u32,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Service {
    /// Starts the service with this number and the old weights.
    pub fn start(number: u32, share: u32) -> Service {
        // With a loopback address for each service, no other socket gets its port while it is down.
        let [.., high, low] = (number + 1).to_be_bytes();
        let controls = Controls {
            mode: watch::Sender::new(Mode::Serves),
            content: AtomicUsize::new(0),
            calls: AtomicU64::new(0),
            working: AtomicU64::new(0),
            probes: AtomicU64::new(0),
            missed: AtomicU64::new(0),
        };
        let mut service = Service {
            address: SocketAddr::from(([127, 15, high, low], 0)),
            controls: Arc::new(controls),
            share,
            running: None,
        };
        service.restart(0);
        service
    }

    /// Ends it as a kill does, with its connections, if it runs.
    pub fn kill(&mut self) {
        if let Some((end, thread)) = self.running.take() {
            drop(end);
            thread.join().unwrap();
        }
    }

    /// Kills it and starts it at its address with these weights.
    pub fn restart(&mut self, content: usize) {
        self.kill();
        self.controls.content.store(content, Ordering::SeqCst);
        self.set(Mode::Serves);
        let listener = TcpListener::bind(self.address).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.address = listener.local_addr().unwrap();
        let simulated =
            Simulated { fake: Fake::correct(), share: self.share, controls: Arc::clone(&self.controls) };
        let (end, ended) = oneshot::channel::<()>();
        // The thread's runtime has the connections; they end with it.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let incoming = TcpListenerStream::new(listener).inspect(|socket| {
                    // Without this option, Nagle's algorithm and delayed acknowledgements cost 40 ms per call.
                    socket.as_ref().unwrap().set_nodelay(true).unwrap();
                });
                let server = tonic::transport::Server::builder()
                    .add_service(MoeServer::new(simulated.clone()))
                    .add_service(HealthServer::new(simulated));
                tokio::select! {
                    result = server.serve_with_incoming(incoming) => result.unwrap(),
                    _ = ended => {}
                }
            });
        });
        self.running = Some((end, thread));
    }

    pub fn set(&self, mode: Mode) {
        self.controls.mode.send_replace(mode);
    }

    pub fn calls(&self) -> u64 {
        self.controls.calls.load(Ordering::SeqCst)
    }

    pub fn works(&self) -> bool {
        self.controls.working.load(Ordering::SeqCst) > 0
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill();
    }
}
