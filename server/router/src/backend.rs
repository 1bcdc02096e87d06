//! The interface between the API and the step loop: validated requests, answers, receipts, and the [`Backend`] trait.
//!
//! It consists of plain data and one trait, so that the API does not depend on the layers below, and tests can replace
//! them.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
pub use expertd_scheduler::{ClientKey, ServiceState};
use tokio::sync::{oneshot, watch};

pub use crate::expert_rows::{ExpertRows, LayerRows};
pub use crate::sessions::SessionStatus;
use expertd_types::ChunkedBytes;
use expertd_types::{
    DType, DeviceUsage, ExpertPlacement, Generation, LayerId, LayerPlacement, LayerRange, Rank, StepId,
    WeightFingerprint, WeightVersion,
};

/// Number of a request, unique within the process; logs and spans carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

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
    /// A layer with an MoE block.
    pub layer: LayerId,
    /// Number of rows, `1..=Limits::max_tokens_per_request`.
    pub tokens: usize,
    /// Element type of the rows, little-endian.
    pub dtype: DType,
    /// Row-major `[tokens, hidden]`, exactly `tokens * hidden * dtype.size()` bytes, in the chunks in which they arrived.
    /// Unaligned. Empty for a request of a session, whose rows lie in the session's memory.
    pub rows: ChunkedBytes,
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
    /// Whether the receipt carries phase timings.
    pub return_timings: bool,
    /// Time after which the caller does not want the answer.
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

/// Duration of each phase of one step on the slowest rank.
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
    /// Id of the step.
    pub step: StepId,
    /// Tokens of the whole step, all requests together.
    pub tokens: u32,
    /// Duration of each phase on the slowest rank.
    pub phases: PhaseTimes,
    /// The largest total of any rank over all phases except the copies between host and device.
    pub computed: Duration,
    /// When the step formed.
    pub formed: Instant,
    /// When its last row was back at the router.
    pub done: Instant,
}

/// Why a request was not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full (RESOURCE_EXHAUSTED).
    #[error("{reason}; retry after {} ms", retry_after.as_millis())]
    Overloaded {
        /// The limit that was reached and how to raise it.
        reason: String,
        /// Expected time until there is room.
        retry_after: Duration,
    },
    /// The service is draining and admits no requests (UNAVAILABLE).
    #[error("the service is draining and admits no new requests")]
    Draining,
    /// No EP group can run steps: it is loading, re-forming or failed (UNAVAILABLE).
    #[error("{reason}")]
    NotReady {
        /// Why there is no group.
        reason: String,
        /// Expected time until there is a group.
        retry_after: Duration,
    },
    /// The deadline had passed on arrival (DEADLINE_EXCEEDED).
    #[error("the deadline passed before the request was admitted")]
    DeadlineExceeded,
}

/// Why an admitted request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// A fault of its step or of its generation, or a drain that ran out of time (UNAVAILABLE: retrying is safe).
    #[error("{reason}")]
    Unavailable {
        /// What happened.
        reason: String,
        /// Expected time until a retry succeeds.
        retry_after: Duration,
    },
    /// Other weights were loaded while the request waited (FAILED_PRECONDITION).
    #[error("the call expects weight version {expected}, and version {loaded} was loaded while it waited")]
    OtherWeights {
        /// The expected version.
        expected: WeightVersion,
        /// The loaded version.
        loaded: WeightVersion,
    },
    /// The deadline passed before the last row was back at the router (DEADLINE_EXCEEDED).
    #[error("the deadline passed before the answer was complete")]
    DeadlineExceeded,
    /// Several steps with the request ended their generation, the last one with no other request in it (INTERNAL: retrying is
    /// harmful).
    #[error(
        "{lost_steps} steps with this request ended the EP group, and no other request was in the last one; it will not be retried"
    )]
    Poisoned {
        /// Number of lost steps that contained the request.
        lost_steps: u32,
    },
}

/// The future result of a submitted request. Dropping it cancels the request: it leaves the queue, or its rows are discarded
/// when their step completes.
pub type Pending = oneshot::Receiver<Result<Answer, StepError>>;

/// The future of a drain.
pub type DrainFuture = Pin<Box<dyn Future<Output = DrainReport> + Send + 'static>>;

/// The service below the API: the step loop, or a replacement in tests.
pub trait Backend: Send + Sync + 'static {
    /// Description of the loaded model. Called for every request, so it must be cheap.
    fn model(&self) -> Arc<ModelInfo>;

    /// Submits a validated request without blocking.
    ///
    /// # Errors
    /// [`SubmitError`] if it is not admitted.
    fn submit(&self, request: Request) -> Result<Pending, SubmitError>;

    /// State of the service, its group and its ranks.
    fn status(&self) -> ServiceStatus;

    /// Follows the state of the service, for health checks.
    fn watch_state(&self) -> watch::Receiver<ServiceState>;

    /// Stops admitting requests at once. The future resolves when no request is queued or in flight, at the latest after
    /// `timeout` (`None`: the service's own limit); the remaining requests then fail with [`StepError::Unavailable`]. The process
    /// ends with exit code 0 afterwards.
    fn drain(&self, timeout: Option<Duration>) -> DrainFuture;

    /// The rows that experts have computed since the service started. Empty if the backend does not count them.
    fn expert_rows(&self) -> ExpertRows {
        ExpertRows::default()
    }

    /// Loads weights, or the present ones with another placement, and lets them serve. The future resolves when they serve, or
    /// with the reason why the earlier weights go on.
    fn reload(&self, request: ReloadRequest) -> ReloadFuture;
}

/// What a reload loads.
#[derive(Clone, Debug, Default)]
pub struct ReloadRequest {
    /// Folder of the checkpoint; `None`: the one that the service was started with.
    pub folder: Option<PathBuf>,
    /// The ranks that are to own the experts.
    pub placement: PlacementChange,
}

/// The placement that a reload asks for.
#[derive(Clone, Debug, Default)]
pub enum PlacementChange {
    /// The present one.
    #[default]
    Keep,
    /// Contiguous ranges.
    Contiguous,
    /// Another one.
    Given(ExpertPlacement),
}

/// The future of a reload.
pub type ReloadFuture = Pin<Box<dyn Future<Output = Result<ReloadReport, String>> + Send + 'static>>;

/// The end of a reload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReloadReport {
    /// Number of the weights that serve now.
    pub weight_version: WeightVersion,
    /// Their fingerprint.
    pub weight_fingerprint: WeightFingerprint,
    /// From the start of the loaders until the weights were packed.
    pub load_time: Duration,
    /// From the end of the last generation with the earlier weights until the first one with these served.
    pub pause: Duration,
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// Number of requests that failed because the time ran out.
    pub requests_dropped: u64,
}

/// Description of the loaded model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The served name.
    pub name: String,
    /// `model_type` of config.json.
    pub family: String,
    /// Version of the loaded weights.
    pub weight_version: WeightVersion,
    /// Fingerprint of the loaded weights.
    pub weight_fingerprint: WeightFingerprint,
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
    /// Limits on requests.
    pub limits: Limits,
    /// Experts of each rank.
    pub placement: Vec<RankPlacement>,
}

/// Description of one MoE layer.
#[derive(Clone, Debug)]
pub struct MoeLayerInfo {
    /// Number of experts; ids are `0..num_experts`.
    pub num_experts: usize,
    /// Experts per token that the gate selects.
    pub top_k: usize,
    /// Largest k that callers may give with their own routing.
    pub max_k: usize,
    /// Intermediate size of one expert.
    pub expert_width: usize,
    /// Intermediate size of all shared experts together; 0 if there are none.
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

/// Limits on requests and connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one request. A request larger than a step is split.
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

/// The experts of one rank.
#[derive(Clone, Debug)]
pub struct RankPlacement {
    /// The rank.
    pub rank: Rank,
    /// Its device in words, e.g. `cpu (4 cores)`.
    pub device: String,
    /// Ranges of consecutive experts that the rank owns: layer, first expert and count. Each MoE layer has at least one range, which
    /// is empty if the rank owns none of the layer's experts.
    pub experts: Vec<(LayerId, u32, u32)>,
}

/// The ranges of experts that a rank owns by a placement (`None`: contiguous ranges); see [`RankPlacement::experts`].
#[must_use]
pub fn owned_ranges(
    layers: &BTreeMap<LayerId, MoeLayerInfo>,
    placement: Option<&ExpertPlacement>,
    rank: Rank,
    ranks: usize,
) -> Vec<(LayerId, u32, u32)> {
    let mut owned = Vec::new();
    for (&layer, info) in layers {
        let given = placement.and_then(|placement| placement.layer(layer)).cloned();
        let placed = given.unwrap_or_else(|| LayerPlacement::contiguous(info.num_experts, ranks));
        let ranges = placed.ranges_of(rank);
        if ranges.is_empty() {
            owned.push((layer, 0, 0));
        }
        owned.extend(ranges.into_iter().map(|(first, count)| (layer, first, count)));
    }
    owned
}

/// State of the service, its group and its ranks.
#[derive(Clone, Debug, Default)]
pub struct ServiceStatus {
    /// Current state.
    pub state: ServiceState,
    /// Why it is not serving, or why the last generation ended; may be empty.
    pub reason: String,
    /// Current generation; 0 before the first.
    pub generation: u64,
    /// Steps completed.
    pub steps_total: u64,
    /// Requests that are in a step.
    pub requests_in_flight: u64,
    /// Requests that wait for a step.
    pub requests_queued: u64,
    /// Tokens of the requests that wait.
    pub tokens_queued: u64,
    /// Time since the process started.
    pub uptime: Duration,
    /// One entry per rank.
    pub ranks: Vec<RankStatus>,
    /// Bytes loaded and bytes to load of a reload that is under way.
    pub reload: Option<(u64, u64)>,
    /// One entry per open session.
    pub sessions: Vec<SessionStatus>,
}

/// State of one rank.
#[derive(Clone, Debug)]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// Process id; 0 if it has ended.
    pub pid: u32,
    /// Its device in words.
    pub device: String,
    /// Current state.
    pub state: RankState,
    /// Weight bytes loaded so far.
    pub weight_bytes_loaded: u64,
    /// Weight bytes of its share.
    pub weight_bytes_total: u64,
    /// Usage of its device; `None` if the device reports none (CPUs, parts of a GPU) or not yet.
    pub usage: Option<DeviceUsage>,
}

/// State of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// Reads and packs its weights, or joins the group.
    Loading,
    /// Runs steps.
    Ready,
    /// Its process has ended.
    Gone,
}
