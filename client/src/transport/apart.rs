//! Request bodies whose rows are sent without a copy into the encoded message.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use prost::encoding::{encode_varint, encoded_len_varint};
use tonic::Status;

use expertd_proto::v1::ForwardRequest;
use expertd_proto::v1::forward_request::Payload;

/// Rows of at least this size are sent apart, in bytes.
const APART_BYTES: usize = 64 << 10;
/// gRPC's prefix of a message: a flag, and the length as 32 bits.
const PREFIX: usize = 5;
/// Field 5 of a `ForwardRequest`, length-delimited.
const INLINE_KEY: u8 = 0x2a;

/// Rows that were taken out of a request. As an extension of the request they tell [`Channel`](super::Channel) to send them as the
/// message's first field, where the service takes them out again without a copy.
#[derive(Clone, Debug)]
pub(crate) struct RowsApart(Bytes);

impl RowsApart {
    /// Takes large rows out of a request.
    pub(crate) fn take(request: &mut ForwardRequest) -> Option<RowsApart> {
        match &mut request.payload {
            Some(Payload::Inline(rows)) if rows.len() >= APART_BYTES => {
                let rows = std::mem::take(rows);
                request.payload = None;
                Some(RowsApart(rows))
            }
            _ => None,
        }
    }

    /// Bytes that the rows add to the message.
    fn encoded_len(&self) -> usize {
        1 + encoded_len_varint(self.0.len() as u64) + self.0.len()
    }
}

/// The body of a request with one message, into which the rows are inserted.
pub(super) struct ApartBody {
    message: tonic::body::Body,
    /// The start of the message, until its prefix is complete.
    head: BytesMut,
    /// Taken once they are inserted.
    rows: Option<RowsApart>,
    /// What is sent before the rest of the message.
    queue: VecDeque<Bytes>,
}

impl ApartBody {
    pub(super) fn new(message: tonic::body::Body, rows: RowsApart) -> ApartBody {
        ApartBody { message, head: BytesMut::new(), rows: Some(rows), queue: VecDeque::new() }
    }

    /// Queues a part of the message, and the rows behind its prefix.
    fn push(&mut self, part: Bytes) {
        let Some(rows) = &self.rows else { return self.queue.push_back(part) };
        self.head.extend_from_slice(&part);
        let Some(mut length) = self.head.get(1..PREFIX) else { return };
        // Messages are limited to far less than 4 GiB (`max_message_bytes`).
        let whole = u32::try_from(length.get_u32() as usize + rows.encoded_len()).unwrap_or(u32::MAX);
        let rest = self.head.split_off(PREFIX);
        self.head[1..PREFIX].copy_from_slice(&whole.to_be_bytes());
        self.head.put_u8(INLINE_KEY);
        encode_varint(rows.0.len() as u64, &mut self.head);
        let parts = [self.head.split().freeze(), rows.0.clone(), rest.freeze()];
        self.queue.extend(parts.into_iter().filter(|part| !part.is_empty()));
        self.rows = None;
    }
}

impl Body for ApartBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(part) = self.queue.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(part))));
            }
            match ready!(Pin::new(&mut self.message).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(part) => self.push(part),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rows.is_none() && self.queue.is_empty() && self.message.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use expertd_proto::v1::DType;

    fn request(rows: usize) -> ForwardRequest {
        let rows: Vec<u8> = (0..rows).map(|at| at as u8).collect();
        let ids = Bytes::from(vec![7; 40]);
        ForwardRequest::inline(3, 1024, DType::DtypeBf16, rows.into()).with_routing(ids.clone(), ids, 2)
    }

    /// Sends the encoded message to the body in parts of `size` bytes and returns the frames.
    fn frames(request: &ForwardRequest, size: usize) -> Vec<Bytes> {
        let mut message = request.clone();
        let rows = RowsApart::take(&mut message).expect("large rows");
        let mut encoded = vec![0];
        encoded.extend((message.encoded_len() as u32).to_be_bytes());
        encoded.extend(message.encode_to_vec());
        let mut body = ApartBody::new(tonic::body::Body::empty(), rows);
        encoded.chunks(size).for_each(|part| body.push(Bytes::copy_from_slice(part)));
        body.queue.into()
    }

    #[test]
    fn the_message_is_that_with_the_rows_inside() {
        let request = request(4 << 20);
        for size in [1, 4, 5, 64, 1000] {
            let frames = frames(&request, size);
            let Some(Payload::Inline(rows)) = &request.payload else { panic!("inline rows") };
            assert_eq!(frames[1].as_ptr(), rows.as_ptr(), "the rows are not copied");
            let whole = frames.concat();
            assert_eq!(whole[..PREFIX], [&[0], &(request.encoded_len() as u32).to_be_bytes()[..]].concat());
            assert_eq!(ForwardRequest::decode(&whole[PREFIX..]).expect("a message"), request);
        }
    }

    #[test]
    fn small_rows_stay_in_the_message() {
        let mut small = request(APART_BYTES - 1);
        let before = small.clone();
        assert!(RowsApart::take(&mut small).is_none());
        assert_eq!(small, before);
    }
}
