//! Response bodies. Their bytes keep the charges of their answers until they are written to the socket, and large rows are
//! sent without a copy.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use prost::encoding::{decode_varint, encode_varint, encoded_len_varint};
use tonic::Status;

use super::body::PREFIX;
use super::budget::Ticket;
use super::charges::{Charges, Leaving, charged_bytes};
use super::connection::Stage;

/// Rows of at least this size are sent without a copy into the encoded answer.
const APART_BYTES: usize = 64 << 10;

/// Field 1 of a `ForwardStreamResponse`, a varint.
const ID_KEY: u8 = 0x08;
/// Field 2 of a `ForwardStreamResponse`, length-delimited.
const RESPONSE_KEY: u8 = 0x12;
/// Field 1 of a `ForwardResponse`, length-delimited.
const ROWS_KEY: u8 = 0x0a;
/// Longest varint, in bytes.
const VARINT: usize = 10;

/// Takes rows of at least [`APART_BYTES`] out of an answer, so that they are sent without a copy.
pub(in crate::api) fn take_large(rows: &mut Bytes) -> Option<Bytes> {
    (rows.len() >= APART_BYTES).then(|| std::mem::take(rows))
}

/// A response body whose bytes keep the charges of their answers until they are written to the socket.
pub(in crate::api) struct ResponseBody {
    inner: tonic::body::Body,
    charges: Option<Arc<Charges>>,
    /// Charge of the call, until its last byte is sent.
    _call: Option<Ticket>,
    /// Whether messages are those of a `ForwardStream`.
    streaming: bool,
    /// Encoded bytes that are sent first.
    queue: VecDeque<Bytes>,
}

impl ResponseBody {
    pub(in crate::api) fn charged(
        inner: tonic::body::Body,
        charges: Arc<Charges>,
        call: Option<Ticket>,
        streaming: bool,
    ) -> ResponseBody {
        ResponseBody { inner, charges: Some(charges), _call: call, streaming, queue: VecDeque::new() }
    }

    pub(in crate::api) fn plain(inner: tonic::body::Body, call: Option<Ticket>) -> ResponseBody {
        ResponseBody { inner, charges: None, _call: call, streaming: false, queue: VecDeque::new() }
    }

    /// Attaches charges to encoded messages, and inserts rows that were taken out of them.
    fn leave(&mut self, mut encoded: Bytes) -> Bytes {
        let Some(charges) = &self.charges else { return encoded };
        let leaving = charges.take_leaving();
        if leaving.iter().all(|answer| answer.rows.is_none() && answer.message.is_none()) {
            return leaving.into_iter().filter_map(|answer| answer.ticket).fold(encoded, hold);
        }
        for Leaving { ticket, rows, message: whole } in leaving {
            let message = first_message(&mut encoded);
            let mut held = |bytes: Bytes| {
                self.queue.push_back(match &ticket {
                    Some(ticket) => hold(bytes, ticket.clone()),
                    None => bytes,
                });
            };
            match (rows, whole) {
                (None, None) => held(message),
                (None, Some(whole)) => {
                    held(prefix(whole.len()));
                    held(whole);
                }
                (Some(rows), _) => {
                    let (head, rest) = around(message.slice(PREFIX..), rows.len(), self.streaming);
                    held(head);
                    held(rows);
                    held(rest);
                }
            }
        }
        self.queue.push_back(encoded);
        self.queue.retain(|bytes| !bytes.is_empty());
        self.queue.pop_front().unwrap_or_default()
    }
}

/// The prefix of a message of `length` bytes: not compressed, and its length.
fn prefix(length: usize) -> Bytes {
    let mut prefix = BytesMut::with_capacity(PREFIX);
    prefix.put_u8(0);
    prefix.put_u32(length as u32);
    prefix.freeze()
}

fn hold(bytes: Bytes, ticket: Ticket) -> Bytes {
    ticket.enter(Stage::Leaving);
    charged_bytes(bytes, ticket)
}

/// Splits the first message, prefix included, off encoded messages.
fn first_message(encoded: &mut Bytes) -> Bytes {
    let length = encoded.get(1..PREFIX).map_or(0, |mut length| length.get_u32() as usize);
    encoded.split_to((PREFIX + length).min(encoded.len()))
}

/// Returns the bytes before and after the rows in a message, prefix included. `message` lacks the rows, which are the first
/// field of an answer.
fn around(mut message: Bytes, rows: usize, streaming: bool) -> (Bytes, Bytes) {
    let id = if streaming { take_id(&mut message) } else { Bytes::new() };
    let answer = 1 + encoded_len_varint(rows as u64) + rows + message.len();
    let mut head = BytesMut::with_capacity(PREFIX + id.len() + 2 * (1 + VARINT));
    head.put_u8(0);
    if streaming {
        head.put_u32((id.len() + 1 + encoded_len_varint(answer as u64) + answer) as u32);
        head.put_slice(&id);
        head.put_u8(RESPONSE_KEY);
        encode_varint(answer as u64, &mut head);
    } else {
        head.put_u32(answer as u32);
    }
    head.put_u8(ROWS_KEY);
    encode_varint(rows as u64, &mut head);
    (head.freeze(), message)
}

/// Removes the id (absent if 0) and the answer's key and length from an encoded `ForwardStreamResponse`. Returns the id's
/// field.
fn take_id(message: &mut Bytes) -> Bytes {
    let whole = message.clone();
    if message.first() == Some(&ID_KEY) {
        message.advance(1);
        let _ = decode_varint(message);
    }
    let id = whole.slice(..whole.len() - message.len());
    if message.first() == Some(&RESPONSE_KEY) {
        message.advance(1);
        let _ = decode_varint(message);
    }
    id
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some(bytes) = this.queue.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(|encoded| this.leave(encoded)))))
    }

    fn is_end_stream(&self) -> bool {
        self.queue.is_empty() && self.inner.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use expertd_proto::v1::forward_stream_response::Result as Outcome;
    use expertd_proto::v1::{ForwardResponse, ForwardStreamResponse, Receipt, RequestStatus};
    use http_body_util::{BodyExt as _, Full};
    use prost::Message;
    use tokio_util::sync::CancellationToken;

    use super::super::budget::Budget;
    use super::super::connection::Connection;
    use super::*;
    use crate::backend::ClientKey;

    fn framed(message: &impl Message) -> Vec<u8> {
        let message = message.encode_to_vec();
        [&[0], &(message.len() as u32).to_be_bytes()[..], &message].concat()
    }

    fn rows(bytes: usize) -> Bytes {
        (0..bytes).map(|at| (at * 7) as u8).collect()
    }

    fn answer(rows: Bytes) -> ForwardResponse {
        let receipt =
            Receipt { steps: vec![4], generation: 5, tokens_per_rank: vec![6, 7], ..Receipt::default() };
        ForwardResponse { rows, receipt: Some(receipt) }
    }

    /// The bytes sent, and the addresses of their frames.
    async fn send(encoded: Vec<u8>, charges: Arc<Charges>, streaming: bool) -> (Vec<u8>, Vec<*const u8>) {
        let inner = tonic::body::Body::new(Full::new(Bytes::from(encoded)));
        let mut body = ResponseBody::charged(inner, charges, None, streaming);
        let (mut sent, mut addresses) = (Vec::new(), Vec::new());
        while let Some(frame) = body.frame().await {
            let data = frame.expect("no error").into_data().expect("data");
            assert!(!data.is_empty());
            addresses.push(data.as_ptr());
            sent.extend_from_slice(&data);
        }
        assert!(body.is_end_stream());
        (sent, addresses)
    }

    #[tokio::test]
    async fn rows_sent_apart_make_the_message_that_encoding_would() {
        for length in [1, 127, 128, 70_000] {
            let rows = rows(length);
            let charges = Arc::new(Charges::default());
            charges.leave(Leaving { rows: Some(rows.clone()), ..Leaving::default() });
            let (sent, frames) = send(framed(&answer(Bytes::new())), charges, false).await;
            assert_eq!(sent, framed(&answer(rows.clone())));
            assert!(frames.contains(&rows.as_ptr()));
        }
    }

    #[tokio::test]
    async fn an_encoded_message_is_sent_without_a_copy() {
        let message = Bytes::from(answer(rows(300)).encode_to_vec());
        let charges = Arc::new(Charges::default());
        charges.leave(Leaving { message: Some(message.clone()), ..Leaving::default() });
        let (sent, frames) = send(framed(&ForwardResponse::default()), charges, false).await;
        assert_eq!(sent, framed(&answer(rows(300))));
        assert!(frames.contains(&message.as_ptr()));
    }

    #[tokio::test]
    async fn on_a_stream_each_answer_gets_its_own_rows_and_keeps_its_charge() {
        let budget = Budget::new(1 << 20, 1 << 10);
        let connection = Connection::new(ClientKey(1), Arc::default(), CancellationToken::new());
        let charges = Arc::new(Charges::default());
        let (mut encoded, mut expected, mut apart) = (Vec::new(), Vec::new(), Vec::new());
        let mut leave = |id: u64, length: Option<usize>, large: bool| {
            let ticket = budget.try_message(&connection, &connection.peer, 100).expect("there is room");
            let message = |rows: Bytes| {
                let result = match length {
                    Some(_) => Outcome::Response(answer(rows)),
                    None => Outcome::Status(RequestStatus { code: 3, ..RequestStatus::default() }),
                };
                ForwardStreamResponse { id, result: Some(result) }
            };
            let rows = rows(length.unwrap_or_default());
            expected.extend(framed(&message(rows.clone())));
            encoded.extend(framed(&message(if large { Bytes::new() } else { rows.clone() })));
            apart.extend(large.then(|| rows.as_ptr()));
            charges.leave(Leaving { ticket: Some(ticket), rows: large.then_some(rows), message: None });
        };
        leave(0, Some(90_000), true);
        leave(1 << 40, Some(50), false);
        leave(2, None, false);
        leave(3, Some(1), true);
        leave(300, Some(1 << 21), true);
        leave(4, Some(0), false);
        assert!(budget.held() > 0);
        let (sent, frames) = send(encoded, charges, true).await;
        assert!(sent == expected);
        assert!(apart.iter().all(|rows| frames.contains(rows)), "large rows are not copied");
        assert_eq!(budget.held(), 0);
    }
}
