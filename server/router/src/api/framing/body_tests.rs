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

use super::super::budget::{Budget, MESSAGE_BYTES};
use super::super::chunks::{Chunks, terms};
use super::super::connection::Connection;
use super::{Arrival, Charges, RequestBody};
use crate::api::framing::charges::charged_bytes;
use crate::backend::ClientKey;

const LIMIT: usize = 300;

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
        let body = RequestBody::new(cut(sent.into(), &sizes), terms(&budget, LIMIT, true), Arc::clone(&charges));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let passed = runtime.block_on(read(body)).expect("the body is in order");
        prop_assert_eq!(&passed[..], &expected[..]);
        for too_large in refused {
            match charges.next_arrival() {
                Some(Arrival::Refused(status)) => {
                    prop_assert!(too_large);
                    prop_assert_eq!(status.code(), Code::InvalidArgument);
                }
                Some(Arrival::Charged(..)) => prop_assert!(!too_large),
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
        let body = RequestBody::new(chunks, terms(&budget, LIMIT, true), Arc::clone(&charges));
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
    let mut body = RequestBody::new(Chunks([whole].into()), terms(&budget, LIMIT, false), Arc::default());
    let frame = body.frame().await.expect("a frame").expect("no error").into_data().expect("data");
    assert!(range.contains(&(frame.as_ptr() as usize)));
}

#[tokio::test]
async fn without_room_a_unary_call_ends_and_a_stream_goes_on() {
    let budget = Budget::new(1, LIMIT);
    let other = Connection::new(ClientKey(2), Arc::default(), CancellationToken::new());
    let held = budget.try_message(&other, &other.peer, LIMIT).expect("there is room");
    // Room for a message's place and a part of its bytes.
    held.try_grow(budget.total() - budget.held() - MESSAGE_BYTES - 100).expect("there is room");

    let (field, whole) = message(1 << 40, 250);
    let bytes = Bytes::from(framed(&whole));
    let unary = RequestBody::new(cut(bytes.clone(), &[7]), terms(&budget, LIMIT, false), Arc::default());
    let status = read(unary).await.expect_err("there is no room");
    assert_eq!(status.code(), Code::ResourceExhausted);

    let charges = Arc::new(Charges::default());
    let stream = RequestBody::new(cut(bytes, &[7]), terms(&budget, LIMIT, true), Arc::clone(&charges));
    assert_eq!(read(stream).await.expect("the stream goes on")[..], framed(&field)[..]);
    assert!(
        matches!(charges.next_arrival(), Some(Arrival::Refused(status)) if status.code() == Code::ResourceExhausted)
    );
}

/// The bytes that a message announces are not charged before they are there.
#[tokio::test]
async fn a_prefix_alone_costs_next_to_nothing() {
    struct Open(Option<Bytes>);
    impl Body for Open {
        type Data = Bytes;
        type Error = Status;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.take().map_or(Poll::Pending, |bytes| Poll::Ready(Some(Ok(Frame::data(bytes)))))
        }
    }
    let budget = Budget::new(1 << 20, 1 << 18);
    let terms = terms(&budget, 1 << 18, false);
    let prefix = Bytes::from_static(&[0, 0, 3, 0, 0, 1, 2, 3]);
    let mut body = RequestBody::new(Open(Some(prefix)), terms, Arc::default());
    let waiting = tokio::time::timeout(std::time::Duration::from_millis(5), body.frame()).await;
    assert!(waiting.is_err(), "the message is not complete");
    assert_eq!(budget.held(), MESSAGE_BYTES + 3);
    drop(body);
    assert_eq!(budget.held(), 0);
}

#[test]
fn a_charge_lives_as_long_as_any_slice() {
    let budget = Budget::new(1 << 20, LIMIT);
    let connection = Connection::new(ClientKey(1), Arc::default(), CancellationToken::new());
    let ticket = budget.try_message(&connection, &connection.peer, 100).expect("there is room");
    let bytes = charged_bytes(Bytes::from_static(b"rows"), ticket);
    let slice = bytes.slice(1..2);
    drop(bytes);
    assert!(budget.held() > 0);
    assert_eq!(&slice[..], b"o");
    drop(slice);
    assert_eq!(budget.held(), 0);
}

/// Requests on a stream, in turn: rows that are kept apart, few rows, and bytes that are no request.
#[tokio::test]
async fn rows_of_large_messages_wait_beside_them() {
    use expertd_proto::v1::forward_request::Payload;
    use expertd_proto::v1::{ForwardRequest, ForwardStreamRequest};
    use prost::Message as _;

    let rows = |bytes: usize| (0..bytes).map(|at| (at * 13) as u8).collect::<Bytes>();
    let request = |id: u64, inline: Bytes| {
        let request =
            ForwardRequest { tokens: 3, payload: Some(Payload::Inline(inline)), ..Default::default() };
        ForwardStreamRequest { id, request: Some(request), timeout_ms: 5 }.encode_to_vec()
    };
    let garbage = vec![0xff; 70_000];
    let sent = [request(1, rows(100_000)), request(2, rows(50)), garbage.clone(), request(3, rows(16 << 10))];
    let expected = [request(1, Bytes::new()), request(2, rows(50)), garbage, request(3, Bytes::new())];
    let apart = [Some(rows(100_000)), None, None, Some(rows(16 << 10))];
    let bytes: Bytes = sent.iter().flat_map(|message| framed(message)).collect();

    for sizes in [&[3][..], &[20_000], &[1 << 20], &[5, 9000, 1]] {
        let budget = Budget::new(1 << 20, 1 << 18);
        let charges = Arc::new(Charges::default());
        let terms = terms(&budget, 1 << 18, true);
        let body = RequestBody::new(cut(bytes.clone(), sizes), terms, Arc::clone(&charges));
        let passed = read(body).await.expect("the body is in order");
        assert!(passed == expected.iter().flat_map(|message| framed(message)).collect::<Bytes>());
        assert!(budget.held() > 100_000);
        for rows in &apart {
            let Some(Arrival::Charged(_, kept)) = charges.next_arrival() else { panic!("four messages") };
            assert!(kept.map(|kept| kept.to_bytes()) == *rows);
        }
        assert_eq!(budget.held(), 0, "charges come back");

        // A message that never ends holds nothing once its call is gone.
        let terms = super::super::chunks::terms(&budget, 1 << 18, true);
        let ends_early = cut(bytes.slice(..90_000), sizes);
        let body = RequestBody::new(ends_early, terms, Arc::default());
        let status = read(body).await.expect_err("it is incomplete");
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("bytes of a message are missing"), "{}", status.message());
        assert_eq!(budget.held(), 0);
    }
}
