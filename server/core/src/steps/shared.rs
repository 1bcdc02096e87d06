//! What callers and the step loop share.

use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use expertd_ipc::control::CheckpointSource;
use expertd_ipc::{RouterBell, RowCounts, RowCountsShape};
use expertd_scheduler::{Inbox, Time};
use expertd_shm::RegionError;
use expertd_types::{Generation, LayerId, MemoryId, WeightFingerprint, WeightVersion};
use tokio::sync::{oneshot, watch};

use super::activity::StepActivity;
use super::caller::{Caller, ClientMemory};
use super::config::{ReloadContext, SchedulerConfig};
use crate::backend::{
    DrainReport, ExpertRows, LayerRows, ModelInfo, PlacementChange, ReloadReport, Request, ServiceState,
    ServiceStatus, SessionStatus, TierRows, TierStatus, owned_ranges,
};
use crate::tier_rows::TierCounts;

/// A checked reload on its way to the step loop.
pub(super) struct ReloadMail {
    pub(super) source: CheckpointSource,
    /// The version that served when the reload was checked.
    pub(super) checked_against: WeightVersion,
    pub(super) has_room: bool,
    pub(super) reply: oneshot::Sender<Result<ReloadReport, String>>,
}

/// News of a client's memory on its way to the step loop.
#[derive(Debug)]
pub(super) enum MemoryMail {
    /// Ranks are to attach it; the step loop holds it until no rank has it any more.
    Opened(Box<dyn ClientMemory>),
    /// No further call names it.
    Ended(MemoryId),
}

/// The parts of a request that its [`Submission`] does not hold.
pub(super) struct Payload {
    pub(super) request: Request,
    pub(super) caller: Box<dyn Caller>,
}

/// State that callers and the step loop share under a lock.
pub(super) struct Front {
    pub(super) inbox: Inbox<Payload>,
    /// Senders of the results of drains.
    pub(super) drain_waiters: Vec<oneshot::Sender<DrainReport>>,
    /// Reloads that were asked for.
    pub(super) reloads: Vec<ReloadMail>,
    /// Memories of clients that were opened or have ended.
    pub(super) memories: Vec<MemoryMail>,
    /// When a request was admitted last while none waited.
    pub(super) waiting_since: Instant,
    /// Whether the step loop has ended.
    pub(super) has_ended: bool,
}

/// State that callers and the step loop share.
pub(super) struct Shared {
    front: Mutex<Front>,
    /// Set when callers leave something for the step loop, which therefore needs no lock to see that there is nothing.
    has_mail: AtomicBool,
    pub(super) bell: RouterBell,
    pub(super) model: RwLock<Arc<ModelInfo>>,
    pub(super) state: watch::Sender<ServiceState>,
    pub(super) status: Mutex<ServiceStatus>,
    pub(super) steps_total: AtomicU64,
    pub(super) activity: Mutex<StepActivity>,
    pub(super) row_counts: RowCounts,
    /// Where a mixed group has computed these rows. Locked before `model`, which it must be up to date with.
    tier_counts: Mutex<TierCounts>,
    /// Bytes of weights that ranks have copied from host memory.
    pub(super) copied_bytes: AtomicU64,
    pub(super) config: SchedulerConfig,
    /// Seed of the random choices of the inbox and the step loop.
    pub(super) seed: u64,
    pub(super) reload: ReloadContext,
    /// Version and source of the weights that serve, or served last.
    serving: Mutex<(WeightVersion, CheckpointSource)>,
    pub(super) started: Instant,
    /// Lists the open sessions; unset where there are none.
    pub(super) sessions: OnceLock<Box<dyn Fn() -> Vec<SessionStatus> + Send + Sync>>,
}

impl Shared {
    pub(super) fn new(
        model: ModelInfo,
        config: SchedulerConfig,
        reload: ReloadContext,
    ) -> Result<Self, RegionError> {
        let seed = RandomState::new().hash_one(std::process::id());
        let inbox = Inbox::new(config.max_queued_tokens, seed);
        let row_counts = RowCounts::create(RowCountsShape {
            ranks: reload.devices.len() as u32,
            layers: model.num_layers as u32,
            experts: model.layers.values().map(|layer| layer.num_experts).max().unwrap_or(0) as u32,
        })?;
        let serving = (model.weight_version, reload.checkpoint.clone());
        Ok(Shared {
            front: Mutex::new(Front {
                inbox,
                drain_waiters: Vec::new(),
                reloads: Vec::new(),
                memories: Vec::new(),
                waiting_since: Instant::now(),
                has_ended: false,
            }),
            has_mail: AtomicBool::new(false),
            bell: RouterBell::create()?,
            model: RwLock::new(Arc::new(model)),
            state: watch::Sender::new(ServiceState::Loading),
            status: Mutex::new(ServiceStatus::default()),
            steps_total: AtomicU64::new(0),
            activity: Mutex::new(StepActivity { at: Instant::now(), in_flight: false }),
            row_counts,
            tier_counts: Mutex::default(),
            copied_bytes: AtomicU64::new(0),
            config,
            seed,
            serving: Mutex::new(serving),
            reload,
            started: Instant::now(),
            sessions: OnceLock::new(),
        })
    }

    /// Locks the shared state. A panic under the lock leaves valid counts, because a single statement writes each of them.
    pub(super) fn front(&self) -> MutexGuard<'_, Front> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a reload for the step loop. One that finds the step loop gone is dropped, which its caller notices.
    pub(super) fn ask_to_reload(&self, mail: ReloadMail) {
        let mut front = self.front();
        if !front.has_ended {
            front.reloads.push(mail);
        }
        self.hand_over(front);
    }

    /// Leaves news of a client's memory for the step loop, if there is one.
    pub(super) fn send_memory(&self, mail: MemoryMail) {
        let mut front = self.front();
        if !front.has_ended {
            front.memories.push(mail);
        }
        self.hand_over(front);
    }

    /// Unlocks what a caller has left for the step loop and wakes it. The flag follows the mail: a step loop that takes the mail before
    /// the flag is set finds nothing at its next look, and one that sees the flag finds the mail.
    pub(super) fn hand_over(&self, front: MutexGuard<'_, Front>) {
        // The step loop must not see the flag and then wait for the lock.
        drop(front);
        self.has_mail.store(true, Ordering::Release);
        self.bell.bell().ring();
    }

    /// The rows that experts have computed since the service started.
    pub(super) fn expert_rows(&self) -> ExpertRows {
        let model = Arc::clone(&self.model.read().unwrap_or_else(PoisonError::into_inner));
        let layers = model.layers.iter().map(|(&layer, info)| LayerRows {
            layer,
            ranks: self.row_counts.layer(layer.index(), info.num_experts),
            source_experts: model.source_experts(layer),
        });
        ExpertRows { layers: layers.collect() }
    }

    /// The rows and copies of a mixed group since the service started; `None` in other groups.
    pub(super) fn tier(&self) -> Option<TierStatus> {
        let mut counts = self.tier_counts.lock().unwrap_or_else(PoisonError::into_inner);
        let layers = self.count_tier_rows(&mut counts)?;
        Some(TierStatus { layers, copied_bytes: self.copied_bytes.load(Ordering::Relaxed) })
    }

    /// Brings the counts of a mixed group up to date by the placement that serves.
    fn count_tier_rows(&self, counts: &mut TierCounts) -> Option<Vec<(LayerId, TierRows)>> {
        let model = Arc::clone(&self.model.read().unwrap_or_else(PoisonError::into_inner));
        let source = model.placement.first().filter(|_| model.sources < model.placement.len())?;
        let experts = model.layers.iter().map(|(&layer, info)| (layer, info.num_experts));
        Some(counts.update(&self.row_counts, experts, &source.experts))
    }

    /// The current time of the state machine.
    pub(super) fn time(&self, instant: Instant) -> Time {
        Time(0) + instant.saturating_duration_since(self.started)
    }

    /// Converts a time of the state machine to an instant.
    pub(super) fn instant(&self, time: Time) -> Instant {
        self.started + time.since(Time(0))
    }

    /// Whether callers have left something since the last call.
    pub(super) fn take_mail_flag(&self) -> bool {
        self.has_mail.swap(false, Ordering::AcqRel)
    }

    pub(super) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// The fingerprint of the weights that the present generation serves, or the last one served.
    pub(super) fn fingerprint(&self) -> WeightFingerprint {
        self.model.read().unwrap_or_else(PoisonError::into_inner).weight_fingerprint
    }

    /// Experts per token that a layer's gate chooses.
    pub(super) fn top_k(&self, layer: LayerId) -> Option<usize> {
        let model = self.model.read().unwrap_or_else(PoisonError::into_inner);
        model.layers.get(&layer).map(|layer| layer.top_k)
    }

    /// Sets the weights that the present generation serves, and the ranks that own their experts.
    pub(super) fn set_weights(&self, weight_version: WeightVersion, source: &CheckpointSource) {
        let mut counts = self.tier_counts.lock().unwrap_or_else(PoisonError::into_inner);
        self.count_tier_rows(&mut counts);
        let mut model = self.model.write().unwrap_or_else(PoisonError::into_inner);
        let mut now =
            ModelInfo { weight_version, weight_fingerprint: source.fingerprint, ..ModelInfo::clone(&model) };
        let ranks = now.placement.len();
        for placed in &mut now.placement {
            placed.experts = owned_ranges(&now.layers, source.placement.as_ref(), placed.rank, ranks);
        }
        *model = Arc::new(now);
        drop((model, counts));
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner) = (weight_version, source.clone());
    }

    /// The folder of the weights that serve.
    pub(super) fn weight_folder(&self) -> PathBuf {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner).1.folder.clone()
    }

    /// The data for the checks of a reload, and the version that serves. They describe the checkpoint that serves, with the placement
    /// that `change` asks for.
    ///
    /// # Errors
    /// If that placement does not fit the model or the ranks.
    pub(super) fn reload_context(
        &self,
        change: PlacementChange,
    ) -> Result<(WeightVersion, ReloadContext), String> {
        let (version, serving) = self.serving.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let placement = match change {
            PlacementChange::Keep => serving.placement.clone(),
            PlacementChange::Contiguous => None,
            PlacementChange::Given(placement) => Some(placement),
        };
        if let Some(placement) = &placement {
            let model = self.model.read().unwrap_or_else(PoisonError::into_inner);
            let experts = model.layers.iter().map(|(&layer, info)| (layer, info.num_experts)).collect();
            placement.check(self.reload.devices.len(), &experts).map_err(|error| error.to_string())?;
        }
        let serving_placement = serving.placement.clone();
        let checkpoint = CheckpointSource { placement, ..serving };
        Ok((version, ReloadContext { checkpoint, serving_placement, ..self.reload.clone() }))
    }

    /// Notes that a step has begun or ended, and whether one is in flight now.
    pub(super) fn note_steps(&self, in_flight: bool) {
        let activity = StepActivity { at: Instant::now(), in_flight };
        *self.activity.lock().unwrap_or_else(PoisonError::into_inner) = activity;
    }

    pub(super) fn set_state(&self, state: ServiceState, reason: &str) {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.state = state;
        reason.clone_into(&mut status.reason);
        drop(status);
        self.state.send_replace(state);
    }

    pub(super) fn set_generation(&self, generation: Generation) {
        let mut model = self.model.write().unwrap_or_else(PoisonError::into_inner);
        *model = Arc::new(ModelInfo { generation, ..ModelInfo::clone(&model) });
        drop(model);
        self.status.lock().unwrap_or_else(PoisonError::into_inner).generation = generation.0;
    }
}
