//! Hostile services against the client: they withhold, exaggerate or send what was not asked for. A call ends with a
//! status, and the client holds no more than its request explains.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use expertd_client::{Client, ClientError, RetryPolicy};
use expertd_proto::v1::moe_server::{Moe, MoeServer};
use expertd_proto::v1::*;
use futures_util::Stream;
use prost::Message as _;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};

/// Bytes of one row.
const ROW: usize = 64;

#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Questions are never answered.
    Silence,
    /// Answers have this many bytes of rows.
    Rows(usize),
    /// The answer to GetModel is too large.
    Model,
    /// The status has this many bytes of text and details, and as many of metadata.
    Status(usize),
    /// Every call is refused, to be repeated after a time that no clock can count.
    Retry { seconds: i64, nanos: i32 },
}

#[derive(Clone)]
struct Liar {
    lie: Lie,
    calls: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Moe for Liar {
    async fn forward(&self, _: Request<ForwardRequest>) -> Result<Response<ForwardResponse>, Status> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.lie {
            Lie::Rows(bytes) => {
                Ok(Response::new(ForwardResponse { rows: vec![1; bytes].into(), receipt: None }))
            }
            Lie::Status(bytes) => {
                let mut metadata = MetadataMap::new();
                metadata.insert("x-more", "y".repeat(bytes).parse().unwrap());
                let details = Bytes::from(vec![7; bytes]);
                Err(Status::with_details_and_metadata(Code::Internal, "z".repeat(bytes), details, metadata))
            }
            Lie::Retry { seconds, nanos } => {
                // RetryInfo, by hand: libraries refuse to write such times.
                let retry_delay = tonic_types::pb::RetryInfo {
                    retry_delay: Some(prost_types::Duration { seconds, nanos }),
                };
                let value = retry_delay.encode_to_vec();
                let type_url = "type.googleapis.com/google.rpc.RetryInfo".to_owned();
                let status = tonic_types::pb::Status {
                    code: Code::Unavailable as i32,
                    message: "later".to_owned(),
                    details: vec![prost_types::Any { type_url, value }],
                };
                Err(Status::with_details(Code::Unavailable, "later", status.encode_to_vec().into()))
            }
            Lie::Silence | Lie::Model => Err(Status::unimplemented("not asked")),
        }
    }

    type ForwardStreamStream = Pin<Box<dyn Stream<Item = Result<ForwardStreamResponse, Status>> + Send>>;

    async fn forward_stream(
        &self,
        _: Request<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Self::ForwardStreamStream>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn list_models(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        match self.lie {
            Lie::Silence => std::future::pending().await,
            Lie::Model => {
                Ok(Response::new(GetModelResponse { name: "n".repeat(64 << 20), ..Default::default() }))
            }
            // The client is to expect everything.
            _ => {
                let limits = Limits { max_message_bytes: u64::MAX, ..Default::default() };
                Ok(Response::new(GetModelResponse { limits: Some(limits), ..Default::default() }))
            }
        }
    }
}

/// A service that lies; its address, and the calls that it got.
async fn start(lie: Lie) -> (String, Arc<AtomicU64>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let liar = Liar { lie, calls: Arc::default() };
    let calls = Arc::clone(&liar.calls);
    let server = Server::builder().add_service(MoeServer::new(liar));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (address, calls)
}

/// A request of two rows.
fn request() -> ForwardRequest {
    ForwardRequest::inline(0, 2, DType::DtypeF32, Bytes::from(vec![0; 2 * ROW]))
}

#[tokio::test]
async fn a_service_that_does_not_answer_holds_up_no_client() {
    let (address, _) = start(Lie::Silence).await;
    let error = Client::connect(&address).await.unwrap_err();
    assert!(
        matches!(&error, ClientError::Model(status) if status.code() == Code::DeadlineExceeded),
        "{error}"
    );
}

#[tokio::test]
async fn answers_have_as_many_rows_as_the_request() {
    for bytes in [0, ROW, 2 * ROW - 1, 2 * ROW + 1, 1 << 20] {
        let (address, _) = start(Lie::Rows(bytes)).await;
        let client = Client::connect(&address).await.unwrap();
        let status = client.forward(request(), None).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal);
        assert!(status.message().contains(&format!("{bytes} bytes of rows, expected 128")), "{status}");
    }
    let (address, _) = start(Lie::Rows(2 * ROW)).await;
    let client = Client::connect(&address).await.unwrap();
    assert_eq!(client.forward(request(), None).await.unwrap().rows.len(), 2 * ROW);
}

#[tokio::test]
async fn answers_that_no_request_explains_are_not_held() {
    let (address, _) = start(Lie::Rows(64 << 20)).await;
    let client = Client::connect(&address).await.unwrap();
    let status = client.forward(request(), None).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    let (address, _) = start(Lie::Model).await;
    let error = Client::connect(&address).await.unwrap_err();
    assert!(matches!(&error, ClientError::Model(status) if status.code() == Code::OutOfRange), "{error}");
}

#[tokio::test]
async fn statuses_without_end_end_the_call() {
    for bytes in [1 << 10, 1 << 20] {
        let (address, _) = start(Lie::Status(bytes)).await;
        let client = Client::connect(&address).await.unwrap();
        let call = client.forward(request(), Some(Duration::from_secs(60)));
        let status = call.await.unwrap_err();
        assert_ne!(status.code(), Code::DeadlineExceeded, "{bytes} bytes");
        assert!(status.message().len() < 1 << 16, "{} bytes of text", status.message().len());
    }
}

#[tokio::test]
async fn pauses_that_a_service_asks_for_are_bounded() {
    let policy = RetryPolicy {
        max_attempts: 3,
        max_pause: Duration::from_millis(20),
        max_elapsed: Duration::from_secs(600),
    };
    for (seconds, nanos) in
        [(i64::MAX, 0), (i64::MIN, 0), (-1, -1), (0, i32::MIN), (i64::MAX, i32::MAX), (0, 0)]
    {
        let (address, calls) = start(Lie::Retry { seconds, nanos }).await;
        let client = Client::connect(&address).await.unwrap().with_retry(policy);
        let call = tokio::time::timeout(Duration::from_secs(60), client.forward(request(), None));
        let status = call.await.expect("the pause is bounded").unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{seconds} s {nanos} ns");
        assert_eq!(calls.load(Ordering::Relaxed), 3, "{seconds} s {nanos} ns");
    }
}
