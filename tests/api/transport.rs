//! Tests of garbage, truncation, oversized messages, slow readers and slow writers: none of them may disturb other
//! callers or hold memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use expertd_client::transport::endpoint;
use expertd_core::backend::Limits;
use expertd_grpc::ConnectionTimeouts;
use expertd_proto::v1::ForwardRequest;
use http_body_util::BodyExt as _;
use prost::Message as _;
use rand::RngExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tonic::Code;
use tower::ServiceExt as _;

use crate::backend::{self, Fake, limits};
use crate::harness::{
    FORWARD, PATIENCE, Service, eventually, pass, prefix, random_rows, raw_call, raw_status, request, rows_of,
};

const HIDDEN: usize = 1024;
const MAX_TOKENS: usize = 256;

/// Short, but long enough for honest messages on a machine that pauses for ten seconds.
fn impatient() -> ConnectionTimeouts {
    ConnectionTimeouts {
        silent: Duration::from_secs(12),
        stalled: Duration::from_secs(12),
        min_bytes_per_second: 64 << 20,
        ..ConnectionTimeouts::default()
    }
}

fn small_budget() -> Limits {
    Limits { max_bytes_in_flight: 8 << 20, ..limits(HIDDEN, MAX_TOKENS) }
}

fn framed(request: &ForwardRequest) -> Bytes {
    let encoded = request.encode_to_vec();
    [&prefix(encoded.len())[..], &encoded].concat().into()
}

#[tokio::test]
async fn garbage_on_the_port_does_not_affect_others() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    // Connections do not end because they make no call.
    let timeouts = ConnectionTimeouts { silent: 10 * PATIENCE, ..ConnectionTimeouts::default() };
    let service = Service::start_with(&fake, timeouts).await;
    let client = service.client().await;
    let mut rng = expertd_test_seed::rng();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for round in 0..40 {
        let length = rng.random_range(1..4000);
        let mut garbage = random_rows(length).to_vec();
        match round % 4 {
            0 => {}
            1 => garbage = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            // A valid preface, then garbage in place of frames.
            2 => garbage = [&preface[..], &garbage].concat(),
            // A valid preface and empty settings, then garbage.
            _ => garbage = [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0], &garbage].concat(),
        }
        let send = async {
            if round % 2 == 0 {
                let mut socket = TcpStream::connect(&service.tcp).await?;
                socket.write_all(&garbage).await?;
                socket.shutdown().await?;
                socket.read_to_end(&mut Vec::new()).await
            } else {
                let mut socket = UnixStream::connect(service.unix.trim_start_matches("unix:")).await?;
                socket.write_all(&garbage).await?;
                socket.shutdown().await?;
                socket.read_to_end(&mut Vec::new()).await
            }
        };
        // The connection must end, with or without an error.
        let _ = tokio::time::timeout(PATIENCE, send).await.expect("the server must close the connection");
        let good = request(backend::ECHO, 2, HIDDEN);
        assert_eq!(client.forward(good.clone(), None).await.unwrap().rows, rows_of(&good));
    }
}

#[tokio::test]
async fn broken_calls_end_with_their_own_status() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let service = Service::start(&fake).await;
    let channel = service.channel().await;
    let good = framed(&request(backend::ECHO, 1, HIDDEN));

    for cut in [0, 1, 4, 5, 6, good.len() - 1] {
        let status = raw_status(channel.clone(), FORWARD, good.slice(..cut)).await;
        // An empty body contains no message.
        let expected = if cut == 0 { Code::Internal } else { Code::InvalidArgument };
        assert_eq!(status.code(), expected, "cut at {cut}: {status:?}");
    }
    let twice = [&good[..], &good].concat();
    assert_eq!(raw_status(channel.clone(), FORWARD, twice.into()).await.code(), Code::InvalidArgument);
    let trailing = [&good[..], &[0, 0]].concat();
    assert_eq!(raw_status(channel.clone(), FORWARD, trailing.into()).await.code(), Code::InvalidArgument);

    // The message is refused because of its prefix, before any of its bytes is sent.
    let limit = small_budget().max_message_bytes;
    for length in [limit + 1, u32::MAX as usize] {
        let never_ends =
            http_body_util::StreamBody::new(futures_util::stream::unfold(Some(length), |first| async move {
                match first {
                    Some(length) => {
                        Some((Ok::<_, tonic::Status>(http_body::Frame::data(prefix(length))), None))
                    }
                    None => std::future::pending().await,
                }
            }));
        let call = raw_call(FORWARD, tonic::body::Body::new(never_ends));
        let response = channel.clone().oneshot(call).await.unwrap();
        let status = tonic::Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(&limit.to_string()), "{status:?}");
    }
    // The largest legal request is accepted.
    let largest = request(backend::ECHO, MAX_TOKENS, HIDDEN);
    assert_eq!(service.client().await.forward(largest.clone(), None).await.unwrap().rows, rows_of(&largest));

    let compressed = [&[1u8][..], &good[1..]].concat();
    assert_ne!(raw_status(channel.clone(), FORWARD, compressed.into()).await.code(), Code::Ok);
    for path in ["/expertd.v1.Moe/Nothing", "/nothing/here", "/expertd.v1.Admin/Drain"] {
        assert_eq!(
            raw_status(channel.clone(), path, good.clone()).await.code(),
            Code::Unimplemented,
            "{path}"
        );
    }
    let mut bad_timeout = raw_call(FORWARD, tonic::body::Body::empty());
    bad_timeout.headers_mut().insert("grpc-timeout", "12y".parse().unwrap());
    let mut sending = h2_call(&service, bad_timeout).await;
    let status = tonic::Status::from_header_map(sending.headers()).unwrap();
    assert_eq!(status.code(), Code::InvalidArgument);
    let _ = sending.body_mut().collect().await;
}

async fn h2_call(
    service: &Service,
    call: http::Request<tonic::body::Body>,
) -> http::Response<tonic::body::Body> {
    service.channel().await.oneshot(call).await.unwrap()
}

#[tokio::test]
async fn slow_readers_hold_bounded_memory_and_are_disconnected() {
    let fake = Fake::new(HIDDEN, small_budget());
    let service = Service::start_with(&fake, impatient()).await;
    let slow = endpoint(&service.tcp)
        .unwrap()
        .initial_stream_window_size(1024)
        .initial_connection_window_size(65_535)
        .connect()
        .await
        .unwrap();
    // The answers of these calls, 1 MiB each, are never read.
    let largest = framed(&request(backend::ECHO, MAX_TOKENS, HIDDEN));
    let calls: Vec<_> = (0..40)
        .map(|_| {
            let body = tonic::body::Body::new(
                http_body_util::Full::new(largest.clone()).map_err(|never| match never {}),
            );
            tokio::spawn(slow.clone().oneshot(raw_call(FORWARD, body)))
        })
        .collect();

    // Another connection is served meanwhile.
    let client = service.client().await;
    for _ in 0..20 {
        let good = request(backend::ECHO, 16, HIDDEN);
        assert_eq!(client.forward(good.clone(), None).await.unwrap().rows, rows_of(&good));
    }
    let slow_bytes = fake.submitted_bytes.load(Ordering::SeqCst) - 20 * 16 * HIDDEN * 4;
    assert!(
        slow_bytes <= 4 << 20,
        "the service holds {slow_bytes} bytes of one connection that reads nothing"
    );

    let mut refused = 0;
    let mut unread = Vec::new();
    for call in calls {
        match call.await.unwrap() {
            Ok(response) => match tonic::Status::from_header_map(response.headers()) {
                Some(status) => {
                    assert_eq!(status.code(), Code::ResourceExhausted);
                    assert!(expertd_proto::retry_delay(&status).is_some());
                    refused += 1;
                }
                None => unread.push(response),
            },
            // The connection has already been closed.
            Err(_) => refused += 1,
        }
    }
    assert!(refused >= 36, "only {refused} of 40 calls were refused");
    // The connection is closed although nothing is read, and what it held is released.
    assert!(!unread.is_empty());
    pass(impatient().stalled + Duration::from_secs(3)).await;
    for response in unread {
        let body = tokio::time::timeout(PATIENCE, response.into_body().collect()).await;
        assert!(body.expect("the connection must be closed").is_err());
    }
    let all = request(backend::ECHO, MAX_TOKENS, HIDDEN);
    for _ in 0..8 {
        client.forward(all.clone(), None).await.unwrap();
    }
}

#[tokio::test]
async fn slow_writers_hold_bounded_memory_and_are_disconnected() {
    let fake = Fake::new(HIDDEN, small_budget());
    let service = Service::start_with(&fake, impatient()).await;
    let slow = service.channel().await;
    let length = 1 << 20;
    let calls: Vec<_> = (0..16)
        .map(|_| {
            let body =
                http_body_util::StreamBody::new(futures_util::stream::unfold(0, move |at| async move {
                    match at {
                        0 => Some((Ok::<_, tonic::Status>(http_body::Frame::data(prefix(length))), 1)),
                        1 => Some((Ok(http_body::Frame::data(Bytes::from_static(b"x"))), 2)),
                        _ => std::future::pending().await,
                    }
                }));
            tokio::spawn(slow.clone().oneshot(raw_call(FORWARD, tonic::body::Body::new(body))))
        })
        .collect();
    pass(Duration::from_millis(160)).await;
    let client = service.client().await;
    for _ in 0..20 {
        let good = request(backend::ECHO, 16, HIDDEN);
        assert_eq!(client.forward(good.clone(), None).await.unwrap().rows, rows_of(&good));
    }
    for call in calls {
        let ended = tokio::time::timeout(PATIENCE, call).await.expect("stalled calls must be ended");
        if let Ok(response) = ended.unwrap() {
            let status = tonic::Status::from_header_map(response.headers()).unwrap();
            assert_ne!(status.code(), Code::Ok);
        }
    }
}

#[tokio::test]
async fn a_message_without_room_ends_its_stream_after_the_answers() {
    let fake = Fake::new(HIDDEN, Limits { max_bytes_in_flight: 3 << 20, ..limits(HIDDEN, MAX_TOKENS) });
    let service = Service::start(&fake).await;
    let client = service.client().await;
    let (sender, mut receiver) = client.stream(16).await.unwrap();
    // One caller may hold half of 3 MiB: one such message.
    for id in 0..2 {
        sender.send(id, request(backend::HOLD, MAX_TOKENS, HIDDEN), None).await.unwrap();
    }
    eventually("one request is held", || fake.held() == 1).await;
    // The message that waits for room is refused, and gives back what it held.
    pass(Duration::from_secs(1)).await;
    assert_eq!(fake.held(), 1);
    fake.release();
    let (id, answer) = receiver.next().await.unwrap().unwrap();
    assert!(id == 0 && answer.is_ok());
    let status = receiver.next().await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(expertd_proto::retry_delay(&status).is_some());
    let (sender, mut receiver) = client.stream(16).await.unwrap();
    sender.send(9, request(backend::ECHO, MAX_TOKENS, HIDDEN), None).await.unwrap();
    assert!(receiver.next().await.unwrap().unwrap().1.is_ok());
}

#[tokio::test]
async fn silent_connections_and_those_above_the_limit_are_closed() {
    let fake = Fake::new(HIDDEN, Limits { max_connections: 3, ..limits(HIDDEN, MAX_TOKENS) });
    let service = Service::start_with(&fake, impatient()).await;
    let mut silent = Vec::new();
    for _ in 0..3 {
        silent.push(TcpStream::connect(&service.tcp).await.unwrap());
    }
    let mut above = TcpStream::connect(&service.tcp).await.unwrap();
    let read = tokio::time::timeout(PATIENCE, above.read(&mut [0; 16])).await;
    assert!(matches!(read.expect("the connection must be closed at once"), Ok(0) | Err(_)));
    for mut socket in silent {
        let read = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
        read.expect("silent connections must be closed").ok();
    }
    // Closed connections no longer count towards the limit.
    service.client().await.forward(request(backend::ECHO, 1, HIDDEN), None).await.unwrap();
}

#[tokio::test]
async fn a_caller_that_disconnects_cancels_its_request() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let service = Service::start(&fake).await;
    let client = service.client().await;
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.forward(request(backend::HOLD, 1, HIDDEN), None).await }
    });
    eventually("the request is held", || fake.wanted() == 1).await;
    call.abort();
    eventually("the request is cancelled", || fake.wanted() == 0).await;

    // Closing the whole connection has the same effect.
    let other = service.client().await;
    let call = tokio::spawn(async move { other.forward(request(backend::HOLD, 1, HIDDEN), None).await });
    eventually("the request is held", || fake.wanted() == 1).await;
    call.abort();
    drop(call);
    eventually("the request is cancelled", || fake.wanted() == 0).await;
}

#[tokio::test]
async fn many_connections_at_once_get_their_own_answers() {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, MAX_TOKENS));
    let service = Arc::new(Service::start(&fake).await);
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let service = Arc::clone(&service);
            tokio::spawn(async move {
                let address = if task % 2 == 0 { service.tcp.clone() } else { service.unix.clone() };
                let client = expertd_client::Client::connect(&address).await.unwrap();
                for _ in 0..20 {
                    let tokens = expertd_test_seed::rng().random_range(1..=MAX_TOKENS / 4);
                    let good = request(backend::ECHO, tokens, HIDDEN);
                    assert_eq!(client.forward(good.clone(), None).await.unwrap().rows, rows_of(&good));
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}
