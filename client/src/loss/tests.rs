//! Tests of `loss`.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::client::send_once;
use crate::transport;
use expertd_proto::v1::ForwardRequest;
use expertd_proto::v1::moe_client::MoeClient;

#[test]
fn a_broken_connection_is_unavailable_but_a_service_status_stays() {
    let broken = Status::from_error(Box::new(std::io::Error::from(std::io::ErrorKind::Other)));
    assert_eq!(broken.code(), Code::Unknown);
    assert_eq!(connection_loss(broken).code(), Code::Unavailable);
    assert_eq!(connection_loss(Status::unknown("the service says so")).code(), Code::Unknown);
    assert_eq!(connection_loss(Status::internal("bug")).code(), Code::Internal);
}

#[test]
fn a_call_refused_by_a_closing_connection_is_unavailable_but_a_timeout_is_not() {
    #[derive(Debug, thiserror::Error)]
    #[error("the transport")]
    struct Transport(#[source] Status);

    let untaken = Status::from_error(Box::new(Transport(Status::cancelled("closing"))));
    assert_eq!(untaken.code(), Code::Cancelled);
    assert_eq!(connection_loss(untaken).code(), Code::Unavailable);
    let late = Status::from_error(Box::new(tonic::TimeoutExpired(())));
    assert_eq!(connection_loss(late).code(), Code::Cancelled);
    assert_eq!(connection_loss(Status::cancelled("the service says so")).code(), Code::Cancelled);
}

const SETTINGS: u8 = 4;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const INTERNAL_ERROR: u32 = 2;

fn frame(kind: u8, stream: u32, payload: &[u32]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len() * 4).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, 0]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload.iter().flat_map(|word| word.to_be_bytes()));
    frame
}

/// An HTTP/2 server that sends `answer` when the first call arrives, and keeps the connection open.
async fn answer_with(mut stream: TcpStream, answer: Vec<u8>) {
    stream.write_all(&frame(SETTINGS, 0, &[])).await.unwrap();
    stream.read_exact(&mut [0; 24]).await.unwrap();
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header).await.unwrap();
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        stream.read_exact(&mut vec![0; length as usize]).await.unwrap();
        if header[3] == HEADERS {
            break;
        }
    }
    stream.write_all(&answer).await.unwrap();
    std::future::pending().await
}

async fn status_of_call(answer: Vec<u8>) -> Status {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        answer_with(stream, answer).await;
    });
    let moe = MoeClient::new(transport::connect(&address).await.unwrap());
    let call = send_once(moe, ForwardRequest::default(), Some(Duration::from_secs(60)));
    let status = call.await.unwrap_err();
    server.abort();
    status
}

#[tokio::test]
async fn an_address_that_does_not_speak_grpc_gets_a_hint() {
    // A TLS alert, and an answer in HTTP/1.
    for garbage in [&b"\x15\x03\x03\x00\x02\x02\x16"[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(garbage).await.unwrap();
            // Closing with unread bytes would reset the connection before the client has read the answer.
            stream.read_to_end(&mut Vec::new()).await
        });
        let moe = MoeClient::new(transport::connect(&address).await.unwrap());
        let call = send_once(moe, ForwardRequest::default(), Some(Duration::from_secs(60)));
        let status = call.await.unwrap_err();
        assert!(address_hint(&status).contains("--tls-ca"), "{status:?}");
        server.abort();
    }
    assert_eq!(address_hint(&Status::internal("of the service")), "");
    let refused = Status::from_error(Box::new(io::Error::from(ErrorKind::ConnectionRefused)));
    assert_eq!(address_hint(&refused), "");
}

#[tokio::test]
async fn a_call_that_a_closing_connection_did_not_take_is_unavailable() {
    // No stream was processed, and no error occurred: the end of a drain.
    let status = status_of_call(frame(GOAWAY, 0, &[0, 0])).await;
    assert_eq!(status.code(), Code::Internal, "the transport reports it so: {status:?}");
    assert!(is_connection_loss(&status));
    assert_eq!(connection_loss(status).code(), Code::Unavailable);
}

#[tokio::test]
async fn a_call_that_the_service_reset_is_no_lost_connection() {
    let status = status_of_call(frame(RST_STREAM, 1, &[INTERNAL_ERROR])).await;
    assert_eq!(connection_loss(status).code(), Code::Internal);
}
