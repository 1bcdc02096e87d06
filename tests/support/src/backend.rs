//! A fake backend that echoes rows and can be told to fail.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_core::backend::*;
use expertd_core::failure::Failure;
use expertd_types::{
    Coverage, Generation, LayerId, LayerRange, Rank, StepId, WeightFingerprint, WeightVersion,
};
use tokio::sync::{oneshot, watch};

/// Echoes immediately.
pub const ECHO: u32 = 1;
/// Holds requests until [`Fake::release`].
pub const HOLD: u32 = 2;
/// Fails every step.
pub const FAULT: u32 = 3;
/// Routes by token id and echoes.
pub const BY_TOKEN_ID: u32 = 4;
/// Drops requests without an answer.
pub const ABANDON: u32 = 5;
/// A layer without an MoE block.
pub const DENSE: u32 = 0;
/// A layer that another service holds.
pub const ELSEWHERE: u32 = 6;
const HELD_LAST: u32 = 5;
pub const NUM_LAYERS: usize = 7;

pub const EXPERTS: usize = 70;
pub const TOP_K: usize = 2;
pub const MAX_K: usize = 4;
pub const VOCABULARY: usize = 100;
pub const WEIGHT_VERSION: u64 = 7;
/// The fingerprint of its weights.
pub const WEIGHT_FINGERPRINT: WeightFingerprint =
    WeightFingerprint { coverage: Coverage::Sampled, digest: [7; 16] };

type Waiting = (Request, oneshot::Sender<Result<Answer, Failure>>);

pub struct Fake {
    model: Arc<ModelInfo>,
    refuse: Mutex<Option<Failure>>,
    held: Mutex<Vec<Waiting>>,
    steps: AtomicU64,
    pub submitted: AtomicUsize,
    pub submitted_bytes: AtomicUsize,
    state: watch::Sender<ServiceState>,
}

pub fn limits(hidden: usize, max_tokens: usize) -> Limits {
    Limits {
        max_tokens_per_request: max_tokens,
        max_tokens_per_step: 64,
        max_tokens_per_rank: 32,
        max_message_bytes: Limits::message_bytes(max_tokens, hidden, MAX_K),
        max_streams_per_connection: 64,
        max_requests_per_stream: 16,
        max_connections: 32,
        max_bytes_in_flight: 64 << 20,
    }
}

impl Fake {
    pub fn new(hidden: usize, limits: Limits) -> Arc<Fake> {
        let layer = |by_token_id| MoeLayerInfo {
            num_experts: EXPERTS,
            top_k: TOP_K,
            max_k: MAX_K,
            expert_width: 16,
            shared_width: 0,
            gate: "softmax, then the two largest".to_owned(),
            gate_json: "{}".to_owned(),
            routes_by_token_id: by_token_id,
            vocabulary: if by_token_id { VOCABULARY } else { 0 },
        };
        let layers: BTreeMap<_, _> =
            (1..=HELD_LAST).map(|id| (LayerId(id), layer(id == BY_TOKEN_ID))).collect();
        let model = ModelInfo {
            name: "fake".to_owned(),
            family: "mixtral".to_owned(),
            weight_version: WeightVersion(WEIGHT_VERSION),
            weight_fingerprint: WEIGHT_FINGERPRINT,
            generation: Generation(3),
            hidden,
            num_layers: NUM_LAYERS,
            held: LayerRange { first: LayerId(0), last: LayerId(HELD_LAST) },
            layers,
            weight_formats: vec!["bf16".to_owned()],
            limits,
            sources: 2,
            placement: (0..2)
                .map(|rank| RankPlacement {
                    rank: Rank(rank),
                    device: "cpu".to_owned(),
                    experts: vec![(LayerId(1), rank * 35, 35)],
                })
                .collect(),
        };
        Arc::new(Fake {
            model: Arc::new(model),
            refuse: Mutex::new(None),
            held: Mutex::default(),
            steps: AtomicU64::new(1),
            submitted: AtomicUsize::new(0),
            submitted_bytes: AtomicUsize::new(0),
            state: watch::channel(ServiceState::Serving).0,
        })
    }

    pub fn refuse(&self, error: Option<Failure>) {
        *self.refuse.lock().unwrap() = error;
    }

    pub fn set_state(&self, state: ServiceState) {
        self.state.send_replace(state);
    }

    /// Number of held requests that are not cancelled.
    pub fn wanted(&self) -> usize {
        self.held.lock().unwrap().iter().filter(|(_, sender)| !sender.is_closed()).count()
    }

    pub fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// Answers the held requests, last in first out.
    pub fn release(&self) {
        let held: Vec<_> = self.held.lock().unwrap().drain(..).collect();
        for (request, sender) in held.into_iter().rev() {
            let _ = sender.send(Ok(self.answer(&request)));
        }
    }

    fn answer(&self, request: &Request) -> Answer {
        let step = StepId(self.steps.fetch_add(1, Ordering::Relaxed));
        let timings = StepTiming {
            step,
            tokens: request.tokens as u32,
            phases: Default::default(),
            computed: Duration::ZERO,
            slot_version: 17,
            formed: Instant::now(),
            done: Instant::now(),
        };
        let (topk_ids, topk_weights) = match &request.routing {
            Some(routing) if request.return_routing => {
                routing.as_given.clone().unwrap_or_else(|| (routing.ids.clone(), routing.weights.clone()))
            }
            _ => (Bytes::new(), Bytes::new()),
        };
        Answer {
            // The rows are copied, as staging copies them, and the request's rows are dropped.
            rows: Bytes::copy_from_slice(&request.rows),
            receipt: Receipt {
                steps: vec![step],
                generation: self.model.generation,
                weight_version: self.model.weight_version,
                weight_fingerprint: self.model.weight_fingerprint,
                tokens_per_rank: vec![request.tokens as u32, 0],
                timings: vec![timings],
                topk_ids,
                topk_weights,
                queue_time: Duration::from_micros(5),
                step_time: Duration::from_micros(50),
            },
        }
    }
}

impl Backend for Fake {
    fn model(&self) -> Arc<ModelInfo> {
        Arc::clone(&self.model)
    }

    fn submit(&self, request: Request) -> Result<Pending, Failure> {
        assert_eq!(request.rows.len(), request.tokens * self.model.hidden * request.dtype.size());
        if let Some(error) = self.refuse.lock().unwrap().clone() {
            return Err(error);
        }
        self.submitted.fetch_add(1, Ordering::SeqCst);
        self.submitted_bytes.fetch_add(request.rows.len(), Ordering::SeqCst);
        let (sender, receiver) = oneshot::channel();
        match request.layer.0 {
            HOLD => self.held.lock().unwrap().push((request, sender)),
            ABANDON => drop(sender),
            FAULT => {
                let reason = "rank 1 ended".to_owned();
                let retry_after = Duration::from_millis(300);
                let _ = sender.send(Err(Failure::Unavailable { reason, retry_after }));
            }
            _ => {
                let _ = sender.send(Ok(self.answer(&request)));
            }
        }
        Ok(receiver)
    }

    fn status(&self) -> ServiceStatus {
        ServiceStatus {
            state: *self.state.borrow(),
            reason: "because".to_owned(),
            generation: 3,
            steps_total: self.steps.load(Ordering::Relaxed),
            requests_in_flight: 1,
            requests_queued: 2,
            tokens_queued: 3,
            uptime: Duration::from_secs(4),
            reload: None,
            tier: Some(TierStatus {
                layers: vec![(LayerId(ECHO), TierRows { source: 1, copied: 2, cpu: 5 })],
                copied_bytes: 9,
            }),
            sessions: Vec::new(),
            weight_folder: "/models/fake".into(),
            ranks: vec![RankStatus {
                rank: Rank(0),
                pid: 99,
                device: "cpu".to_owned(),
                state: RankState::Ready,
                weight_bytes_loaded: 10,
                weight_bytes_total: 20,
                usage: None,
            }],
        }
    }

    fn expert_rows(&self) -> ExpertRows {
        ExpertRows {
            layers: vec![LayerRows {
                layer: LayerId(4),
                ranks: vec![vec![1, 0, 7], vec![2, 0, 0]],
                source_experts: None,
            }],
        }
    }

    fn watch_state(&self) -> watch::Receiver<ServiceState> {
        self.state.subscribe()
    }

    fn reload(&self, request: ReloadRequest) -> ReloadFuture {
        Box::pin(async move { Err(format!("a fake has no weights to load for {request:?}")) })
    }

    fn drain(&self, timeout: Option<Duration>) -> DrainFuture {
        self.set_state(ServiceState::Draining);
        self.refuse(Some(Failure::Draining));
        Box::pin(async move {
            let requests_dropped = timeout.map_or(0, |timeout| timeout.as_millis() as u64);
            DrainReport { requests_dropped }
        })
    }
}
