//! Tests of `expertd verify` and `expertd call` against a scripted service: correct answers pass, every kind of wrong
//! answer fails.
use std::pin::Pin;

use clap::Parser as _;
use expertd_cli::call::{CallArgs, CallOutcome, call};
use expertd_cli::golden::Golden;
use expertd_cli::verify::{VerifyArgs, VerifyReport, verify};
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::moe_server::{Moe, MoeServer};
use expertd_proto::v1::{
    ForwardRequest, ForwardResponse, ForwardStreamRequest, ForwardStreamResponse, GetModelRequest,
    GetModelResponse, Limits, ListModelsRequest, ListModelsResponse, MoeLayer, Receipt,
};
use expertd_types::DType;
use expertd_types::rows::{decode, encode, encode_i32};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

const FIXTURE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden/qwen3_moe/golden.safetensors");

/// The error of the scripted service.
#[derive(Clone, Copy)]
enum Fault {
    None,
    /// One output row is replaced by another.
    Row,
    /// One element is NaN.
    Nan,
    /// The last row is missing.
    Short,
    /// The last expert of one row is replaced by another, whose weight differs by this factor.
    Expert(f32),
    /// The recorded ids and their weights are in another order.
    Order,
    /// The service does not return the routing.
    NoRouting,
}

/// Answers recorded rows with recorded outputs. It recognises rows by their bits.
struct Scripted {
    golden: Golden,
    hidden: usize,
    fault: Fault,
}

#[tonic::async_trait]
impl Moe for Scripted {
    async fn forward(&self, request: Request<ForwardRequest>) -> Result<Response<ForwardResponse>, Status> {
        let request = request.into_inner();
        let layer = &self.golden.layers[&request.layer];
        let routing = layer.routing.as_ref().unwrap();
        let Some(Payload::Inline(payload)) = &request.payload else { panic!("inline expected") };
        let (mut output, mut ids, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for row in decode(payload, DType::F32).chunks(self.hidden) {
            let index = layer.input.chunks(self.hidden).position(|known| known == row).unwrap();
            output.extend_from_slice(&layer.output[index * self.hidden..][..self.hidden]);
            ids.extend_from_slice(&routing.ids[index * routing.k..][..routing.k]);
            weights.extend_from_slice(&routing.weights[index * routing.k..][..routing.k]);
        }
        if let Some(given) = &request.routing {
            assert_eq!(
                given.topk_ids,
                encode_i32(&ids),
                "the routing must be the recorded one of these rows"
            );
        }
        match self.fault {
            Fault::None => {}
            Fault::Row => output.copy_within(self.hidden..2 * self.hidden, 0),
            Fault::Nan => output[3] = f32::NAN,
            Fault::Short => output.truncate(output.len() - self.hidden),
            Fault::Expert(factor) => {
                let (last, _) =
                    weights[..routing.k].iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).unwrap();
                ids[last] = (0..).find(|id| !ids[..routing.k].contains(id)).unwrap();
                weights[last] *= factor;
                output[..self.hidden].fill(0.5);
            }
            Fault::Order => {
                ids[..routing.k].reverse();
                weights[..routing.k].reverse();
            }
            Fault::NoRouting => (ids, weights) = (Vec::new(), Vec::new()),
        }
        let receipt = Receipt {
            steps: vec![7],
            tokens_per_rank: vec![request.tokens],
            topk_ids: encode_i32(&ids),
            topk_weights: encode(&weights, DType::F32),
            ..Receipt::default()
        };
        Ok(Response::new(ForwardResponse { rows: encode(&output, DType::F32), receipt: Some(receipt) }))
    }

    type ForwardStreamStream =
        Pin<Box<dyn futures_util::Stream<Item = Result<ForwardStreamResponse, Status>> + Send>>;

    async fn forward_stream(
        &self,
        _: Request<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Self::ForwardStreamStream>, Status> {
        Err(Status::unimplemented("not used"))
    }

    async fn list_models(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        Err(Status::unimplemented("not used"))
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        let moe_layers = self.golden.layers.iter().map(|(&layer, rows)| MoeLayer {
            layer,
            top_k: rows.routing.as_ref().unwrap().k as u32,
            ..MoeLayer::default()
        });
        Ok(Response::new(GetModelResponse {
            name: "scripted".to_owned(),
            hidden: self.hidden as u32,
            moe_layers: moe_layers.collect(),
            limits: Some(Limits { max_tokens_per_request: 5, ..Limits::default() }),
            ..GetModelResponse::default()
        }))
    }
}

async fn serve(fault: Fault) -> String {
    let golden = Golden::read(FIXTURE.as_ref()).unwrap();
    let hidden = golden.layers.values().next().unwrap().hidden;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let service = MoeServer::new(Scripted { golden, hidden, fault });
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    address
}

#[derive(clap::Parser)]
struct Verify {
    #[command(flatten)]
    args: VerifyArgs,
}

#[derive(clap::Parser)]
struct Call {
    #[command(flatten)]
    args: CallArgs,
}

async fn verified(fault: Fault, more: &[&str]) -> VerifyReport {
    let address = serve(fault).await;
    let line = [&["verify", "--address", &address, "--golden", FIXTURE], more].concat();
    verify(&Verify::try_parse_from(line).unwrap().args).await.unwrap()
}

#[tokio::test]
async fn right_answers_pass_in_batches_of_any_size() {
    for batch in ["1", "3", "5", "100"] {
        for routing in ["gate", "recorded"] {
            let report = verified(Fault::None, &["--batch", batch, "--routing", routing]).await;
            assert!(report.ok() && report.largest_error() == 0.0, "{report:?}");
            assert!(report.layers.iter().all(|layer| layer.ids.as_ref().unwrap().mismatches.is_empty()));
        }
    }
    let report = verified(Fault::Order, &["--routing", "gate"]).await;
    assert!(report.ok(), "ids must be compared as sets: {report:?}");
}

#[tokio::test]
async fn wrong_rows_fail() {
    for fault in [Fault::Row, Fault::Nan, Fault::Short] {
        for routing in ["gate", "recorded"] {
            let report = verified(fault, &["--routing", routing]).await;
            assert!(!report.ok(), "{report:?}");
            assert!(report.layers.iter().all(|layer| layer.rows_beyond_tolerance > 0), "{report:?}");
        }
    }
}

#[tokio::test]
async fn another_expert_is_accepted_only_near_a_tie() {
    // The service limits requests to 5 rows, so each batch has one faulty row.
    let report = verified(Fault::Expert(1.0 + 4e-7), &["--routing", "gate"]).await;
    assert!(report.ok(), "{report:?}");
    let exceptions = &report.layers[0].ids.as_ref().unwrap().mismatches;
    assert!(
        !exceptions.is_empty() && exceptions.iter().all(|row| row.exception),
        "every exception must be listed"
    );
    for (factor, routing) in [(1.0 + 4e-6, "gate"), (1.0 + 4e-7, "recorded")] {
        let report = verified(Fault::Expert(factor), &["--routing", routing]).await;
        assert!(!report.ok(), "{routing}: {report:?}");
    }
    assert!(!verified(Fault::NoRouting, &["--routing", "gate"]).await.ok(), "a missing routing must fail");
}

#[tokio::test]
async fn a_file_that_does_not_fit_the_model_is_refused() {
    let address = serve(Fault::None).await;
    let other = FIXTURE.replace("qwen3_moe/", "deepseek_v2/");
    let line = ["verify", "--address", &address, "--golden", &other];
    let error = verify(&Verify::try_parse_from(line).unwrap().args).await.unwrap_err().to_string();
    assert!(error.contains("layer"), "{error}");
}

async fn called(more: &[&str]) -> CallOutcome {
    let address = serve(Fault::None).await;
    let line = [&["call", "--address", &address], more].concat();
    call(&Call::try_parse_from(line).unwrap().args).await.unwrap()
}

#[tokio::test]
async fn call_sends_recorded_rows_and_reads_the_receipt() {
    let outcome = called(&["--golden", FIXTURE, "--tokens", "4", "--routing", "recorded"]).await;
    assert_eq!((outcome.tokens, outcome.error), (4, Some(0.0)));
    assert_eq!(outcome.routing().len(), 4);
    assert_eq!(outcome.response.receipt.unwrap().steps, [7]);
    let address = serve(Fault::None).await;
    for wrong in
        [&["--routing", "recorded"][..], &["--layer", "99"], &["--golden", FIXTURE, "--tokens", "99"]]
    {
        let line = [&["call", "--address", &address], wrong].concat();
        assert!(call(&Call::try_parse_from(line).unwrap().args).await.is_err(), "{wrong:?}");
    }
}
