//! Requests that passed validation, and their answers with receipts.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_scheduler::{ClientKey, ConnectionKey};
use expertd_types::{DType, Generation, LayerId, Phase, StepId, WeightFingerprint, WeightVersion};

/// Number of a request, unique within the process; logs and spans carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl RequestId {
    /// The next number.
    #[must_use]
    pub fn next() -> RequestId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        RequestId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The key of a new connection or session.
#[must_use]
pub fn next_connection() -> ConnectionKey {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    ConnectionKey(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The key of a client with a name, which its connections and sessions share.
#[must_use]
pub fn client_key(name: &str) -> ClientKey {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    ClientKey(HASHER.hash_one(name))
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Validated routing of the caller, applied verbatim. The id −1 is already replaced.
#[derive(Clone, Debug)]
pub struct GivenRouting {
    /// Row-major int32 little-endian `[tokens, k]`, distinct within a row and in range. Unaligned.
    pub ids: Bytes,
    /// Row-major float32 little-endian `[tokens, k]`, finite. Unaligned.
    pub weights: Bytes,
    /// Experts per token, `1..=MoeLayerInfo::max_k`.
    pub k: usize,
    /// The caller's own ids and weights, if they contained the id −1; receipts carry these.
    pub as_given: Option<(Bytes, Bytes)>,
}

/// One validated token batch for one layer, `tokens >= 1`.
#[derive(Clone, Debug)]
pub struct Request {
    /// Number of the request, for logs.
    pub id: RequestId,
    /// Client of the request, for fairness.
    pub client: ClientKey,
    /// Its connection or session, whose next request a step may wait for.
    pub connection: ConnectionKey,
    /// A layer with an MoE block.
    pub layer: LayerId,
    /// Number of rows, `1..=Limits::max_tokens_per_request`.
    pub tokens: usize,
    /// Element type of the rows, little-endian.
    pub dtype: DType,
    /// Row-major `[tokens, hidden]`, exactly `tokens * hidden * dtype.size()` bytes. Unaligned. Empty for a request of a
    /// session, whose rows lie in the session's memory.
    pub rows: Bytes,
    /// `None`: the layer's gate routes the rows.
    pub routing: Option<GivenRouting>,
    /// Row-major int32 little-endian `[tokens]`; present where the layer routes by token id. Unaligned.
    pub token_ids: Option<Bytes>,
    /// Whether shared experts are part of the output.
    pub shared_experts: bool,
    /// The only version of the weights that may compute the answer.
    pub expected_version: Option<WeightVersion>,
    /// Whether the receipt carries ids and weights.
    pub return_routing: bool,
    /// Time after which the answer is of no use to the caller.
    pub deadline: Option<Instant>,
}

/// Output rows and their receipt.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Row-major `[tokens, hidden]` in the request's dtype, little-endian.
    pub rows: Bytes,
    /// Receipt of the answer.
    pub receipt: Receipt,
}

/// Receipt of an answer.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// The steps that computed the request, in order.
    pub steps: Vec<StepId>,
    /// The generation that computed it.
    pub generation: Generation,
    /// Version of the weights that computed it.
    pub weight_version: WeightVersion,
    /// Their fingerprint.
    pub weight_fingerprint: WeightFingerprint,
    /// This request's tokens on each rank, summed over its steps.
    pub tokens_per_rank: Vec<u32>,
    /// One entry per step.
    pub timings: Vec<StepTiming>,
    /// Row-major int32 little-endian `[tokens, k]` if `return_routing`, else empty.
    pub topk_ids: Bytes,
    /// Row-major float32 little-endian `[tokens, k]` if `return_routing`, else empty.
    pub topk_weights: Bytes,
    /// From admission until the first step formed.
    pub queue_time: Duration,
    /// From the forming of the first step until the last row was back at the router.
    pub step_time: Duration,
}

/// One step's timings in a receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTiming {
    /// Id of the step.
    pub step: StepId,
    /// Tokens of the whole step, all requests together.
    pub tokens: u32,
    /// Duration of each phase on the slowest rank, in the order of [`Phase::ALL`].
    pub phases: [Duration; Phase::ALL.len()],
    /// The largest total of any rank over all phases except the copies between host and device.
    pub computed: Duration,
    /// Version of the source rank's table of expert slots for the layer: its changes within the generation. 0 without slots.
    pub slot_version: u64,
    /// When the step formed.
    pub formed: Instant,
    /// When its last row was back at the router.
    pub done: Instant,
}
