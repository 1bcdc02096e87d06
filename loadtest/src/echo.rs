//! A bare gRPC echo of the same payload over the same transport with the same settings: its latency is what remains if
//! the service computes nothing.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::forward_stream_response::Result as Answered;
use expertd_proto::v1::moe_server::{Moe, MoeServer};
use expertd_proto::v1::{
    ForwardRequest, ForwardResponse, ForwardStreamRequest, ForwardStreamResponse, GetModelRequest,
    GetModelResponse, ListModelsRequest, ListModelsResponse, Receipt,
};
use futures_util::{Stream, StreamExt as _};
use serde::Serialize;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::Error;
use crate::connect::Client;
use crate::load;
use crate::memory_traffic::MemoryTraffic;
use crate::request::Workload;
use crate::stats::{Durations, Summary};

const ROUNDS: usize = 6;
const ROUND: Duration = Duration::from_millis(300);
const ROUND_CALLS: usize = 300;
/// Calls at the start of a round that are not counted.
const COLD_CALLS: usize = 3;

struct Echo {
    traffic: Option<Arc<MemoryTraffic>>,
}

fn echo(request: ForwardRequest) -> ForwardResponse {
    let rows = match request.payload {
        Some(Payload::Inline(rows)) => rows,
        _ => bytes::Bytes::new(),
    };
    let receipt = Receipt { tokens_per_rank: vec![request.tokens], ..Receipt::default() };
    ForwardResponse { rows, receipt: Some(receipt) }
}

#[tonic::async_trait]
impl Moe for Echo {
    async fn forward(&self, request: Request<ForwardRequest>) -> Result<Response<ForwardResponse>, Status> {
        if let Some(traffic) = &self.traffic {
            traffic.stream().await;
        }
        Ok(Response::new(echo(request.into_inner())))
    }

    type ForwardStreamStream = Pin<Box<dyn Stream<Item = Result<ForwardStreamResponse, Status>> + Send>>;

    async fn forward_stream(
        &self,
        requests: Request<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Self::ForwardStreamStream>, Status> {
        let answers = requests.into_inner().map(|message| {
            let ForwardStreamRequest { id, request, .. } = message?;
            let response = echo(request.unwrap_or_default());
            Ok(ForwardStreamResponse { id, result: Some(Answered::Response(response)) })
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn list_models(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        Err(Status::unimplemented("the echo has no models"))
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        Err(Status::unimplemented("the echo has no models"))
    }
}

/// A running echo on a runtime of its own. Dropping it stops it.
#[derive(Debug)]
pub struct EchoServer {
    /// The address that it listens on, as `connect` accepts it.
    pub address: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _folder: Option<tempfile::TempDir>,
}

impl EchoServer {
    /// Starts an echo on a Unix-domain socket or a loopback TCP port. With `traffic`, unary calls are delayed by its
    /// memory traffic.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn start(
        over_unix_socket: bool,
        message_bytes: usize,
        traffic: Option<Arc<MemoryTraffic>>,
    ) -> Result<EchoServer, Error> {
        let failed = |error: std::io::Error| Error::Echo(error.to_string());
        let folder = over_unix_socket.then(tempfile::tempdir).transpose().map_err(failed)?;
        let path = folder.as_ref().map(|folder| folder.path().join("echo.sock"));
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let router = Server::builder()
            .tcp_nodelay(true)
            .initial_stream_window_size(expertd_proto::transport::STREAM_WINDOW_BYTES)
            .initial_connection_window_size(expertd_proto::transport::CONNECTION_WINDOW_BYTES)
            .max_frame_size(expertd_proto::transport::MAX_FRAME_BYTES)
            .add_service(
                MoeServer::new(Echo { traffic })
                    .max_decoding_message_size(message_bytes)
                    .max_encoding_message_size(message_bytes),
            );
        let until = async {
            let _ = stopped.await;
        };
        let _guard = runtime.enter();
        let (address, serve): (_, Pin<Box<dyn Future<Output = _> + Send>>) = match path {
            Some(path) => {
                let listener = UnixListener::bind(&path).map_err(failed)?;
                let incoming = UnixListenerStream::new(listener);
                let address = format!("unix:{}", path.display());
                (address, Box::pin(router.serve_with_incoming_shutdown(incoming, until)))
            }
            None => {
                let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                let address = listener.local_addr().map_err(failed)?.to_string();
                let incoming = TcpListenerStream::new(TcpListener::from_std(listener).map_err(failed)?);
                (address, Box::pin(router.serve_with_incoming_shutdown(incoming.map(no_delay), until)))
            }
        };
        drop(_guard);
        let thread = std::thread::spawn(move || {
            // An echo that fails shows as failed calls.
            let _ = runtime.block_on(serve);
            runtime.shutdown_background();
        });
        Ok(EchoServer { address, stop: Some(stop), thread: Some(thread), _folder: folder })
    }
}

fn no_delay(socket: std::io::Result<tokio::net::TcpStream>) -> std::io::Result<tokio::net::TcpStream> {
    socket.inspect(|socket| {
        let _ = socket.set_nodelay(true);
    })
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Latencies of echo and service with one outstanding request, in alternating rounds.
#[derive(Clone, Debug, Serialize)]
pub struct OneOutstanding {
    /// Latency of the echo.
    pub echo: Summary,
    /// Latency of the service.
    pub service: Summary,
    /// Latency of the service minus its step time.
    pub service_less_step: Summary,
    /// Latency of an echo that answers after every core has streamed memory for as long as a step takes, minus that
    /// time: the caches of client, server and kernel are as cold as after a step.
    pub cold_echo: Summary,
    /// Median of `service_less_step` minus median of `echo`: the time that the service adds to the transport, apart
    /// from computing.
    pub added_p50_seconds: f64,
    /// Median of `service_less_step` minus median of `cold_echo`.
    pub added_to_cold_p50_seconds: f64,
}

/// The server that a call goes to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Callee {
    Echo,
    Service,
    ColdEcho,
}

/// Measures echo, service and cold echo; `None` if one of them answered no call. `traffic` generates the echo's memory traffic.
pub async fn one_outstanding(
    workload: &Arc<Workload>,
    mut service: Client,
    mut echo: Client,
    traffic: &MemoryTraffic,
) -> Option<OneOutstanding> {
    let mut source = workload.source(u64::from(u32::MAX), 0.0);
    let [mut of_echo, mut of_service, mut less_step, mut steps, mut of_cold] =
        [(); 5].map(|()| Durations::default());
    for _ in 0..ROUNDS {
        for callee in [Callee::Echo, Callee::Service, Callee::ColdEcho] {
            traffic.ask(if callee == Callee::ColdEcho { steps.quantile(0.5) } else { Duration::ZERO });
            let client = if callee == Callee::Service { &mut service } else { &mut echo };
            let begun = Instant::now();
            for call in 0..ROUND_CALLS {
                let request = source.random(false);
                let sent = Instant::now();
                let Ok(answer) = client.forward(request, None).await else { continue };
                let latency = sent.elapsed();
                if call < COLD_CALLS {
                    continue;
                }
                match callee {
                    Callee::Echo => of_echo.record(latency),
                    Callee::ColdEcho => of_cold.record(latency.saturating_sub(traffic.took())),
                    Callee::Service => {
                        let receipt = answer.receipt.as_ref();
                        let (_, step) = receipt.map(load::times).unwrap_or_default();
                        of_service.record(latency);
                        less_step.record(latency.saturating_sub(step));
                        steps.record(step);
                    }
                }
                if begun.elapsed() > ROUND && call > COLD_CALLS {
                    break;
                }
            }
        }
    }
    traffic.ask(Duration::ZERO);
    if [&of_echo, &of_service, &of_cold].iter().any(|durations| durations.count() == 0) {
        return None;
    }
    let p50 = |durations: &Durations| durations.quantile(0.5).as_secs_f64();
    Some(OneOutstanding {
        echo: of_echo.summary(),
        service: of_service.summary(),
        service_less_step: less_step.summary(),
        cold_echo: of_cold.summary(),
        added_p50_seconds: p50(&less_step) - p50(&of_echo),
        added_to_cold_p50_seconds: p50(&less_step) - p50(&of_cold),
    })
}
