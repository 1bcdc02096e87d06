//! What the API and the scheduler agree on: validated requests go down, answers and receipts come back.
//!
//! Everything here is plain data and one trait, so that the API needs nothing of the layers below the scheduler and
//! tests can stand in for it.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
pub use expertd_scheduler::{ClientKey, ServiceState};
use tokio::sync::{oneshot, watch};

use expertd_types::ChunkedBytes;
use expertd_types::{DType, Generation, LayerId, LayerRange, Rank, StepId, WeightVersion};

/// Number of a request, unique over the life of the process; what logs and spans carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Routing chosen by the caller, validated: applied verbatim. The id −1 is replaced already.
#[derive(Clone, Debug)]
pub struct GivenRouting {
    /// Row-major int32 little-endian `[tokens, k]`, distinct within a row and in range. Unaligned.
    pub ids: Bytes,
    /// Row-major float32 little-endian `[tokens, k]`, finite. Unaligned.
    pub weights: Bytes,
    /// Experts per token, `1..=MoeLayerInfo::max_k`.
    pub k: usize,
    /// Ids and weights as the caller gave them, if they had the id −1; receipts carry these.
    pub as_given: Option<(Bytes, Bytes)>,
}

/// One validated token batch for one layer, `tokens >= 1`.
#[derive(Clone, Debug)]
pub struct Request {
    /// For logs.
    pub id: RequestId,
    /// For fairness.
    pub client: ClientKey,
    /// A layer with an MoE block.
    pub layer: LayerId,
    /// Rows, `1..=Limits::max_tokens_per_request`.
    pub tokens: usize,
    /// Element type of the rows, little-endian.
    pub dtype: DType,
    /// Row-major `[tokens, hidden]`, exactly `tokens * hidden * dtype.size()` bytes, in the pieces in which they arrived.
    /// Unaligned.
    pub rows: ChunkedBytes,
    /// `None`: the gate of the layer decides.
    pub routing: Option<GivenRouting>,
    /// Row-major int32 little-endian `[tokens]`; present where the layer routes by token id. Unaligned.
    pub token_ids: Option<Bytes>,
    /// Whether shared experts are part of the output.
    pub shared_experts: bool,
    /// Whether the receipt carries ids and weights.
    pub return_routing: bool,
    /// Whether the receipt carries phase timings.
    pub return_timings: bool,
    /// When the answer is worth nothing any more.
    pub deadline: Option<Instant>,
}

/// Output rows and how they came about.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Row-major `[tokens, hidden]` in the request's dtype, little-endian.
    pub rows: Bytes,
    /// How it came about.
    pub receipt: Receipt,
}

/// How an answer came about.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// The steps the request took part in, in order.
    pub steps: Vec<StepId>,
    /// The generation that computed it.
    pub generation: Generation,
    /// The weights that computed it.
    pub weight_version: WeightVersion,
    /// This request's tokens on each rank, summed over its steps.
    pub tokens_per_rank: Vec<u32>,
    /// One entry per step if `return_timings`, else empty.
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

/// Phase timings of one step, of the slowest rank in each phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the phases")]
pub struct PhaseTimes {
    pub copy_in: Duration,
    pub gate: Duration,
    pub prepare: Duration,
    pub dispatch: Duration,
    pub experts: Duration,
    pub combine: Duration,
    pub copy_out: Duration,
}

impl PhaseTimes {
    /// In the order of [`Phase::ALL`](expertd_types::Phase::ALL).
    #[must_use]
    pub const fn all(&self) -> [Duration; 7] {
        [self.copy_in, self.gate, self.prepare, self.dispatch, self.experts, self.combine, self.copy_out]
    }
}

/// One step's timings in a receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTiming {
    /// Which step.
    pub step: StepId,
    /// Tokens of the whole step, all requests together.
    pub tokens: u32,
    /// How long each phase took on the slowest rank.
    pub phases: PhaseTimes,
    /// All phases but the copies between host and device, of the rank that took longest for them together.
    pub computed: Duration,
}

/// Why a request was not taken in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// More waits already than is admitted (RESOURCE_EXHAUSTED).
    #[error("{reason}; retry after {} ms", retry_after.as_millis())]
    Overloaded {
        /// What is full and how to give it more room.
        reason: String,
        /// When there is likely to be room.
        retry_after: Duration,
    },
    /// The service is draining and takes no new work (UNAVAILABLE).
    #[error("the service is draining and takes no new requests")]
    Draining,
    /// There is no EP group to run steps now: loading, re-forming or failed (UNAVAILABLE).
    #[error("{reason}")]
    NotReady {
        /// Why there is none.
        reason: String,
        /// When there is likely to be one.
        retry_after: Duration,
    },
    /// The deadline had passed on arrival (DEADLINE_EXCEEDED).
    #[error("the deadline passed before the request was taken in")]
    DeadlineExceeded,
}

/// Why a request that was taken in has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// A fault of its step or of its generation, or a drain that ran out of time (UNAVAILABLE: retrying is safe).
    #[error("{reason}")]
    Unavailable {
        /// What happened.
        reason: String,
        /// When a retry makes sense.
        retry_after: Duration,
    },
    /// The deadline passed before it was in a step, or before its last row was back (DEADLINE_EXCEEDED).
    #[error("the deadline passed before the answer was complete")]
    DeadlineExceeded,
    /// Steps with the request kept ending their generation, the last time while nothing else was computed (INTERNAL:
    /// retrying is harmful).
    #[error(
        "{lost_steps} steps with this request ended the EP group, the last one while it was alone; it is not tried again"
    )]
    Poisoned {
        /// Steps that were lost with the request in them.
        lost_steps: u32,
    },
}

/// What comes back for a submitted request. Dropping it cancels the request: it leaves the queue, or its rows are
/// thrown away if a step already has them.
pub type Pending = oneshot::Receiver<Result<Answer, StepError>>;

/// The future of a drain.
pub type DrainFuture = Pin<Box<dyn Future<Output = DrainReport> + Send + 'static>>;

/// What the API talks to: the scheduler, or a stand-in in tests.
pub trait Backend: Send + Sync + 'static {
    /// The loaded model as callers see it. Cheap: called for every request.
    fn model(&self) -> Arc<ModelInfo>;

    /// Takes a validated request in, without blocking.
    ///
    /// # Errors
    /// [`SubmitError`] when it is not admitted now.
    fn submit(&self, request: Request) -> Result<Pending, SubmitError>;

    /// State of the service, its group and its ranks.
    fn status(&self) -> ServiceStatus;

    /// Follows the state of the service; what health checks answer from.
    fn watch_state(&self) -> watch::Receiver<ServiceState>;

    /// Stops admitting at once. The future resolves when nothing is in flight or queued any more, at the latest after
    /// `timeout` (`None`: the service's own limit), when what is left ends [`StepError::Unavailable`]. The process
    /// then ends with exit code 0.
    fn drain(&self, timeout: Option<Duration>) -> DrainFuture;
}

/// The end of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// Requests that ended UNAVAILABLE because time ran out.
    pub requests_dropped: u64,
}

/// The loaded model as callers see it.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The served name.
    pub name: String,
    /// `model_type` of config.json.
    pub family: String,
    /// Of the loaded weights.
    pub weight_version: WeightVersion,
    /// The current generation; 0 before the first.
    pub generation: Generation,
    /// Elements of a token row.
    pub hidden: usize,
    /// Decoder layers of the checkpoint, with or without MoE.
    pub num_layers: usize,
    /// The decoder layers that this service holds.
    pub held: LayerRange,
    /// The layers with an MoE block that are served.
    pub layers: BTreeMap<LayerId, MoeLayerInfo>,
    /// Storage formats of the expert weights, e.g. `bf16`.
    pub weight_formats: Vec<String>,
    /// What callers must stay within.
    pub limits: Limits,
    /// Which rank owns what.
    pub placement: Vec<RankPlacement>,
}

/// One MoE layer as callers see it.
#[derive(Clone, Debug)]
pub struct MoeLayerInfo {
    /// Experts; ids are `0..num_experts`.
    pub num_experts: usize,
    /// Experts per token that the gate selects.
    pub top_k: usize,
    /// Largest k that callers may give with their own routing.
    pub max_k: usize,
    /// Width of one expert's MLP.
    pub expert_width: usize,
    /// Width of the shared experts together; 0 if there are none.
    pub shared_width: usize,
    /// The gate in words.
    pub gate: String,
    /// The gate as data (JSON).
    pub gate_json: String,
    /// Whether requests must carry token ids.
    pub routes_by_token_id: bool,
    /// Token ids are `0..vocabulary`; 0 where the layer does not route by token id.
    pub vocabulary: usize,
}

/// What callers must stay within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one request; larger than a step is legal and splits.
    pub max_tokens_per_request: usize,
    /// Tokens of one step over all ranks.
    pub max_tokens_per_step: usize,
    /// Tokens of one step on one rank.
    pub max_tokens_per_rank: usize,
    /// Largest gRPC message; see [`Limits::message_bytes`].
    pub max_message_bytes: usize,
    /// Concurrent calls on one connection.
    pub max_streams_per_connection: u32,
    /// Requests in flight on one `ForwardStream`; more wait in the transport.
    pub max_requests_per_stream: u32,
    /// Connections accepted at once.
    pub max_connections: u32,
    /// Request bytes held by the service at once, over all connections.
    pub max_bytes_in_flight: usize,
}

impl Limits {
    /// Bytes of the largest legal request or answer: f32 rows, ids, weights, token ids, and room for the rest.
    #[must_use]
    pub const fn message_bytes(max_tokens_per_request: usize, hidden: usize, max_k: usize) -> usize {
        const ENVELOPE: usize = 64 << 10;
        max_tokens_per_request * (hidden * 4 + max_k * 8 + 4) + ENVELOPE
    }
}

/// What one rank owns.
#[derive(Clone, Debug)]
pub struct RankPlacement {
    /// Which rank.
    pub rank: Rank,
    /// Its device in words, e.g. `cpu (4 cores)`.
    pub device: String,
    /// Per MoE layer: first expert and count.
    pub experts: Vec<(LayerId, u32, u32)>,
}

/// State of the service, its group and its ranks.
#[derive(Clone, Debug, Default)]
pub struct ServiceStatus {
    /// What it is doing.
    pub state: ServiceState,
    /// Why it is not serving, or why the last generation ended; may be empty.
    pub reason: String,
    /// Current generation; 0 before the first.
    pub generation: u64,
    /// Steps completed.
    pub steps_total: u64,
    /// Requests that are in a step.
    pub requests_in_flight: u64,
    /// Requests that wait for one.
    pub requests_queued: u64,
    /// Their tokens.
    pub tokens_queued: u64,
    /// Since the process started.
    pub uptime: Duration,
    /// One entry per rank.
    pub ranks: Vec<RankStatus>,
}

/// State of one rank.
#[derive(Clone, Debug)]
pub struct RankStatus {
    /// Which rank.
    pub rank: Rank,
    /// Its process; 0 when gone.
    pub pid: u32,
    /// Its device in words.
    pub device: String,
    /// What it is doing.
    pub state: RankState,
    /// Weight bytes in place.
    pub weight_bytes_loaded: u64,
    /// Weight bytes it will have.
    pub weight_bytes_total: u64,
}

/// What one rank is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// Reads and packs its weights, or joins the group.
    Loading,
    /// Runs steps.
    Ready,
    /// Its process has ended.
    Gone,
}
