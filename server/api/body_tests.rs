//! Request bodies cut into chunks at random places.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use proptest::prelude::*;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::super::budget::{Budget, Connection};
use super::{Arrival, Charges, RequestBody, ResponseBody, Terms, charged_bytes};
use crate::scheduler::ClientKey;

const LIMIT: usize = 300;

struct Chunks(VecDeque<Bytes>);

impl Body for Chunks {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.pop_front().map(|chunk| Ok(Frame::data(chunk))))
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(message.len() as u32);
    bytes.put_slice(message);
    bytes.to_vec()
}

fn cut(mut bytes: Bytes, sizes: &[usize]) -> Chunks {
    let mut chunks = VecDeque::new();
    for size in sizes.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        chunks.push_back(bytes.split_to((*size).min(bytes.len())));
    }
    Chunks(chunks)
}

fn terms(budget: &Arc<Budget>, streaming: bool) -> Terms {
    let connection = Connection::new(ClientKey(1), CancellationToken::new());
    Terms { budget: Arc::clone(budget), connection, limit: LIMIT, streaming }
}

async fn read(body: RequestBody<Chunks>) -> Result<Bytes, Status> {
    match body.collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => Err(Status::from_error(error)),
    }
}

/// Messages that start with an id field, some above the limit.
fn messages() -> impl Strategy<Value = Vec<(u64, usize)>> {
    prop::collection::vec((any::<u64>(), prop_oneof![0usize..40, LIMIT - 20..LIMIT + 60]), 0..12)
}

fn message(id: u64, extra: usize) -> (Vec<u8>, Vec<u8>) {
    let mut field = Vec::new();
    if id != 0 {
        field.push(0x08);
        prost::encoding::encode_varint(id, &mut field);
    }
    let mut whole = field.clone();
    // Field 2, as in the protocol, so that it cannot be taken for an id.
    whole.resize(field.len() + extra, 0x12);
    (field, whole)
}

proptest! {
    #[test]
    fn messages_pass_whole_and_large_ones_leave_their_id(
        messages in messages(),
        sizes in prop::collection::vec(1usize..400, 1..8),
    ) {
        let mut sent = Vec::new();
        let mut expected = Vec::new();
        let mut refused = Vec::new();
        for (id, extra) in messages {
            let (field, whole) = message(id, extra);
            let too_large = whole.len() > LIMIT;
            sent.extend(framed(&whole));
            expected.extend(framed(if too_large { &field } else { &whole }));
            refused.push(too_large);
        }
        let budget = Budget::new(1 << 20, LIMIT);
        let charges = Arc::new(Charges::default());
        let body = RequestBody::new(cut(sent.into(), &sizes), terms(&budget, true), Arc::clone(&charges));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let passed = runtime.block_on(read(body)).expect("the body is in order");
        prop_assert_eq!(&passed[..], &expected[..]);
        for too_large in refused {
            match charges.next_arrival() {
                Some(Arrival::Refused(status)) => {
                    prop_assert!(too_large);
                    prop_assert_eq!(status.code(), Code::InvalidArgument);
                }
                Some(Arrival::Charged(_)) => prop_assert!(!too_large),
                None => prop_assert!(false, "a message left no trace"),
            }
        }
        prop_assert!(charges.next_arrival().is_none());
        prop_assert_eq!(budget.held(), 0, "charges come back");
    }

    #[test]
    fn a_body_that_ends_early_says_so(
        extra in 1usize..LIMIT + 60,
        sizes in prop::collection::vec(1usize..400, 1..8),
        at in any::<prop::sample::Index>(),
    ) {
        let whole = framed(&message(77, extra).1);
        let cut_at = 1 + at.index(whole.len() - 1);
        let budget = Budget::new(1 << 20, LIMIT);
        let charges = Arc::new(Charges::default());
        let chunks = cut(Bytes::from(whole).slice(..cut_at), &sizes);
        let body = RequestBody::new(chunks, terms(&budget, true), Arc::clone(&charges));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let status = runtime.block_on(read(body)).expect_err("it is incomplete");
        prop_assert_eq!(status.code(), Code::InvalidArgument);
        prop_assert!(status.message().contains("missing"), "{}", status.message());
        drop(charges);
        prop_assert_eq!(budget.held(), 0);
    }
}

#[tokio::test]
async fn messages_reach_the_decoder_without_a_copy() {
    let whole = Bytes::from(framed(&message(9, 200).1));
    let range = whole.as_ptr() as usize..whole.as_ptr() as usize + whole.len();
    let budget = Budget::new(1 << 20, LIMIT);
    let mut body = RequestBody::new(Chunks([whole].into()), terms(&budget, false), Arc::default());
    let frame = body.frame().await.expect("a frame").expect("no error").into_data().expect("data");
    assert!(range.contains(&(frame.as_ptr() as usize)));
}

#[tokio::test]
async fn without_room_a_unary_call_ends_and_a_stream_goes_on() {
    let budget = Budget::new(2 * (LIMIT + 1024), LIMIT);
    let other = Connection::new(ClientKey(2), CancellationToken::new());
    let third = Connection::new(ClientKey(3), CancellationToken::new());
    let held = [budget.try_charge(&other, LIMIT), budget.try_charge(&third, LIMIT)];
    assert!(held.iter().all(Option::is_some));

    let (field, whole) = message(1 << 40, 250);
    let bytes = Bytes::from(framed(&whole));
    let unary = RequestBody::new(cut(bytes.clone(), &[7]), terms(&budget, false), Arc::default());
    let status = read(unary).await.expect_err("there is no room");
    assert_eq!(status.code(), Code::ResourceExhausted);

    let charges = Arc::new(Charges::default());
    let stream = RequestBody::new(cut(bytes, &[7]), terms(&budget, true), Arc::clone(&charges));
    assert_eq!(read(stream).await.expect("the stream goes on")[..], framed(&field)[..]);
    assert!(
        matches!(charges.next_arrival(), Some(Arrival::Refused(status)) if status.code() == Code::ResourceExhausted)
    );
}

#[test]
fn a_charge_lives_as_long_as_any_slice() {
    let budget = Budget::new(1 << 20, LIMIT);
    let connection = Connection::new(ClientKey(1), CancellationToken::new());
    let ticket = budget.try_charge(&connection, 100).expect("there is room");
    let bytes = charged_bytes(Bytes::from_static(b"rows"), ticket);
    let slice = bytes.slice(1..2);
    drop(bytes);
    assert!(budget.held() > 0);
    assert_eq!(&slice[..], b"o");
    drop(slice);
    assert_eq!(budget.held(), 0);
}

#[tokio::test]
async fn rows_sent_apart_make_the_message_that_encoding_would() {
    use expertd_proto::v1::{ForwardResponse, Receipt};
    use prost::Message as _;

    let receipt =
        Receipt { steps: vec![4], generation: 5, tokens_per_rank: vec![6, 7], ..Receipt::default() };
    for length in [1, 127, 128, 70_000] {
        let rows: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
        let rows = Bytes::from(rows);
        let whole = ForwardResponse { rows: rows.clone(), receipt: Some(receipt.clone()) };
        let without = ForwardResponse { rows: Bytes::new(), receipt: Some(receipt.clone()) };
        let inner = Chunks([Bytes::from(framed(&without.encode_to_vec()))].into());
        let charges = Arc::new(Charges::default());
        charges.send_apart(rows.clone());
        let mut body = ResponseBody::charged(tonic::body::Body::new(inner), charges);
        let mut sent = Vec::new();
        let mut uncopied = false;
        while let Some(frame) = body.frame().await {
            let data = frame.expect("no error").into_data().expect("data");
            uncopied |= data.as_ptr() == rows.as_ptr();
            sent.extend_from_slice(&data);
        }
        assert_eq!(sent, framed(&whole.encode_to_vec()));
        assert!(uncopied);
    }
}
