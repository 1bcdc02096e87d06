//! Tests of request bodies.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use http_body_util::{BodyExt as _, StreamBody};
use tonic::Code;

use super::*;

const LIMIT: usize = 100_000;

fn terms(budget: &Arc<Budget>, streaming: bool) -> Terms {
    let timeouts = ConnectionTimeouts {
        stalled: Duration::from_millis(50),
        min_bytes_per_second: 1 << 30,
        ..ConnectionTimeouts::default()
    };
    Terms {
        budget: Arc::clone(budget),
        owner: Arc::default(),
        activity: Activity::new(),
        timeouts,
        limit: LIMIT,
        streaming,
        forward: true,
    }
}

fn message(length: usize) -> Vec<u8> {
    [&[0], &(length as u32).to_be_bytes()[..], &vec![7; length]].concat()
}

/// A body of the given bytes in chunks of `size`, which then ends or stays open.
fn chunks(bytes: &[u8], size: usize, ends: bool) -> impl Body<Data = Bytes, Error = Status> + Unpin + use<> {
    let parts: VecDeque<_> = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
    StreamBody::new(Box::pin(futures_util::stream::unfold(parts, move |mut parts| async move {
        match parts.pop_front() {
            Some(part) => Some((Ok(Frame::data(part)), parts)),
            None if ends => None,
            None => std::future::pending().await,
        }
    })))
}

/// The bytes that a body passes on, and the code of its error.
async fn read<B: Body<Data = Bytes, Error = Status> + Unpin>(
    body: &mut RequestBody<B>,
) -> (Vec<u8>, Option<Code>) {
    let mut passed = Vec::new();
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => passed.extend(frame.into_data().unwrap()),
            Err(error) => return (passed, Some(error.downcast_ref::<Status>().unwrap().code())),
        }
    }
    (passed, None)
}

#[tokio::test]
async fn bytes_pass_unchanged_and_each_message_is_charged_until_its_ticket_is_dropped() {
    let bytes = [message(0), message(70_000), message(3), message(LIMIT)].concat();
    for size in [1, 4, 5, 6, 1000, 1 << 20] {
        let budget = Budget::new(1 << 20, LIMIT);
        let charges = Arc::new(Charges::default());
        let inner = chunks(&bytes, size, true);
        let mut body = RequestBody::new(inner, terms(&budget, true), Arc::clone(&charges));
        assert_eq!(read(&mut body).await, (bytes.clone(), None));
        drop(body);
        let tickets: Vec<_> = std::iter::from_fn(|| charges.next_arrival()).collect();
        assert_eq!(tickets.len(), 4);
        assert_eq!(budget.held(), 70_003 + LIMIT + 4 * MESSAGE_BYTES);
        drop(tickets);
        assert_eq!(budget.held(), 0);
    }
}

#[tokio::test]
async fn a_broken_body_is_an_invalid_argument() {
    let twice = [message(1), message(1)].concat();
    let large = [&[0][..], &(LIMIT as u32 + 1).to_be_bytes()].concat();
    for (bytes, streaming, ends) in [
        (&message(9)[..8], true, true),
        (&message(9)[..3], true, true),
        (&message(9)[..5], false, true),
        (&twice[..], false, true),
        (&large[..], true, false),
    ] {
        let budget = Budget::new(1 << 20, LIMIT);
        let mut body = RequestBody::new(chunks(bytes, 2, ends), terms(&budget, streaming), Arc::default());
        assert_eq!(read(&mut body).await.1, Some(Code::InvalidArgument), "{bytes:?}");
        drop(body);
        assert_eq!(budget.held(), 0);
    }
}

#[tokio::test]
async fn a_message_without_room_is_refused_and_gives_back_what_it_holds() {
    let budget = Budget::new(LIMIT, LIMIT);
    let terms = terms(&budget, true);
    let other = budget.charge(&Arc::default(), LIMIT, LIMIT / 2).unwrap();
    let mut body = RequestBody::new(chunks(&message(LIMIT), 1000, false), terms.clone(), Arc::default());
    let begun = Instant::now();
    assert_eq!(read(&mut body).await.1, Some(Code::ResourceExhausted));
    assert!(begun.elapsed() >= WAIT_FOR_ROOM);
    assert_eq!(budget.held(), LIMIT / 2);
    // A message that finds room while it waits goes on.
    let mut body = RequestBody::new(chunks(&message(LIMIT), 1000, true), terms, Arc::default());
    let freed = async {
        sleep(WAIT_FOR_ROOM / 2).await;
        drop(other);
    };
    // In this order: after a pause of the machine both times have passed.
    assert_eq!(tokio::join!(biased; freed, read(&mut body)).1.1, None);
}

#[tokio::test]
async fn a_message_that_does_not_arrive_in_time_is_refused() {
    let budget = Budget::new(1 << 20, LIMIT);
    let inner = chunks(&message(9)[..8], 100, false);
    let mut body = RequestBody::new(inner, terms(&budget, true), Arc::default());
    assert_eq!(read(&mut body).await.1, Some(Code::InvalidArgument));
    assert_eq!(budget.held(), 0);
}
