//! Statuses that the transport makes when a connection is lost.

use std::error::Error;
use std::io::{self, ErrorKind};

use tonic::{Code, Status};

/// Converts the status of a lost connection to UNAVAILABLE: one that broke during a call, or that closed before the
/// service took the call.
///
/// The transport reports these as UNKNOWN, CANCELLED or, for a call that meets the closing frame (GOAWAY) of its
/// connection, as INTERNAL, with its own error as the source; a status from the service has no source. The computation
/// is pure, so a retry is as safe as after any other UNAVAILABLE.
#[must_use]
pub fn connection_loss(status: Status) -> Status {
    if is_connection_loss(&status) && status.code() != Code::Unavailable {
        Status::unavailable(format!("the connection broke: {}", status.message()))
    } else {
        status
    }
}

/// What may be wrong with an address if its first call ends with this status, which the transport and not the service made.
#[must_use]
pub fn address_hint(status: &Status) -> &'static str {
    let Some(source) = status.source() else { return "" };
    if causes(source).any(says_that_nothing_answers) {
        return "";
    }
    "; the address accepts connections but did not answer as gRPC: is it the public address (`serve --listen`), and does it need \
     TLS (--tls-ca)?"
}

/// The status with [`address_hint`] behind its message.
#[must_use]
pub fn with_address_hint(status: Status) -> Status {
    match address_hint(&status) {
        "" => status,
        hint => Status::new(status.code(), format!("{}{hint}", status.message())),
    }
}

/// Whether the error says that no process listens at the address, or that none answers in time.
fn says_that_nothing_answers(error: &(dyn Error + 'static)) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    error.is::<tonic::TimeoutExpired>()
        || matches!(kind, Some(ErrorKind::ConnectionRefused | ErrorKind::NotFound | ErrorKind::TimedOut))
}

/// Whether the status says that the connection could not be made, or was lost before the answer.
pub(crate) fn is_connection_loss(status: &Status) -> bool {
    status.source().is_some_and(|source| match status.code() {
        Code::Unknown | Code::Unavailable => true,
        Code::Cancelled => !causes(source).any(|error| error.is::<tonic::TimeoutExpired>()),
        _ => causes(source).filter_map(|error| error.downcast_ref::<h2::Error>()).any(ends_connection),
    })
}

/// Whether the error ends a connection, and not one call only.
fn ends_connection(error: &h2::Error) -> bool {
    error.is_go_away() || error.is_io()
}

/// The error and its causes, the outermost first.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    let mut next = Some(error);
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}

#[cfg(test)]
mod tests {
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
}
