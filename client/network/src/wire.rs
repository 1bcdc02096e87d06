//! What the two ends of a network session tell each other: a record, and the bytes that it names.
//!
//! A notification is a [`Head`], a [`RequestRecord`] or a [`CompletionRecord`] of `docs/sessions.md`, and the bytes of the call's places,
//! one behind the other, if they are few. Many bytes are written to the same places of the peer's row area before the notification is
//! sent. A peer may send anything: what is not a message is an error, which ends its session, and places are checked before any byte
//! is stored.

use bytemuck::{Pod, Zeroable};
pub use expertd_session::places::{Place, Places};
use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_shm::region::SharedSlice;

use crate::library::NetworkError;

/// Version of the messages and of the handshake.
pub const VERSION: u32 = 2;
/// Bytes of places that travel within the notification, at most. It saves the round trip in which a write is flushed, and costs a copy
/// at each end.
pub const INLINE_BYTES: usize = 64 << 10;

const REQUEST: u32 = 1;
const COMPLETION: u32 = 2;

/// A client's message that asks nothing and has no answer. A transport notices that a connection is broken when it has bytes to send.
pub const ALIVE_MESSAGE: Head = Head { kind: 3, inline_bytes: 0 };
/// Says that many bytes are being written: a transport takes them in only while it is polled.
pub const COMING_MESSAGE: Head = Head { kind: 4, inline_bytes: 0 };

/// Head of every notification.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Head {
    /// 1: a request; 2: a completion; 3 and 4: see [`ALIVE_MESSAGE`] and [`COMING_MESSAGE`].
    pub kind: u32,
    /// Bytes behind the record.
    pub inline_bytes: u32,
}

fn total(places: &[Place]) -> usize {
    places.iter().fold(0, |sum, place| sum.saturating_add(place.bytes))
}

/// A record that travels.
pub trait Record: Pod {
    /// The kind of its notifications.
    const KIND: u32;
}

impl Record for RequestRecord {
    const KIND: u32 = REQUEST;
}

impl Record for CompletionRecord {
    const KIND: u32 = COMPLETION;
}

/// Writes the notification of a record to `to`. Returns the places that are to be written one-sidedly: all or none.
pub fn encode<'a, R: Record>(
    record: &R,
    rows: &SharedSlice<u8>,
    places: &'a [Place],
    to: &mut Vec<u8>,
) -> &'a [Place] {
    let bytes = total(places);
    let is_inline = bytes <= INLINE_BYTES;
    let inline_bytes = if is_inline { bytes as u32 } else { 0 };
    to.clear();
    to.extend_from_slice(bytemuck::bytes_of(&Head { kind: R::KIND, inline_bytes }));
    to.extend_from_slice(bytemuck::bytes_of(record));
    if !is_inline {
        return places;
    }
    for place in places {
        let at = to.len();
        to.resize(at + place.bytes, 0);
        rows.load_bytes(place.start, &mut to[at..]);
    }
    &[]
}

/// Reads a notification that must be of a record of this kind: the record, and the bytes behind it.
///
/// # Errors
/// If it is anything else.
pub fn decode<R: Record>(message: &[u8]) -> Result<(R, &[u8]), NetworkError> {
    let odd = || NetworkError::Protocol(format!("a notification of {} bytes that is none", message.len()));
    let (head, rest) = message.split_at_checked(size_of::<Head>()).ok_or_else(odd)?;
    let head: Head = bytemuck::pod_read_unaligned(head);
    if head.kind != R::KIND {
        return Err(NetworkError::Protocol(format!(
            "kind {} of notification, expected {}",
            head.kind,
            R::KIND
        )));
    }
    let (record, bytes) = rest.split_at_checked(size_of::<R>()).ok_or_else(odd)?;
    if bytes.len() != head.inline_bytes as usize || bytes.len() > INLINE_BYTES {
        return Err(odd());
    }
    Ok((bytemuck::pod_read_unaligned(record), bytes))
}

/// Stores the bytes that follow a record in the places that it names. Without bytes there is nothing to store: a one-sided write has
/// already stored them, or the places are empty.
///
/// # Errors
/// If the number of bytes differs from the sum of the places, or a place lies outside of `rows`.
pub fn store(rows: &SharedSlice<u8>, places: &[Place], bytes: &[u8]) -> Result<(), NetworkError> {
    if bytes.is_empty() {
        return Ok(());
    }
    let found = bytes.len();
    if found != total(places) || !places.iter().all(|place| place.is_within(rows.len())) {
        return Err(NetworkError::Protocol(format!("{found} bytes of a call whose places have other sizes")));
    }
    let mut rest = bytes;
    for place in places {
        let (own, others) = rest.split_at(place.bytes);
        rows.store_bytes(place.start, own);
        rest = others;
    }
    Ok(())
}

/// Whether a record came without bytes that would have travelled with it.
#[must_use]
pub fn are_missing(places: &[Place], bytes: &[u8]) -> bool {
    bytes.is_empty() && (1..=INLINE_BYTES).contains(&total(places))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use expertd_shm::SharedRegion;
    use proptest::prelude::*;

    use super::*;

    const ROWS: usize = 1 << 20;

    fn area(fill: u8) -> SharedSlice<u8> {
        let rows = SharedRegion::create("rows", ROWS).unwrap().slice(0, ROWS).unwrap();
        rows.store_bytes(0, &vec![fill; ROWS]);
        rows
    }

    #[test]
    fn sizes_are_pinned() {
        assert_eq!(
            (size_of::<Head>(), size_of::<RequestRecord>(), size_of::<CompletionRecord>()),
            (8, 88, 408)
        );
    }

    #[test]
    fn few_bytes_travel_in_the_notification_and_many_do_not() {
        let (from, to) = (area(3), area(0));
        let places = Places { hidden: 64, rows_bytes: ROWS };
        let mut record = RequestRecord { tokens: 8, dtype: 3, rows: 4096, ..RequestRecord::zeroed() };
        record.flags = RequestRecord::GIVEN_ROUTING | RequestRecord::TOKEN_IDS;
        (record.k, record.ids, record.weights, record.token_ids) = (2, 8192, 8256, 8320);
        let own = places.of_request(&record).unwrap();
        let bytes = [8 * 64 * 4, 64, 64, 32];
        assert_eq!(own.iter().map(|place| place.bytes).collect::<Vec<_>>(), bytes);
        let mut message = Vec::new();
        assert_eq!(encode(&record, &from, &own, &mut message), &[]);
        let (found, inline) = decode::<RequestRecord>(&message).unwrap();
        assert_eq!(found, record);
        store(&to, &own, inline).unwrap();
        let mut copy = vec![9; ROWS];
        to.load_bytes(0, &mut copy);
        let stored =
            |at: usize| own.iter().any(|place| (place.start..place.start + place.bytes).contains(&at));
        assert!(copy.iter().enumerate().all(|(at, &byte)| byte == if stored(at) { 3 } else { 0 }));
        assert!(store(&to, &own[1..], inline).is_err(), "bytes of other places");
        assert!(are_missing(&own, &[]) && !are_missing(&own, inline) && !are_missing(&[], &[]));
        assert!(decode::<CompletionRecord>(&message).is_err(), "another kind");
        assert!(decode::<RequestRecord>(&message[..message.len() - 1]).is_err(), "a byte is missing");

        record.tokens = 1024;
        let own = places.of_request(&record).unwrap();
        assert_eq!(encode(&record, &from, &own, &mut message), own);
        assert_eq!(message.len(), 8 + 88);
        assert!(!are_missing(&own, &[]), "many bytes travel apart");
    }

    proptest! {
        /// Whatever a peer sends, its places lie in the row area, and nothing panics.
        #[test]
        fn places_of_any_record_lie_in_the_row_area(
            bytes in prop::collection::vec(any::<u8>(), 88),
            small in any::<[u16; 6]>(),
            tame in any::<bool>(),
            inline in prop::collection::vec(any::<u8>(), 0..4096),
        ) {
            let mut record: RequestRecord = bytemuck::pod_read_unaligned(&bytes);
            if tame {
                let [tokens, k, rows, ids, weights, dtype] = small;
                (record.tokens, record.k) = (u32::from(tokens % 512), u32::from(k % 9));
                (record.rows, record.ids) = (u64::from(rows) * 16, u64::from(ids) * 16);
                (record.weights, record.dtype) = (u64::from(weights) * 16, u32::from(dtype % 4));
            }
            let places = Places { hidden: 64, rows_bytes: ROWS };
            let rows = area(0);
            let routed = record.flags & (RequestRecord::GIVEN_ROUTING | RequestRecord::RETURN_ROUTING) != 0;
            if record.k == 0 && routed {
                prop_assert!(places.of_request(&record).is_none() || places.of_answer(&record).is_none());
            }
            for own in [places.of_request(&record), places.of_answer(&record)].into_iter().flatten() {
                prop_assert!(own.iter().all(|place| place.bytes > 0));
                prop_assert!(own.iter().all(|place| place.is_within(ROWS)));
                let mut message = Vec::new();
                let rest = encode(&record, &rows, &own, &mut message);
                let (found, behind) = decode::<RequestRecord>(&message).unwrap();
                prop_assert_eq!(found, record);
                prop_assert!(rest.is_empty() || behind.is_empty());
                prop_assert!(store(&rows, &own, behind).is_ok());
                let _ = store(&rows, &own, &inline);
            }
            let _ = decode::<CompletionRecord>(&inline);
            let _ = decode::<RequestRecord>(&bytes);
        }
    }
}
