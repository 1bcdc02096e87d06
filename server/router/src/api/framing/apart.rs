//! Rows of a request that stay in the chunks that the transport delivered.
//!
//! The decoder needs a message in one piece, which would copy every byte. Rows are most of a message, and staging copies
//! them anyway, from any number of chunks. Therefore they are taken out of the message before it is decoded, and attached
//! to the request afterwards.

use std::ops::Range;

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::encoding::{decode_varint, encode_varint, encoded_len_varint};

use expertd_types::ChunkedBytes;

/// Rows of at least this size, in messages of at least this size, are taken out.
pub(in crate::api) const APART_BYTES: usize = 16 << 10;
/// Smaller chunks are joined, so that a message in tiny chunks does not cost more memory than its bytes.
const JOINED_BYTES: usize = 8 << 10;
/// Largest offset of the rows in a message.
const HEAD_BYTES: usize = 512;

/// Field 2 of a `ForwardStreamRequest`, length-delimited.
const REQUEST_KEY: u8 = 0x12;
/// Field 5 of a `ForwardRequest`, length-delimited.
const INLINE_KEY: u8 = 0x2a;

/// A message that arrives chunk by chunk.
#[derive(Default)]
pub(in crate::api) struct Gathering {
    pieces: Vec<Bytes>,
    small: BytesMut,
}

impl Gathering {
    /// Adds the next chunk.
    pub(in crate::api) fn push(&mut self, chunk: Bytes) {
        if chunk.len() < JOINED_BYTES {
            self.small.extend_from_slice(&chunk);
            return;
        }
        self.join();
        self.pieces.push(chunk);
    }

    /// The message, or the part of it that has arrived.
    pub(in crate::api) fn finish(mut self) -> ChunkedBytes {
        self.join();
        self.pieces.into_iter().collect()
    }

    fn join(&mut self) {
        if !self.small.is_empty() {
            self.pieces.push(self.small.split().freeze());
        }
    }
}

/// A message without its rows, and the rows.
pub(in crate::api) struct Split {
    /// The same message with empty rows.
    pub(in crate::api) message: Bytes,
    pub(in crate::api) rows: ChunkedBytes,
}

/// Takes the rows out of a `ForwardStreamRequest` or, if not `streaming`, a `ForwardRequest`. `None` if they are small or not
/// where encoders put them; the message is then decoded unchanged.
pub(in crate::api) fn split(message: &ChunkedBytes, streaming: bool) -> Option<Split> {
    let end = message.len();
    let start = message.view(0..end.min(HEAD_BYTES)).iter().collect::<Vec<_>>().concat();
    let mut head = Head { bytes: &start, at: 0 };
    let request = if streaming { Some(head.find(REQUEST_KEY, end)?) } else { None };
    let request_end = request.as_ref().map_or(end, |request| request.end);
    let before = head.at;
    let rows = head.find(INLINE_KEY, request_end)?;
    if rows.len() < APART_BYTES {
        return None;
    }
    // Layout: key, length, rows.
    let fields = before..rows.start - encoded_len_varint(rows.len() as u64) - 1;

    // All lengths become shorter.
    let mut without = BytesMut::with_capacity(end - rows.len());
    if let Some(request) = &request {
        let length = fields.len() + 2 + (request_end - rows.end);
        without.put_slice(&start[..request.start - encoded_len_varint(request.len() as u64)]);
        encode_varint(length as u64, &mut without);
    }
    without.put_slice(&start[fields]);
    without.put_slice(&[INLINE_KEY, 0]);
    message.view(rows.end..end).iter().for_each(|rest| without.put_slice(rest));
    Some(Split { message: without.freeze(), rows: message.slice(rows) })
}

/// The start of a message.
struct Head<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Head<'_> {
    /// Skips fields up to the length-delimited field `key`. Returns the range of its value, which ends at or before `end`.
    fn find(&mut self, key: u8, end: usize) -> Option<Range<usize>> {
        loop {
            let found = *self.bytes.get(self.at)?;
            self.at += 1;
            // Keys of fields up to 15 are single bytes.
            match found & 0x87 {
                0 => _ = self.varint()?,
                2 => {
                    let length = usize::try_from(self.varint()?).ok()?;
                    let value = self.at..self.at.checked_add(length)?;
                    if value.end > end {
                        return None;
                    }
                    if found == key {
                        return Some(value);
                    }
                    self.at = value.end;
                }
                _ => return None,
            }
        }
    }

    /// Reads a varint; `None` if it uses more bytes than it needs.
    fn varint(&mut self) -> Option<u64> {
        let mut rest = self.bytes.get(self.at..)?;
        let before = rest.len();
        let value = decode_varint(&mut rest).ok()?;
        let taken = before - rest.len();
        self.at += taken;
        (taken == encoded_len_varint(value)).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use expertd_proto::v1::forward_request::Payload;
    use expertd_proto::v1::{ForwardRequest, ForwardStreamRequest, Routing};
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn request(model: String, rows: usize, routing: Option<usize>) -> ForwardRequest {
        let bytes = |count: usize, by: usize| (0..count).map(|at| (at * by) as u8).collect::<Bytes>();
        ForwardRequest {
            model,
            layer: 300,
            tokens: 7,
            dtype: 1,
            payload: Some(Payload::Inline(bytes(rows, 31))),
            routing: routing.map(|size| Routing {
                topk_ids: bytes(size, 3),
                topk_weights: bytes(size, 7),
                k: 8,
            }),
            return_routing: true,
            ..ForwardRequest::default()
        }
    }

    fn cut(message: &[u8], sizes: &[usize]) -> ChunkedBytes {
        let mut gathering = Gathering::default();
        let mut rest = Bytes::copy_from_slice(message);
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            gathering.push(rest.split_to((*size).min(rest.len())));
        }
        gathering.finish()
    }

    fn with_rows(mut request: ForwardRequest, rows: &ChunkedBytes) -> ForwardRequest {
        assert_eq!(request.payload, Some(Payload::Inline(Bytes::new())));
        request.payload = Some(Payload::Inline(rows.to_bytes()));
        request
    }

    fn sizes() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![1usize..40, JOINED_BYTES - 9..3 * JOINED_BYTES], 1..8)
    }

    proptest! {
        #[test]
        fn rows_and_the_rest_are_the_message(
            name in "[a-z]{0,40}",
            rows in APART_BYTES..5 * APART_BYTES,
            routing in prop::option::of(0usize..9000),
            stream in prop::option::of((any::<u64>(), any::<u32>())),
            sizes in sizes(),
        ) {
            let request = request(name, rows, routing);
            match stream {
                None => {
                    let pieces = cut(&request.encode_to_vec(), &sizes);
                    let split = split(&pieces, false).expect("there are rows");
                    let decoded = ForwardRequest::decode(split.message).expect("a message");
                    prop_assert_eq!(with_rows(decoded, &split.rows), request);
                }
                Some((id, timeout_ms)) => {
                    let message = ForwardStreamRequest { id, request: Some(request), timeout_ms };
                    let pieces = cut(&message.encode_to_vec(), &sizes);
                    let split = split(&pieces, true).expect("there are rows");
                    let mut decoded = ForwardStreamRequest::decode(split.message).expect("a message");
                    decoded.request = decoded.request.map(|request| with_rows(request, &split.rows));
                    prop_assert_eq!(decoded, message);
                }
            }
        }

        #[test]
        fn a_broken_message_stays_broken(
            at in any::<prop::sample::Index>(),
            to in any::<u8>(),
            streaming in any::<bool>(),
            sizes in sizes(),
        ) {
            let request = request("m".to_owned(), APART_BYTES + 9, Some(64));
            let message = ForwardStreamRequest { id: 1 << 40, request: Some(request.clone()), timeout_ms: 9 };
            let mut bytes = if streaming { message.encode_to_vec() } else { request.encode_to_vec() };
            // Fields before and after the rows.
            let near = at.index(260);
            let index = if near < 60 { near } else { bytes.len() - near + 59 };
            bytes[index] = to;
            let Some(split) = split(&cut(&bytes, &sizes), streaming) else { return Ok(()) };
            let put = |mut request: ForwardRequest| {
                if request.payload == Some(Payload::Inline(Bytes::new())) {
                    request.payload = Some(Payload::Inline(split.rows.to_bytes()));
                }
                request
            };
            if streaming {
                let decoded = ForwardStreamRequest::decode(split.message.clone()).map(|mut message| {
                    message.request = message.request.map(put);
                    message
                });
                prop_assert_eq!(decoded.ok(), ForwardStreamRequest::decode(&bytes[..]).ok());
            } else {
                let decoded = ForwardRequest::decode(split.message.clone()).map(put);
                prop_assert_eq!(decoded.ok(), ForwardRequest::decode(&bytes[..]).ok());
            }
        }
    }

    #[test]
    fn few_rows_stay_in_the_message() {
        let bytes = request(String::new(), APART_BYTES - 1, Some(4000)).encode_to_vec();
        assert!(split(&cut(&bytes, &[100_000]), false).is_none());
    }

    #[test]
    fn large_chunks_are_not_copied() {
        let bytes = Bytes::from(request(String::new(), 4 * APART_BYTES, None).encode_to_vec());
        let addresses = bytes.as_ptr_range();
        let mut gathering = Gathering::default();
        gathering.push(bytes.slice(..3 * APART_BYTES));
        gathering.push(bytes.slice(3 * APART_BYTES..));
        let split = split(&gathering.finish(), false).expect("there are rows");
        assert!(split.rows.into_iter().all(|piece| addresses.contains(&piece.as_ptr())));
    }
}
