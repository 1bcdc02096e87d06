//! Requests: the served model, and an endless supply of requests to it.

use std::sync::Arc;

use bytes::Bytes;
use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, GetModelResponse, MoeLayer, Routing, SharedExperts};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::Error;
use crate::args::{Args, Mode, RoutingSource};
use crate::check::EXTRA_ROWS;
use crate::connect::Client;
use crate::distribution::TokenCounts;
use crate::golden::Golden;
use crate::pool::{RoutingPool, RowPool};
use expertd_types::{DType, rows};

/// Range of token ids for layers that route by them; every vocabulary is larger.
const TOKEN_IDS: i32 = 64;

/// The served model and the content of requests. All workers share it.
#[derive(Debug)]
pub struct Workload {
    /// The answer of `GetModel`.
    pub model: GetModelResponse,
    /// The layers that requests name.
    pub layers: Vec<MoeLayer>,
    /// Element type of rows.
    pub dtype: DType,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Largest message, in bytes.
    pub message_bytes: usize,
    /// Largest number of rows that the service accepts per request.
    pub most_tokens: u32,
    golden: Option<Golden>,
    name: String,
    counts: TokenCounts,
    limit: u32,
    shared: SharedExperts,
    rows: RowPool,
    routing: Vec<RoutingPool>,
    timings: bool,
    walks: bool,
}

/// Calls `GetModel`.
///
/// # Errors
/// If the call fails.
pub async fn get_model(client: &mut Client, name: &str) -> Result<GetModelResponse, Error> {
    client.model(name).await.map_err(|status| Error::GetModel { status: Box::new(status) })
}

impl Workload {
    /// Fills the pools of random content.
    ///
    /// # Errors
    /// If the arguments do not fit the model, or the golden file is not usable.
    pub fn new(args: &Args, model: GetModelResponse) -> Result<Workload, Error> {
        let content = &args.content;
        let seed = content.seed.unwrap_or_else(rand::random);
        let mut rng = SmallRng::seed_from_u64(seed);
        let layers = pick_layers(&content.layers, &model)?;
        let limits = model.limits.unwrap_or_default();
        let limit = if limits.max_tokens_per_request == 0 { u32::MAX } else { limits.max_tokens_per_request };
        let most_tokens = limit;
        // A distribution without an upper bound needs one if the service states no limit.
        let limit = limit.min(content.tokens.largest(limit.min(1 << 16)));
        let dtype = content.dtype;
        if !model.dtypes.is_empty() && !model.dtypes.contains(&(dtype as i32)) {
            return Err(Error::Unfit(format!("{} does not take {} rows", model.name, dtype)));
        }
        let hidden = model.hidden as usize;
        let golden =
            args.checks.check_golden.as_deref().map(|path| Golden::read(path, hidden)).transpose()?;
        if let Some(golden) = &golden
            && !layers.iter().any(|layer| golden.layers.contains_key(&layer.layer))
        {
            return Err(Error::Unfit("the golden file has none of the layers under load".to_owned()));
        }
        let largest = limit as usize;
        let routing = match content.routing {
            RoutingSource::Gate => Vec::new(),
            RoutingSource::Zipf(exponent) => layers
                .iter()
                .map(|layer| RoutingPool::zipf(layer.num_experts, layer.top_k, exponent, largest, &mut rng))
                .collect(),
            RoutingSource::Reuse => layers
                .iter()
                .map(|layer| RoutingPool::reuse(layer.num_experts, layer.top_k, &mut rng))
                .collect(),
        };
        let shared =
            if content.exclude_shared_experts { SharedExperts::Exclude } else { SharedExperts::Include };
        Ok(Workload {
            layers,
            dtype,
            seed,
            message_bytes: usize::try_from(limits.max_message_bytes)
                .unwrap_or(usize::MAX)
                .max(CONTROL_MESSAGE_BYTES),
            golden,
            most_tokens,
            name: args.model.clone(),
            counts: content.tokens.clone(),
            limit,
            shared,
            // Checks draw rows as well.
            rows: RowPool::new(dtype, largest.max(EXTRA_ROWS) * hidden, &mut rng),
            routing,
            timings: args.output.timings,
            walks: args.shape.mode == Mode::Decode,
            model,
        })
    }

    /// The requests of worker number `worker`; each worker has its own random numbers. A share `check` of the requests
    /// is marked for checking.
    #[must_use]
    pub fn source(self: &Arc<Self>, worker: u64, check: f64) -> RequestSource {
        let rng = SmallRng::seed_from_u64(self.seed ^ (worker + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let sequences = vec![Vec::new(); self.routing.len()];
        RequestSource { workload: Arc::clone(self), check, rng, next_layer: 0, walk_tokens: 0, sequences }
    }

    /// Whether requests walk all layers in order.
    #[must_use]
    pub const fn walks(&self) -> bool {
        self.walks
    }

    /// Whether answers include the shared experts.
    #[must_use]
    pub const fn shared(&self) -> SharedExperts {
        self.shared
    }

    /// Whether requests carry routing, apart from recorded rows.
    #[must_use]
    pub const fn gives_routing(&self) -> bool {
        !self.routing.is_empty()
    }

    /// Largest number of rows of a request of this workload, checks included.
    #[must_use]
    pub fn largest_request(&self) -> usize {
        (self.limit as usize).max(2 * EXTRA_ROWS)
    }

    /// Size of the answer to `tokens` rows, in bytes.
    #[must_use]
    pub fn answer_bytes(&self, tokens: u32, dtype: i32) -> usize {
        let size = if dtype == DType::F32 as i32 { 4 } else { 2 };
        tokens as usize * self.model.hidden as usize * size
    }
}

/// A request, and how its answer is checked.
#[derive(Clone, Debug)]
pub struct PlannedRequest {
    /// The request.
    pub request: ForwardRequest,
    /// How its answer is checked.
    pub purpose: Purpose,
}

/// How an answer is checked.
#[derive(Clone, Debug)]
pub enum Purpose {
    /// By its size and receipt.
    Load,
    /// By its size and receipt, and some of its rows are sent again in another batch.
    Sampled,
    /// By comparison with the recorded answer. The latency figures exclude it, because the recording determines its
    /// size.
    Known(Vec<f32>),
}

/// An endless supply of requests.
#[derive(Debug)]
pub struct RequestSource {
    workload: Arc<Workload>,
    check: f64,
    rng: SmallRng,
    /// Index of the next layer of a walk.
    next_layer: usize,
    /// Rows of the present walk, which are the same in all layers.
    walk_tokens: u32,
    /// `[layers]`: places of this worker's sequences in the pools of routing.
    sequences: Vec<Vec<usize>>,
}

impl RequestSource {
    /// The next request.
    pub fn next_request(&mut self) -> PlannedRequest {
        let purpose = self.rng.random::<f64>();
        let check = self.check;
        if purpose >= check {
            return PlannedRequest { request: self.random(false), purpose: Purpose::Load };
        }
        // Recorded rows are of one layer, which need not be the next one of a walk.
        if purpose < check / 2.0
            && !self.workload.walks
            && let Some(known) = self.known()
        {
            return known;
        }
        PlannedRequest { request: self.random(true), purpose: Purpose::Sampled }
    }

    /// Lets the next request begin a walk.
    pub const fn begin_walk(&mut self) {
        self.next_layer = 0;
    }

    /// A request of random rows.
    pub fn random(&mut self, sampled: bool) -> ForwardRequest {
        let workload = Arc::clone(&self.workload);
        let layers = workload.layers.len();
        let (index, tokens) = if workload.walks {
            let at = self.next_layer;
            self.next_layer = (at + 1) % layers;
            if at == 0 {
                self.walk_tokens = workload.counts.draw(&mut self.rng, workload.limit);
            }
            (at, self.walk_tokens)
        } else {
            (self.rng.random_range(0..layers), workload.counts.draw(&mut self.rng, workload.limit))
        };
        let layer = &workload.layers[index];
        let elements = tokens as usize * workload.model.hidden as usize;
        let routing = workload.routing.get(index).map(|pool| {
            let (topk_ids, topk_weights) =
                pool.draw(tokens as usize, &mut self.sequences[index], &mut self.rng);
            Routing { topk_ids, topk_weights, k: layer.top_k }
        });
        ForwardRequest {
            model: workload.name.clone(),
            layer: layer.layer,
            tokens,
            dtype: workload.dtype as i32,
            payload: Some(Payload::Inline(workload.rows.draw(elements, &mut self.rng))),
            routing,
            token_ids: if layer.routes_by_token_id { self.token_ids(tokens) } else { Bytes::new() },
            shared_experts: workload.shared as i32,
            expected_weight_version: None,
            expected_weight_fingerprint: String::new(),
            return_routing: sampled,
            return_timings: workload.timings,
        }
    }

    /// Random rows of the workload's element type.
    pub fn rows(&mut self, tokens: usize) -> Bytes {
        let workload = Arc::clone(&self.workload);
        workload.rows.draw(tokens * workload.model.hidden as usize, &mut self.rng)
    }

    /// A random number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.rng.random_range(0..end.max(1))
    }

    fn token_ids(&mut self, tokens: u32) -> Bytes {
        (0..tokens).flat_map(|_| self.rng.random_range(0..TOKEN_IDS).to_le_bytes()).collect()
    }

    /// A request of some recorded rows of a recorded layer, in f32, routed by the service's gate.
    fn known(&mut self) -> Option<PlannedRequest> {
        let workload = Arc::clone(&self.workload);
        let golden = workload.golden.as_ref()?;
        let recorded = workload
            .layers
            .iter()
            .filter(|layer| golden.layers.contains_key(&layer.layer))
            .collect::<Vec<_>>();
        let layer = recorded.get(self.below(recorded.len()))?;
        let rows = &golden.layers[&layer.layer];
        let hidden = workload.model.hidden as usize;
        let first = self.below(rows.tokens);
        let count = 1 + self.below((rows.tokens - first).min(workload.limit as usize));
        let span = first * hidden..(first + count) * hidden;
        let ids = golden.token_ids.get(first..first + count).unwrap_or_default();
        let request = ForwardRequest {
            model: workload.name.clone(),
            layer: layer.layer,
            tokens: u32::try_from(count).ok()?,
            dtype: DType::F32 as i32,
            payload: Some(Payload::Inline(rows::encode(&rows.input[span.clone()], DType::F32))),
            token_ids: ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            ..ForwardRequest::default()
        };
        Some(PlannedRequest { request, purpose: Purpose::Known(rows.output[span].to_vec()) })
    }
}

fn pick_layers(wanted: &[u32], model: &GetModelResponse) -> Result<Vec<MoeLayer>, Error> {
    if wanted.is_empty() {
        if model.moe_layers.is_empty() {
            return Err(Error::Unfit(format!("{} has no MoE layer", model.name)));
        }
        return Ok(model.moe_layers.clone());
    }
    let find = |&wanted: &u32| {
        let found = model.moe_layers.iter().find(|layer| layer.layer == wanted);
        found.cloned().ok_or_else(|| {
            let all = model.moe_layers.iter().map(|moe| moe.layer.to_string()).collect::<Vec<_>>().join(", ");
            Error::Unfit(format!(
                "layer {wanted} is not an MoE layer of {}; the MoE layers are {all}",
                model.name
            ))
        })
    };
    wanted.iter().map(find).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn checks_have_enough_rows_when_requests_are_small() {
        let args = Args::parse_from(["expertd-loadtest", "--tokens", "1", "--seed", "3"]);
        let layer = MoeLayer { num_experts: 4, top_k: 2, ..MoeLayer::default() };
        let model = GetModelResponse { hidden: 2048, moe_layers: vec![layer], ..GetModelResponse::default() };
        let mut source = Arc::new(Workload::new(&args, model).unwrap()).source(0, 0.0);
        for _ in 0..20_000 {
            assert_eq!(source.rows(EXTRA_ROWS).len(), EXTRA_ROWS * 2048 * 2);
        }
    }
}
