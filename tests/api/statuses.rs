//! Tests of every row of the status table, as a unary call and on a stream, over TCP and a Unix-domain socket.

use std::time::Duration;

use bytes::Bytes;
use expertd_client::Client;
use expertd_core::failure::Failure;
use expertd_proto::retry_delay;
use expertd_proto::v1::{DType, ForwardRequest, Routing, SharedExperts, forward_request::Payload};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::backend::{self, Fake, limits};
use crate::harness::{Service, eventually, request, rows_of};

const HIDDEN: usize = 12;
const TOKENS: usize = 3;
const MAX_TOKENS: usize = 40;

fn good() -> ForwardRequest {
    request(backend::ECHO, TOKENS, HIDDEN)
}

fn ids(ids: &[i32]) -> Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn weights(weights: &[f32]) -> Bytes {
    weights.iter().flat_map(|weight| weight.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn routed(ids_in: &[i32], weights_in: &[f32], k: u32) -> ForwardRequest {
    good().with_routing(ids(ids_in), weights(weights_in), k)
}

fn with(change: impl FnOnce(&mut ForwardRequest)) -> ForwardRequest {
    let mut request = good();
    change(&mut request);
    request
}

/// The status of a request as a unary call and on a stream, which must be equal.
async fn refused(client: &Client, request: ForwardRequest) -> Status {
    let unary = client.forward(request.clone(), None).await.expect_err("the request must be refused");
    let (sender, mut receiver) = client.stream(1).await.unwrap();
    sender.send(5, request, None).await.unwrap();
    let (id, streamed) = receiver.next().await.unwrap().unwrap();
    let streamed = streamed.expect_err("the request must be refused");
    assert_eq!(id, 5);
    assert_eq!(streamed.code(), unary.code());
    assert_eq!(streamed.message(), unary.message());
    assert_eq!(streamed.details(), unary.details());

    // The stream continues.
    let fine = good();
    sender.send(5, fine.clone(), None).await.unwrap();
    assert_eq!(receiver.next().await.unwrap().unwrap().1.unwrap().rows, rows_of(&fine));
    unary
}

#[tokio::test]
async fn errors_of_invalid_requests_name_the_field() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let service = Service::start(&fake).await;
    let ok_ids = [0, 1, 2, 3, 4, 69];
    let ok_weights = [0.5f32; 6];
    let cases: Vec<(&str, &str, ForwardRequest)> = vec![
        ("layer without MoE", "layer", with(|r| r.layer = backend::DENSE)),
        ("no dtype", "dtype", with(|r| r.dtype = 0)),
        ("unknown dtype", "dtype", with(|r| r.dtype = 9)),
        ("negative dtype", "dtype", with(|r| r.dtype = -1)),
        ("dtype that contradicts the bytes", "inline", with(|r| r.dtype = DType::DtypeBf16.into())),
        ("too few bytes", "inline", with(|r| r.tokens = 4)),
        ("too many bytes", "inline", with(|r| r.tokens = 2)),
        ("bytes without tokens", "inline", with(|r| r.tokens = 0)),
        ("no rows", "inline", with(|r| r.payload = None)),
        ("over the token limit", "tokens", request(backend::ECHO, MAX_TOKENS + 1, HIDDEN)),
        ("absurd token count", "tokens", with(|r| r.tokens = u32::MAX)),
        ("k too large", "routing.k", routed(&ok_ids, &ok_weights, 5)),
        ("absurd k", "routing.k", routed(&ok_ids, &ok_weights, u32::MAX)),
        ("k that contradicts the bytes", "routing.topk_ids", routed(&ok_ids, &ok_weights, 3)),
        ("ids too short", "routing.topk_ids", routed(&ok_ids[..5], &ok_weights, 2)),
        ("ids not whole", "routing.topk_ids", {
            good().with_routing(ids(&ok_ids).slice(..23), weights(&ok_weights), 0)
        }),
        ("weights too short", "routing.topk_weights", routed(&ok_ids, &ok_weights[..5], 2)),
        ("id above the range", "routing.topk_ids", routed(&[0, 1, 2, 3, 4, 70], &ok_weights, 0)),
        ("id far above the range", "routing.topk_ids", routed(&[0, 1, 2, 3, 4, i32::MAX], &ok_weights, 0)),
        ("negative id", "routing.topk_ids", routed(&[0, 1, -2, 3, 4, 5], &ok_weights, 0)),
        ("repeated id", "routing.topk_ids", routed(&[0, 1, 66, 66, 4, 5], &ok_weights, 0)),
        (
            "weight not a number",
            "routing.topk_weights",
            routed(&ok_ids, &[0.1, 0.2, f32::NAN, 0.4, 0.5, 0.6], 0),
        ),
        (
            "weight infinite",
            "routing.topk_weights",
            routed(&ok_ids, &[0.1, 0.2, 0.3, 0.4, 0.5, f32::NEG_INFINITY], 0),
        ),
        ("no routing data", "routing.topk_ids", with(|r| r.routing = Some(Routing::default()))),
        ("token ids missing", "token_ids", with(|r| r.layer = backend::BY_TOKEN_ID)),
        ("token id above the range", "token_ids", {
            with(|r| r.layer = backend::BY_TOKEN_ID).with_token_ids(ids(&[0, 100, 2]))
        }),
        ("negative token id", "token_ids", {
            with(|r| r.layer = backend::BY_TOKEN_ID).with_token_ids(ids(&[0, 1, -2]))
        }),
        ("unknown shared_experts", "shared_experts", with(|r| r.shared_experts = 7)),
    ];
    for address in [&service.tcp, &service.unix] {
        let client = Client::connect(address).await.unwrap();
        for (what, field, request) in &cases {
            let status = refused(&client, request.clone()).await;
            assert_eq!(status.code(), Code::InvalidArgument, "{what}: {status:?}");
            let details = status.get_error_details();
            let fields: Vec<_> =
                details.bad_request().unwrap().field_violations.iter().map(|v| v.field.as_str()).collect();
            assert!(fields.contains(field), "{what}: {fields:?} lacks {field}");
            assert!(status.message().contains(field), "{what}: {}", status.message());
            let info = details.error_info().unwrap();
            assert_eq!((info.reason.as_str(), info.domain.as_str()), ("INVALID_REQUEST", "expertd"));
        }
    }
}

#[tokio::test]
async fn unknown_models_and_layers_are_not_found() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let client = Service::start(&fake).await.client().await;
    for (request, reason) in [
        (good().with_model("other"), "UNKNOWN_MODEL"),
        (with(|r| r.layer = backend::NUM_LAYERS as u32), "UNKNOWN_LAYER"),
        (with(|r| r.layer = u32::MAX), "UNKNOWN_LAYER"),
        (with(|r| r.layer = backend::ELSEWHERE), "LAYER_NOT_HELD"),
    ] {
        let status = refused(&client, request).await;
        assert_eq!(status.code(), Code::NotFound);
        assert_eq!(status.get_error_details().error_info().unwrap().reason, reason);
    }
    assert_eq!(client.model("other").await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn another_weight_version_is_a_failed_precondition() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let client = Service::start(&fake).await.client().await;
    let status = refused(&client, good().expecting_weight_version(8)).await;
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("version 8") && status.message().contains("7 is loaded"), "{status:?}");
    client.forward(good().expecting_weight_version(backend::WEIGHT_VERSION), None).await.unwrap();
}

#[tokio::test]
async fn temporary_errors_carry_retry_info() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let client = Service::start(&fake).await.client().await;
    let after = Duration::from_millis(170);
    let overloaded = Failure::Overloaded { reason: "the queue is full".to_owned(), retry_after: after };
    let reforming = Failure::NotReady { reason: "re-forming".to_owned(), retry_after: after };
    for (error, code, reason, exact) in [
        (overloaded, Code::ResourceExhausted, "OVERLOADED", true),
        (reforming, Code::Unavailable, "NOT_READY", true),
        (Failure::Draining, Code::Unavailable, "DRAINING", false),
    ] {
        fake.refuse(Some(error));
        let unary = client.forward(good(), None).await.unwrap_err();
        let (sender, mut receiver) = client.stream(1).await.unwrap();
        sender.send(0, good(), None).await.unwrap();
        let (id, streamed) = receiver.next().await.unwrap().unwrap();
        assert_eq!(id, 0);
        for status in [unary, streamed.unwrap_err()] {
            assert_eq!(status.code(), code);
            assert_eq!(status.get_error_details().error_info().unwrap().reason, reason);
            let delay = retry_delay(&status).expect("RetryInfo");
            assert!(if exact { delay == after } else { delay > Duration::ZERO });
        }
    }
    fake.refuse(None);

    let fault = refused(&client, with(|r| r.layer = backend::FAULT)).await;
    assert_eq!(fault.code(), Code::Unavailable);
    assert!(fault.message().contains("rank 1 ended"));
    assert_eq!(retry_delay(&fault), Some(Duration::from_millis(300)));

    let abandoned = refused(&client, with(|r| r.layer = backend::ABANDON)).await;
    assert_eq!(abandoned.code(), Code::Unavailable);
    assert!(retry_delay(&abandoned).is_some());
}

#[tokio::test]
async fn the_service_answers_the_deadline_before_the_transport() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let service = Service::start(&fake).await;
    let client = service.client().await;
    let held = with(|r| r.layer = backend::HOLD);
    for timeout in [60, 400] {
        let timeout = Duration::from_millis(timeout);
        // The client's transport has its own timer, which is set a few milliseconds later. On a busy machine it may fire first, also
        // several times.
        let begun = std::time::Instant::now();
        loop {
            let status = client.forward(held.clone(), Some(timeout)).await.unwrap_err();
            assert_eq!(status.code(), Code::DeadlineExceeded);
            let details = status.get_error_details();
            if details.error_info().is_some_and(|info| info.reason == "DEADLINE_EXCEEDED") {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{status:#?}");
        }
    }
    // On a stream each request has its own deadline.
    let (sender, mut receiver) = client.stream(4).await.unwrap();
    sender.send(1, held.clone(), Some(Duration::from_millis(30))).await.unwrap();
    sender.send(2, held.clone(), None).await.unwrap();
    let (id, result) = receiver.next().await.unwrap().unwrap();
    assert_eq!((id, result.unwrap_err().code()), (1, Code::DeadlineExceeded));
    eventually("requests whose deadline has passed are cancelled", || fake.wanted() == 1).await;
    // After a pause of the machine the second request may come after the first one's end.
    let release = async {
        loop {
            fake.release();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let second = tokio::select! {
        answer = receiver.next() => answer,
        () = release => unreachable!("it has no end"),
    };
    assert_eq!(second.unwrap().unwrap().0, 2);

    // A timeout beyond the range of clocks is as good as none.
    client.forward(good(), Some(Duration::MAX)).await.unwrap();

    // The backend itself reports an exceeded deadline.
    fake.refuse(Some(Failure::DeadlineExceeded));
    assert_eq!(client.forward(good(), None).await.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn valid_requests_are_answered_completely() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let service = Service::start(&fake).await;
    for address in [&service.tcp, &service.unix] {
        let client = Client::connect(address).await.unwrap();
        let model = client.model("").await.unwrap();
        assert_eq!((model.hidden as usize, model.moe_layers.len()), (HIDDEN, 5));
        assert_eq!(model.moe_layers[0].max_k as usize, backend::MAX_K);
        assert_eq!(client.models().await.unwrap()[0].name, "fake");

        for tokens in [1, 7, MAX_TOKENS] {
            for dtype in [DType::DtypeBf16, DType::DtypeF16, DType::DtypeF32] {
                let mut request = request(backend::ECHO, tokens, HIDDEN);
                let size = if dtype == DType::DtypeF32 { 4 } else { 2 };
                request.dtype = dtype.into();
                request.payload = Some(Payload::Inline(rows_of(&request).slice(..tokens * HIDDEN * size)));
                let answer = client.forward(request.clone().with_model("fake"), None).await.unwrap();
                assert_eq!(answer.rows, rows_of(&request));
                let receipt = answer.receipt.unwrap();
                assert_eq!(receipt.tokens_per_rank, [tokens as u32, 0]);
                assert!(receipt.timings.is_empty(), "the call did not ask for timings");
                assert_eq!(receipt.slot_versions.len(), receipt.steps.len());
                assert!(receipt.slot_versions.iter().all(|&version| version == 17));
            }
        }

        let mut everything = routed(&[69, 0, 5, 6, 1, 64], &[1.0, -0.0, 1e-30, 2.0, 3.0, 4.0], 0)
            .returning_routing()
            .returning_timings()
            .with_token_ids(Bytes::from_static(b"ignored"));
        everything.shared_experts = SharedExperts::Exclude.into();
        let receipt = client.forward(everything.clone(), None).await.unwrap().receipt.unwrap();
        let given = everything.routing.unwrap();
        assert_eq!((receipt.topk_ids, receipt.topk_weights), (given.topk_ids, given.topk_weights));
        assert_eq!((receipt.timings.len(), receipt.generation, receipt.weight_version), (1, 3, 7));

        // The id -1 may repeat and fill a row, and its weight may be anything. The receipt has the caller's ids and weights.
        let unowned = routed(&[69, -1, -1, -1, 1, 64], &[1.0, f32::NAN, 1.0, f32::INFINITY, 3.0, 4.0], 0);
        let receipt =
            client.forward(unowned.clone().returning_routing(), None).await.unwrap().receipt.unwrap();
        let given = unowned.routing.unwrap();
        assert_eq!((receipt.topk_ids, receipt.topk_weights), (given.topk_ids, given.topk_weights));

        // k is below and above the layer's own.
        client.forward(routed(&[69, 0, 5], &[1.0; 3], 1), None).await.unwrap();
        let twelve: Vec<i32> = (0..12).collect();
        client.forward(routed(&twelve, &[1.0; 12], 4), None).await.unwrap();

        let by_id = with(|r| r.layer = backend::BY_TOKEN_ID).with_token_ids(ids(&[0, 99, 5]));
        client.forward(by_id, None).await.unwrap();
    }
}

#[tokio::test]
async fn zero_tokens_are_legal_and_take_part_in_no_step() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let client = Service::start(&fake).await.client().await;
    let mut empty = request(backend::ECHO, 0, HIDDEN);
    for payload in [None, Some(Payload::Inline(Bytes::new()))] {
        empty.payload = payload;
        for request in [empty.clone(), empty.clone().with_routing(Bytes::new(), Bytes::new(), 0)] {
            let answer = client.forward(request, None).await.unwrap();
            let receipt = answer.receipt.unwrap();
            assert!(answer.rows.is_empty() && receipt.steps.is_empty());
            assert_eq!(receipt.tokens_per_rank, [0, 0]);
        }
    }
    assert_eq!(fake.submitted.load(std::sync::atomic::Ordering::SeqCst), 0);
}
