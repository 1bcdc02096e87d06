//! What client and service agree on: frames of the session socket, records of the rings, the layout of the region.
//!
//! Numbers are in the byte order of the host, which is little-endian on every supported platform.

use bytemuck::{Pod, Zeroable};
use expertd_shm::region::{LINE, Layout, RegionError};
use expertd_shm::ring::RingLayout;

/// Version of the protocol. A service refuses every other version with a sentence. Since version 3 the end of a session
/// and the end of its memory are two events: the client ends the session, and closes its socket once it needs the memory no longer. Since
/// version 4 a doorbell and its completion word are one 64-bit word.
pub const VERSION: u32 = 4;
/// Kind of a session whose rows lie in host memory. [`crate::cuda::wire`] has the other kind.
pub const KIND_HOST: u32 = 1;

/// Alignment of every offset into the row area, in bytes.
pub const ALIGN: usize = 64;
/// Largest number of calls in flight of one session.
pub const MAX_CALLS: u32 = 1024;
/// Largest payload of a frame that a client sends, in bytes.
pub const MAX_CLIENT_FRAME: usize = 256;
/// Largest payload of a frame that the service sends, in bytes.
pub const MAX_SERVICE_FRAME: usize = 64 << 20;
/// Largest number of ranks in a completion.
pub const MAX_RANKS: usize = 8;

/// Kinds of frames of the session socket.
pub mod frame {
    /// From the client: [`Open`](super::Open).
    pub const OPEN: u32 = 1;
    /// From the service: [`Opened`](super::Opened). The byte after the frame carries the descriptor of the region.
    pub const OPENED: u32 = 2;
    /// From the service: a sentence in UTF-8 that says why a request of the client is refused. The socket then ends.
    pub const REFUSED: u32 = 3;
    /// From the client, without payload: asks for [`MODEL`]. Allowed before `OPEN`.
    pub const GET_MODEL: u32 = 4;
    /// From the service: an encoded `expertd.v1.GetModelResponse`.
    pub const MODEL: u32 = 5;
    /// From the service: a sentence in UTF-8 that says why the session ends. The socket then ends.
    pub const ENDED: u32 = 6;
    /// From the service: [`OpenedCuda`](crate::cuda::wire::OpenedCuda). The byte after the frame carries the descriptor of the
    /// control region.
    pub const OPENED_CUDA: u32 = 7;
    /// From the client of a CUDA session: [`PreparedCall`](crate::cuda::wire::PreparedCall) records.
    pub const PREPARE: u32 = 8;
    /// From the service: [`PrepareReply`](crate::cuda::wire::PrepareReply), and a sentence in UTF-8 if the calls are refused.
    pub const PREPARED: u32 = 9;
}

/// Head of every frame.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FrameHeader {
    /// One of [`frame`].
    pub kind: u32,
    /// Length of the payload that follows, in bytes.
    pub bytes: u32,
}

/// A client's request to open a session.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Open {
    /// [`VERSION`] of the client.
    pub version: u32,
    /// [`KIND_HOST`].
    pub kind: u32,
    /// Size of the row area, in bytes; the service rounds it up to whole pages.
    pub rows_bytes: u64,
    /// Largest number of calls in flight, 1 to [`MAX_CALLS`]; the service rounds it up to a power of two.
    pub calls: u32,
    /// Zero.
    pub reserved: u32,
}

/// The session that the service made.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Opened {
    /// [`VERSION`] of the service.
    pub version: u32,
    /// [`KIND_HOST`].
    pub kind: u32,
    /// Number of the session, as logs of the service name it.
    pub session: u64,
    /// Size of the region, in bytes.
    pub region_bytes: u64,
    /// Offset of the ring of requests.
    pub requests_offset: u64,
    /// Offset of the ring of completions.
    pub completions_offset: u64,
    /// Offset of the 32-bit word that the client rings after it has pushed requests.
    pub service_bell_offset: u64,
    /// Offset of the 32-bit word that the service rings after it has pushed completions.
    pub client_bell_offset: u64,
    /// Offset of the row area. Places in requests count from here.
    pub rows_offset: u64,
    /// Size of the row area, in bytes.
    pub rows_bytes: u64,
    /// Capacity of each ring, in records, and largest number of calls in flight.
    pub calls: u32,
    /// How long a waiting thread should spin before it sleeps, in microseconds; 0 where cores are scarce.
    pub spin_us: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Zero.
    pub reserved: u32,
}

/// One call: rows of one layer. Offsets count from the start of the row area, in bytes, and are multiples of [`ALIGN`].
///
/// The client must not change the rows until the call's completion. Output must overlap neither the rows nor any place of
/// another call in flight.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RequestRecord {
    /// Number chosen by the client, distinct among its calls in flight; the completion carries it.
    pub call: u64,
    /// Place of the rows, `[tokens, hidden]` in `dtype`.
    pub rows: u64,
    /// Place for the output rows, as large as that of the rows.
    pub output: u64,
    /// Place of expert ids, `[tokens, k]` int32: read with [`GIVEN_ROUTING`](Self::GIVEN_ROUTING), written with
    /// [`RETURN_ROUTING`](Self::RETURN_ROUTING).
    pub ids: u64,
    /// Place of expert weights, `[tokens, k]` float32: read and written as `ids`.
    pub weights: u64,
    /// Place of token ids, `[tokens]` int32, with [`TOKEN_IDS`](Self::TOKEN_IDS).
    pub token_ids: u64,
    /// The weight version that must be loaded, with [`EXPECT_WEIGHT_VERSION`](Self::EXPECT_WEIGHT_VERSION).
    pub weight_version: u64,
    /// Deadline of the call in microseconds from the time at which the service takes it; 0 for none.
    pub timeout_us: u64,
    /// Decoder layer.
    pub layer: u32,
    /// Number of rows.
    pub tokens: u32,
    /// Element type: 1 bf16, 2 f16, 3 f32.
    pub dtype: u32,
    /// Experts per token of given or returned routing; 0 for the layer's own number.
    pub k: u32,
    /// Bit set of the constants below.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

impl RequestRecord {
    /// `ids` and `weights` hold the routing, which is applied verbatim; otherwise the gate chooses.
    pub const GIVEN_ROUTING: u32 = 1;
    /// The service writes the applied routing to `ids` and `weights`.
    pub const RETURN_ROUTING: u32 = 2;
    /// `token_ids` holds the ids of the rows' tokens.
    pub const TOKEN_IDS: u32 = 4;
    /// The output leaves out the shared experts.
    pub const EXCLUDE_SHARED: u32 = 8;
    /// The call fails unless `weight_version` is loaded.
    pub const EXPECT_WEIGHT_VERSION: u32 = 16;
    /// All flags of this version.
    pub const FLAGS: u32 = 31;
}

/// Bytes of a completion's message.
pub const MESSAGE_BYTES: usize = 240;

/// How a call ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct CompletionRecord {
    /// Number of the call.
    pub call: u64,
    /// Code of gRPC: 0 if the output is complete. Otherwise the output's bytes are undefined.
    pub code: u32,
    /// Number of bytes of `message` in use.
    pub message_len: u32,
    /// With UNAVAILABLE and RESOURCE_EXHAUSTED: the time after which a retry can succeed, in nanoseconds; 0 if unknown.
    pub retry_after_ns: u64,
    /// The generation that computed the call.
    pub generation: u64,
    /// The weights that computed it.
    pub weight_version: u64,
    /// Number of the first step that the call took part in.
    pub first_step: u64,
    /// Number of its last step.
    pub last_step: u64,
    /// Number of its steps.
    pub steps: u32,
    /// Number of entries of `tokens_per_rank` in use.
    pub ranks: u32,
    /// Time from admission until the first step formed, in nanoseconds.
    pub queue_ns: u64,
    /// Time from the forming of the first step until the last row was complete, in nanoseconds.
    pub step_ns: u64,
    /// Duration of each phase of its steps (copy_in, gate, prepare, dispatch, experts, combine, copy_out) on the slowest
    /// rank, in nanoseconds, summed over the steps.
    pub phase_ns: [u64; 7],
    /// The call's tokens on each rank, summed over its steps.
    pub tokens_per_rank: [u32; MAX_RANKS],
    /// Fingerprint of the weights that computed the call, or why it failed, in UTF-8. Behind the sentence of a failed call stand its
    /// reason and the names of invalid fields, each after a zero byte, as far as there is room.
    pub message: [u8; MESSAGE_BYTES],
}

impl CompletionRecord {
    /// A completion without an answer.
    #[must_use]
    pub fn failed(call: u64, code: u32, message: &str) -> Self {
        CompletionRecord { call, code, ..CompletionRecord::zeroed() }.with_text(message)
    }

    /// The same completion with another message, which is cut to the space available.
    #[must_use]
    pub fn with_text(mut self, message: &str) -> Self {
        let ends = message.char_indices().map(|(at, char)| at + char.len_utf8());
        let len = ends.take_while(|&end| end <= MESSAGE_BYTES).last().unwrap_or(0);
        self.message_len = len as u32;
        self.message[..len].copy_from_slice(&message.as_bytes()[..len]);
        self
    }

    /// The same failed completion with its reason and the names of invalid fields behind the sentence, which is cut if they would not fit.
    #[must_use]
    pub fn with_reason<'a>(self, reason: &str, fields: impl IntoIterator<Item = &'a str>) -> Self {
        let mut names = format!("\0{reason}");
        for field in fields {
            if names.len() + 1 + field.len() <= MESSAGE_BYTES / 2 {
                names.push('\0');
                names.push_str(field);
            }
        }
        if names.len() > MESSAGE_BYTES / 2 {
            return self;
        }
        let text = self.text();
        let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
        let len = ends.take_while(|&end| end + names.len() <= MESSAGE_BYTES).last().unwrap_or(0);
        let mut record = self.with_text(&text[..len]);
        record.message[len..].fill(0);
        record.message[len..len + names.len()].copy_from_slice(names.as_bytes());
        record
    }

    /// The reason of a failed completion and the names of invalid fields. The reason is empty if the service named none.
    #[must_use]
    pub fn reason(&self) -> (String, Vec<String>) {
        let len = (self.message_len as usize).min(MESSAGE_BYTES);
        let rest = String::from_utf8_lossy(&self.message[len..]);
        let mut names = rest.split('\0').filter(|name| !name.is_empty()).map(str::to_owned);
        (names.next().unwrap_or_default(), names.collect())
    }

    /// The message.
    #[must_use]
    pub fn text(&self) -> String {
        let len = (self.message_len as usize).min(MESSAGE_BYTES);
        String::from_utf8_lossy(&self.message[..len]).into_owned()
    }
}

/// Offsets of everything in a region. Both sides compute the same ones from the number of calls and the size of the row
/// area; [`Opened`] carries them for clients in other languages.
#[derive(Clone, Copy, Debug)]
pub struct RegionLayout {
    /// The ring of requests.
    pub requests: RingLayout<RequestRecord>,
    /// The ring of completions.
    pub completions: RingLayout<CompletionRecord>,
    /// The word that the client rings.
    pub service_bell: usize,
    /// The word that the service rings.
    pub client_bell: usize,
    /// The row area.
    pub rows: usize,
    /// Size of the row area, in bytes.
    pub rows_bytes: usize,
    /// Size of the region, in bytes.
    pub bytes: usize,
}

impl RegionLayout {
    /// The layout for `calls` calls in flight, a power of two, and `rows_bytes` bytes of rows.
    ///
    /// # Errors
    /// If the sizes exceed the address space.
    pub fn new(calls: u32, rows_bytes: usize) -> Result<Self, RegionError> {
        let mut layout = Layout::new();
        let requests = RingLayout::reserve(&mut layout, calls as usize)?;
        let completions = RingLayout::reserve(&mut layout, calls as usize)?;
        let service_bell = layout.line(LINE)?;
        let client_bell = layout.line(LINE)?;
        let rows = layout.page(rows_bytes)?;
        Ok(RegionLayout {
            requests,
            completions,
            service_bell,
            client_bell,
            rows,
            rows_bytes,
            bytes: layout.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes are part of the protocol: a change must change this test, the page and [`VERSION`].
    #[test]
    fn sizes_are_pinned() {
        assert_eq!(size_of::<FrameHeader>(), 8);
        assert_eq!(size_of::<Open>(), 24);
        assert_eq!(size_of::<Opened>(), 88);
        assert_eq!(size_of::<RequestRecord>(), 88);
        assert_eq!(size_of::<CompletionRecord>(), 408);
        let layout = RegionLayout::new(64, 1 << 20).expect("a small layout");
        assert_eq!(layout.requests.offset(), 0);
        assert_eq!(layout.completions.offset(), 128 + 64 * 96);
        assert_eq!(layout.service_bell, layout.completions.offset() + 128 + 64 * 416);
        assert_eq!(layout.client_bell, layout.service_bell + 64);
        assert_eq!((layout.rows, layout.bytes), (36864, 36864 + (1 << 20)));
    }

    #[test]
    fn a_reason_stands_behind_the_sentence() {
        let record = CompletionRecord::failed(7, 3, "tokens: too many; k: 0")
            .with_reason("INVALID_REQUEST", ["tokens", "k"]);
        assert_eq!(record.text(), "tokens: too many; k: 0");
        assert_eq!(
            record.reason(),
            ("INVALID_REQUEST".to_owned(), vec!["tokens".to_owned(), "k".to_owned()])
        );
        let record = CompletionRecord::failed(7, 3, &"é".repeat(500)).with_reason("OVERLOADED", []);
        assert_eq!(record.text(), "é".repeat((MESSAGE_BYTES - 11) / 2));
        assert_eq!(record.reason(), ("OVERLOADED".to_owned(), vec![]));
        let record = CompletionRecord::failed(7, 3, "gone");
        assert_eq!((record.reason(), record.text()), ((String::new(), vec![]), "gone".to_owned()));
        let record = CompletionRecord::failed(7, 3, "gone").with_reason(&"x".repeat(300), ["field"]);
        assert_eq!(record.reason().0, "");
        let fields = ["x"; 200];
        let record = CompletionRecord::failed(7, 3, "gone").with_reason("MANY", fields);
        assert_eq!((record.text(), record.reason().0), ("gone".to_owned(), "MANY".to_owned()));
    }

    #[test]
    fn messages_are_cut_between_characters() {
        let record = CompletionRecord::failed(7, 3, &"é".repeat(500));
        assert_eq!(record.text(), "é".repeat(MESSAGE_BYTES / 2));
    }
}
