//! Tests of `ForwardStream`: several requests in flight, valid and invalid ones mixed.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use expertd_proto::v1::{
    ForwardStreamRequest, ForwardStreamResponse, forward_stream_response::Result as Outcome,
};
use http_body_util::BodyExt as _;
use prost::Message as _;
use tonic::Code;
use tonic_types::StatusExt as _;
use tower::ServiceExt as _;

use crate::backend::{self, Fake, limits};
use crate::harness::{FORWARD_STREAM, Service, eventually, pass, prefix, raw_call, request, rows_of};

const HIDDEN: usize = 16;

#[tokio::test]
async fn answers_arrive_in_order_of_completion_with_their_ids() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let client = Service::start(&fake).await.client().await;
    let (sender, mut receiver) = client.stream(8).await.unwrap();
    let mut sent = HashMap::new();
    for id in [u64::MAX, 0, 17, 3] {
        let held = request(backend::HOLD, 1 + (id % 5) as usize, HIDDEN);
        sent.insert(id, rows_of(&held));
        sender.send(id, held, None).await.unwrap();
    }
    eventually("four requests are held", || fake.held() == 4).await;

    // Requests that complete and invalid requests overtake them.
    let good = request(backend::ECHO, 2, HIDDEN);
    sender.send(99, good.clone(), None).await.unwrap();
    let (id, answer) = receiver.next().await.unwrap().unwrap();
    assert_eq!((id, answer.unwrap().rows), (99, rows_of(&good)));
    let mut bad = good.clone();
    bad.tokens = 1;
    sender.send(100, bad, None).await.unwrap();
    let (id, answer) = receiver.next().await.unwrap().unwrap();
    assert_eq!((id, answer.unwrap_err().code()), (100, Code::InvalidArgument));

    // An id in flight is refused; an id that was answered may be used again.
    sender.send(17, good.clone(), None).await.unwrap();
    let (id, answer) = receiver.next().await.unwrap().unwrap();
    let status = answer.unwrap_err();
    assert_eq!((id, status.code()), (17, Code::InvalidArgument));
    assert_eq!(status.get_error_details().bad_request().unwrap().field_violations[0].field, "id");
    sender.send(99, good, None).await.unwrap();
    assert_eq!(receiver.next().await.unwrap().unwrap().0, 99);

    drop(sender);
    fake.release();
    let mut order = Vec::new();
    while let Some((id, answer)) = receiver.next().await.unwrap() {
        assert_eq!(answer.unwrap().rows, sent.remove(&id).unwrap());
        order.push(id);
    }
    assert!(sent.is_empty(), "every request must be answered before the stream ends");
    assert_eq!(order.len(), 4);
}

#[tokio::test]
async fn a_stream_holds_a_bounded_number_of_requests() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let client = Service::start(&fake).await.client().await;
    let (sender, mut receiver) = client.stream(1000).await.unwrap();
    for id in 0..100 {
        sender.send(id, request(backend::HOLD, 1, HIDDEN), None).await.unwrap();
    }
    let limit = held_limit(&fake);
    eventually("the stream is full", || fake.held() == limit).await;
    pass(Duration::from_millis(100)).await;
    assert_eq!(fake.held(), limit);
    let mut answered = 0;
    while answered < 100 {
        fake.release();
        let (_, answer) = receiver.next().await.unwrap().unwrap();
        answer.unwrap();
        answered += 1;
    }
}

/// Sends raw bytes as the body of a `ForwardStream`; returns the decoded answers and the status in the trailers.
async fn raw_stream(service: &Service, parts: Vec<Bytes>) -> (Vec<ForwardStreamResponse>, tonic::Status) {
    let frames = parts.into_iter().map(|part| Ok::<_, tonic::Status>(http_body::Frame::data(part)));
    let body = tonic::body::Body::new(http_body_util::StreamBody::new(tokio_stream::iter(frames)));
    let response = service.channel().await.oneshot(raw_call(FORWARD_STREAM, body)).await.unwrap();
    if let Some(status) = tonic::Status::from_header_map(response.headers()) {
        return (Vec::new(), status);
    }
    let collected = response.into_body().collect().await.unwrap();
    let status = tonic::Status::from_header_map(collected.trailers().unwrap()).unwrap();
    let mut bytes = collected.to_bytes();
    let mut answers = Vec::new();
    while !bytes.is_empty() {
        let head = bytes.split_to(5);
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        answers.push(ForwardStreamResponse::decode(bytes.split_to(length)).unwrap());
    }
    (answers, status)
}

fn framed(id: u64, layer: u32, tokens: usize) -> Bytes {
    let message = ForwardStreamRequest { id, request: Some(request(layer, tokens, HIDDEN)), timeout_ms: 0 };
    let encoded = message.encode_to_vec();
    let mut bytes = BytesMut::from(&prefix(encoded.len())[..]);
    bytes.extend_from_slice(&encoded);
    bytes.freeze()
}

fn code(answer: &ForwardStreamResponse) -> (u64, u32) {
    match answer.result.as_ref().unwrap() {
        Outcome::Response(_) => (answer.id, 0),
        Outcome::Status(status) => (answer.id, status.code),
    }
}

#[tokio::test]
async fn an_oversized_message_ends_its_stream_after_the_answers() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let service = Service::start(&fake).await;
    for large_id in [0, 5, u64::MAX] {
        let large = framed(large_id, backend::ECHO, 8000);
        assert!(large.len() > fake_limit(&fake));
        // The message is sent whole, and cut at inconvenient positions.
        for cuts in [vec![], vec![1, 4, 6, 9, 17], vec![5, 6, 70_000, 70_001]] {
            let mut all = BytesMut::from(&framed(1, backend::ECHO, 1)[..]);
            let offset = all.len();
            all.extend_from_slice(&large);
            let mut all = all.freeze();
            let mut parts = Vec::new();
            let mut done = 0;
            for cut in &cuts {
                parts.push(all.split_to(offset + cut - done));
                done = offset + cut;
            }
            parts.push(all);
            let (answers, status) = raw_stream(&service, parts).await;
            assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
            let details = status.get_error_details();
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, "body");
            assert_eq!(answers.iter().map(code).collect::<Vec<_>>(), [(1, 0)]);
        }
    }
}

#[tokio::test]
async fn a_message_that_does_not_decode_ends_only_its_stream() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let service = Service::start(&fake).await;
    let client = service.client().await;
    let (sender, mut receiver) = client.stream(1).await.unwrap();

    let mut garbage = BytesMut::from(&prefix(7)[..]);
    garbage.extend_from_slice(b"\xff\xff\xff\xff\xff\xff\xff");
    let parts = vec![framed(1, backend::ECHO, 1), garbage.freeze(), framed(2, backend::ECHO, 1)];
    let (answers, status) = raw_stream(&service, parts).await;
    assert_eq!(answers.iter().map(code).collect::<Vec<_>>(), [(1, 0)], "earlier requests must be answered");
    assert_ne!(status.code(), Code::Ok);

    // A body that ends in the middle of a message.
    let whole = framed(1, backend::ECHO, 4);
    for cut in [1, 4, 5, 6, whole.len() - 1] {
        let parts = vec![framed(9, backend::ECHO, 1), whole.slice(..cut)];
        let (answers, status) = raw_stream(&service, parts).await;
        assert_eq!(answers.iter().map(code).collect::<Vec<_>>(), [(9, 0)]);
        assert_eq!(status.code(), Code::InvalidArgument, "cut at {cut}: {status:?}");
    }

    // Another stream of the same service is not affected.
    let good = request(backend::ECHO, 3, HIDDEN);
    sender.send(4, good.clone(), None).await.unwrap();
    assert_eq!(receiver.next().await.unwrap().unwrap().1.unwrap().rows, rows_of(&good));
}

#[tokio::test]
async fn a_request_without_content_is_refused() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let service = Service::start(&fake).await;
    let empty = ForwardStreamRequest { id: 3, request: None, timeout_ms: 0 }.encode_to_vec();
    let parts = vec![prefix(empty.len()), Bytes::from(empty), prefix(0), framed(2, backend::ECHO, 1)];
    let (answers, status) = raw_stream(&service, parts).await;
    let invalid = Code::InvalidArgument as u32;
    assert_eq!(answers.iter().map(code).collect::<Vec<_>>(), [(3, invalid), (0, invalid), (2, 0)]);
    assert_eq!(status.code(), Code::Ok);
}

#[tokio::test]
async fn a_stream_ends_at_its_own_deadline() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let client = Service::start(&fake).await.client().await;
    let mut timeout = Duration::from_millis(200);
    // On a busy machine the deadline may pass before the request is there: another stream gets more time.
    loop {
        let (sender, outbound) = tokio::sync::mpsc::channel(4);
        let mut call = tonic::Request::new(tokio_stream::wrappers::ReceiverStream::new(outbound));
        call.set_timeout(timeout);
        let message =
            ForwardStreamRequest { id: 1, request: Some(request(backend::HOLD, 1, HIDDEN)), timeout_ms: 0 };
        sender.send(message).await.unwrap();
        let status = match client.raw().forward_stream(call).await {
            Ok(stream) => stream.into_inner().message().await.unwrap_err(),
            Err(status) => status,
        };
        assert_eq!(status.code(), Code::DeadlineExceeded);
        if fake.held() > 0 {
            break;
        }
        timeout *= 2;
        assert!(timeout < Duration::from_secs(60), "no request comes in time");
    }
    eventually("the requests in flight are cancelled", || fake.wanted() == 0).await;
}

#[tokio::test]
async fn closing_a_stream_cancels_what_it_has_in_flight() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let client = Service::start(&fake).await.client().await;
    let (sender, receiver) = client.stream(4).await.unwrap();
    for id in 0..3 {
        sender.send(id, request(backend::HOLD, 1, HIDDEN), None).await.unwrap();
    }
    eventually("three requests are held", || fake.wanted() == 3).await;
    drop((sender, receiver));
    eventually("the requests are cancelled", || fake.wanted() == 0).await;
    assert_eq!(fake.submitted.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn shutting_down_ends_streams_with_a_status() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    let service = Service::start(&fake).await;
    let client = service.client().await;
    let (sender, mut receiver) = client.stream(4).await.unwrap();
    sender.send(1, request(backend::HOLD, 1, HIDDEN), None).await.unwrap();
    eventually("the request is held", || fake.wanted() == 1).await;
    service.shutdown.cancel();
    pass(Duration::from_millis(100)).await;
    fake.release();
    let (id, answer) = receiver.next().await.unwrap().unwrap();
    assert_eq!(id, 1);
    answer.expect("the request in flight must be finished");
    let status = receiver.next().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(expertd_proto::retry_delay(&status).is_some());
    service.running.await.unwrap();
    assert!(!service.directory.path().join("api.sock").exists(), "the socket file must be removed");
}

fn fake_limit(fake: &Fake) -> usize {
    expertd_core::backend::Backend::model(fake).limits.max_message_bytes
}

fn held_limit(fake: &Fake) -> usize {
    expertd_core::backend::Backend::model(fake).limits.max_requests_per_stream as usize
}
