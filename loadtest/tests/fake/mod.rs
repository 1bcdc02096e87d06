//! A fake service with a model that is simple enough to check, and with faults on demand.
//!
//! The output of a row is `(layer + 1) * sum_j weight_j * (id_j + 1) * row`, so it depends on the row, on its routing
//! and on the layer. The fake's gate derives ids and weights from the row.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::forward_stream_response::Result as Answered;
use expertd_proto::v1::moe_server::{Moe, MoeServer};
use expertd_proto::v1::*;
use expertd_types::{DType, rows};
use futures_util::{Stream, StreamExt as _};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

pub const HIDDEN: usize = 32;
pub const EXPERTS: i32 = 16;
pub const K: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// The first row of every n-th answer is changed.
    WrongRow(u64),
    /// The rows of every n-th answer are in another order.
    Shuffled(u64),
    /// Every n-th answer lacks a row.
    Short(u64),
    /// Every n-th request is never answered.
    Silent(u64),
    /// Every n-th request ends with UNAVAILABLE.
    Unavailable(u64),
    /// Every n-th request ends with INTERNAL.
    Internal(u64),
    /// The stream ends with OK after n requests, even if some are in flight.
    EndOfStream(u64),
    /// Every n-th answer does not apply the caller's routing verbatim.
    OtherRouting(u64),
    /// Every answer takes this long.
    Slow(Duration),
}

#[derive(Clone)]
pub struct Fake {
    fault: Fault,
    calls: Arc<AtomicU64>,
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    rows::decode(bytes, DType::F32)
}

impl Fake {
    /// A fake without faults.
    pub fn correct() -> Fake {
        Fake { fault: Fault::None, calls: Arc::default() }
    }

    /// The gate of the fake: ids and weights of one row.
    pub fn gate(row: &[f32]) -> ([i32; K], [f32; K]) {
        let first = (row[0].abs() * 100.0) as i32 % EXPERTS;
        let ids = [first, (first + 3) % EXPERTS, (first + 7) % EXPERTS];
        (ids, [0.5, 0.3, 0.2])
    }

    pub fn output(layer: u32, row: &[f32], ids: &[i32], weights: &[f32]) -> Vec<f32> {
        let factor: f32 = ids.iter().zip(weights).map(|(&id, weight)| (id + 1) as f32 * weight).sum();
        row.iter().map(|value| value * factor * (layer + 1) as f32).collect()
    }

    async fn answer(&self, request: ForwardRequest) -> Result<ForwardResponse, Status> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let hit = |n: u64| call % n == n - 1;
        match self.fault {
            Fault::Unavailable(n) if hit(n) => return Err(Status::unavailable("re-forming")),
            Fault::Internal(n) if hit(n) => return Err(Status::internal("a bug")),
            Fault::Silent(n) if hit(n) => std::future::pending().await,
            Fault::Slow(pause) => tokio::time::sleep(pause).await,
            _ => {}
        }
        let dtype = DType::from_code(request.dtype as u32).unwrap_or(DType::Bf16);
        let Some(Payload::Inline(payload)) = &request.payload else {
            return Err(Status::invalid_argument("no payload"));
        };
        let input = rows::decode(payload, dtype);
        if input.len() != request.tokens as usize * HIDDEN {
            return Err(Status::invalid_argument("payload size"));
        }
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        match &request.routing {
            Some(routing) => {
                ids.extend(routing.topk_ids.as_chunks::<4>().0.iter().map(|&id| i32::from_le_bytes(id)));
                weights.extend(floats(&routing.topk_weights));
            }
            None => {
                for row in input.chunks(HIDDEN) {
                    let (row_ids, row_weights) = Fake::gate(row);
                    ids.extend(row_ids);
                    weights.extend(row_weights);
                }
            }
        }
        if matches!(self.fault, Fault::OtherRouting(n) if hit(n)) {
            ids.iter_mut().for_each(|id| *id = (*id + 1) % EXPERTS);
        }
        let mut output = Vec::new();
        for ((row, ids), weights) in input.chunks(HIDDEN).zip(ids.chunks(K)).zip(weights.chunks(K)) {
            output.push(Fake::output(request.layer, row, ids, weights));
        }
        match self.fault {
            Fault::WrongRow(n) if hit(n) => output[0].iter_mut().for_each(|value| *value *= 1.5),
            Fault::Shuffled(n) if hit(n) => output.rotate_left(1),
            Fault::Short(n) if hit(n) => drop(output.pop()),
            _ => {}
        }
        let returned = request.return_routing;
        let receipt = Receipt {
            steps: vec![call],
            generation: 1,
            weight_version: 1,
            tokens_per_rank: vec![request.tokens],
            topk_ids: if returned {
                ids.iter().flat_map(|id| id.to_le_bytes()).collect()
            } else {
                Vec::new().into()
            },
            topk_weights: if returned { rows::encode(&weights, DType::F32) } else { Vec::new().into() },
            ..Receipt::default()
        };
        Ok(ForwardResponse { rows: rows::encode(&output.concat(), dtype), receipt: Some(receipt) })
    }
}

#[tonic::async_trait]
impl Moe for Fake {
    async fn forward(&self, request: Request<ForwardRequest>) -> Result<Response<ForwardResponse>, Status> {
        self.answer(request.into_inner()).await.map(Response::new)
    }

    type ForwardStreamStream = Pin<Box<dyn Stream<Item = Result<ForwardStreamResponse, Status>> + Send>>;

    async fn forward_stream(
        &self,
        requests: Request<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Self::ForwardStreamStream>, Status> {
        let fake = self.clone();
        let taken = match self.fault {
            Fault::EndOfStream(n) => n as usize,
            _ => usize::MAX,
        };
        let (answers, answered) = tokio::sync::mpsc::channel(16);
        tokio::spawn(async move {
            let mut requests = requests.into_inner();
            for _ in 0..taken {
                let Some(Ok(ForwardStreamRequest { id, request, .. })) = requests.next().await else {
                    return;
                };
                let (fake, answers) = (fake.clone(), answers.clone());
                tokio::spawn(async move {
                    let result = match fake.answer(request.unwrap_or_default()).await {
                        Ok(response) => Answered::Response(response),
                        Err(status) => Answered::Status(RequestStatus {
                            code: status.code() as u32,
                            message: status.message().to_owned(),
                            ..RequestStatus::default()
                        }),
                    };
                    let _ = answers.send(Ok(ForwardStreamResponse { id, result: Some(result) })).await;
                });
            }
            // Requests taken so far are answered; the next one is taken and dropped, and the stream ends.
            let _ = requests.next().await;
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(answered))))
    }

    async fn list_models(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        Ok(Response::new(ListModelsResponse::default()))
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        let layer = |layer| MoeLayer {
            layer,
            num_experts: EXPERTS as u32,
            top_k: K as u32,
            max_k: K as u32,
            ..MoeLayer::default()
        };
        let limits = Limits { max_tokens_per_request: 64, max_message_bytes: 1 << 20, ..Limits::default() };
        Ok(Response::new(GetModelResponse {
            name: "fake".to_owned(),
            family: "fake".to_owned(),
            weight_version: 1,
            generation: 1,
            hidden: HIDDEN as u32,
            num_layers: 4,
            moe_layers: vec![layer(1), layer(3)],
            limits: Some(limits),
            ..GetModelResponse::default()
        }))
    }
}

/// Serves on a free TCP port; the task ends with the test's runtime.
pub async fn serve(fault: Fault) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let fake = MoeServer::new(Fake { fault, calls: Arc::default() });
    let server = tonic::transport::Server::builder().add_service(fake);
    let incoming = TcpListenerStream::new(listener).inspect(|socket| {
        // Without this option, Nagle's algorithm and delayed acknowledgements cost 40 ms per call.
        socket.as_ref().unwrap().set_nodelay(true).unwrap();
    });
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

/// Serves on a Unix-domain socket.
pub async fn serve_unix(path: &std::path::Path) -> String {
    let listener = tokio::net::UnixListener::bind(path).unwrap();
    let fake = MoeServer::new(Fake { fault: Fault::None, calls: Arc::default() });
    let server = tonic::transport::Server::builder().add_service(fake);
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    format!("unix:{}", path.display())
}
