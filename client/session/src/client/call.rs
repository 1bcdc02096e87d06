//! What a call computes, and how its answer was computed.

use std::time::Duration;

use expertd_types::DType;

use crate::wire::{CompletionRecord, MAX_RANKS};

/// Routing chosen by the caller, applied verbatim.
#[derive(Clone, Copy, Debug)]
pub struct GivenRouting<'a> {
    /// Experts per token.
    pub k: usize,
    /// `[tokens, k]`, as `Routing.topk_ids` of gRPC.
    pub ids: &'a [i32],
    /// `[tokens, k]`, as `Routing.topk_weights` of gRPC.
    pub weights: &'a [f32],
}

/// The arguments of a call.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Decoder layer.
    pub layer: u32,
    /// Number of rows.
    pub tokens: usize,
    /// Element type of rows and output.
    pub dtype: DType,
    /// `None`: the service's gate chooses.
    pub routing: Option<GivenRouting<'a>>,
    /// `[tokens]`; required by layers that route by token id.
    pub token_ids: Option<&'a [i32]>,
    /// Whether the output includes the shared experts.
    pub shared_experts: bool,
    /// The weight version that must be loaded.
    pub expected_weight_version: Option<u64>,
    /// `Some`: the applied ids and weights are returned, for this number of experts per token.
    pub return_routing: Option<usize>,
    /// Deadline of the call, from the time at which the service takes it.
    pub timeout: Option<Duration>,
}

impl Call<'_> {
    /// A call with the service's gate, shared experts and no deadline.
    #[must_use]
    pub const fn new(layer: u32, tokens: usize, dtype: DType) -> Self {
        Call {
            layer,
            tokens,
            dtype,
            routing: None,
            token_ids: None,
            shared_experts: true,
            expected_weight_version: None,
            return_routing: None,
            timeout: None,
        }
    }
}

/// How an answer was computed; the fields are those of the gRPC receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The generation that computed the answer.
    pub generation: u64,
    /// The weights that computed it.
    pub weight_version: u64,
    /// Their fingerprint.
    pub weight_fingerprint: String,
    /// First and last step.
    pub steps: (u64, u64),
    /// Number of steps.
    pub step_count: u32,
    /// The call's tokens on each rank.
    pub tokens_per_rank: Vec<u32>,
    /// From admission until the first step formed.
    pub queue_time: Duration,
    /// From the forming of the first step until the last row was complete.
    pub step_time: Duration,
    /// Duration of each phase of the steps, on the slowest rank.
    pub phases: [Duration; 7],
}

impl From<&CompletionRecord> for Receipt {
    fn from(record: &CompletionRecord) -> Self {
        Receipt {
            generation: record.generation,
            weight_version: record.weight_version,
            weight_fingerprint: record.text(),
            steps: (record.first_step, record.last_step),
            step_count: record.steps,
            tokens_per_rank: record.tokens_per_rank[..(record.ranks as usize).min(MAX_RANKS)].to_vec(),
            queue_time: Duration::from_nanos(record.queue_ns),
            step_time: Duration::from_nanos(record.step_ns),
            phases: record.phase_ns.map(Duration::from_nanos),
        }
    }
}
