//! The service in front of the step loop. Admission runs on the caller's thread, everything else on the step loop's.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use expertd_ipc::control::CheckpointSource;
use expertd_ipc::{RegionError, RouterBell, RowCounts, RowCountsShape};
use expertd_scheduler::{Inbox, OnFault, Refusal, StepKind, Submission, Time};
use expertd_types::{Generation, LayerId, MemoryId, WeightFingerprint, WeightVersion};
use tokio::sync::{oneshot, watch};

use super::thread;
use crate::backend::{
    Answer, Backend, DrainFuture, DrainReport, ExpertRows, LayerRows, ModelInfo, Pending, ReloadFuture,
    ReloadReport, Request, ServiceState, ServiceStatus, StepError, SubmitError,
};
use crate::cluster::{ClusterConfig, WeightHolder};
use crate::sessions::{SessionCall, SessionRegistry, SessionState};

/// How the service ended.
pub use expertd_scheduler::End as ServiceEnd;

/// Limits on steps and on the queue.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Largest number of rows of one step, all ranks together.
    pub max_tokens_per_step: usize,
    /// Largest number of waiting rows. An empty queue accepts a request of any size.
    pub max_queued_tokens: usize,
    /// How long the oldest request waits for others to join its step.
    pub max_wait: Duration,
    /// Time that requests in flight have after a drain begins, unless the drain sets its own.
    pub drain_timeout: Duration,
    /// Whether requests without a complete answer are retried or failed after a fault of the EP group.
    pub on_fault: OnFault,
    /// Threads that copy the rows of large steps, the step loop's own included.
    pub copy_threads: usize,
    /// Whether rows per expert and layer are metrics.
    pub expert_metrics: bool,
    /// Checks a checkpoint that is to be loaded beside the present one.
    pub reload: ReloadPlanner,
}

/// Checks whether the checkpoint in a folder (`None`: that of the present one) can be loaded into the running service.
/// Returns the reason if it cannot. Must not read its weights by itself: a file that is truncated meanwhile ends the
/// process that reads it.
#[derive(Clone, Copy)]
pub struct ReloadPlanner(pub fn(&ReloadContext, Option<&Path>) -> Result<CheckpointSource, String>);

impl fmt::Debug for ReloadPlanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReloadPlanner")
    }
}

/// What a new checkpoint is compared with.
#[derive(Clone, Debug)]
pub struct ReloadContext {
    /// The checkpoint that the service was started with.
    pub checkpoint: CheckpointSource,
    /// Description of its model.
    pub spec: serde_json::Value,
    /// Expert ranks.
    pub ranks: u32,
    /// Which processes hold packed weights.
    pub weights: WeightHolder,
}

/// A checked reload on its way to the step loop.
pub(super) struct ReloadMail {
    pub(super) source: CheckpointSource,
    pub(super) reply: oneshot::Sender<Result<ReloadReport, String>>,
}

/// News of a session on its way to the step loop.
#[derive(Debug)]
pub(super) enum SessionMail {
    /// It was opened; the step loop holds its memory until no rank has it any more.
    Opened(Arc<SessionState>),
    /// It has ended.
    Ended(MemoryId),
}

/// The way of a request's result to its caller.
#[derive(Debug)]
pub(super) enum Reply {
    /// As a message.
    Message(oneshot::Sender<Result<Answer, StepError>>),
    /// Into the memory of a session.
    Session(SessionCall),
}

/// The parts of a request that its [`Submission`] does not hold.
pub(super) struct Payload {
    pub(super) request: Request,
    pub(super) reply: Reply,
}

/// State that callers and the step loop share under a lock.
pub(super) struct Front {
    pub(super) inbox: Inbox<Payload>,
    /// Senders of the results of drains.
    pub(super) drain_waiters: Vec<oneshot::Sender<DrainReport>>,
    /// Reloads that were asked for.
    pub(super) reloads: Vec<ReloadMail>,
    /// Sessions that were opened or have ended.
    pub(super) sessions: Vec<SessionMail>,
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
    pub(super) row_counts: RowCounts,
    config: SchedulerConfig,
    reload: ReloadContext,
    started: Instant,
    sessions: Arc<SessionRegistry>,
}

impl Shared {
    fn new(
        model: ModelInfo,
        config: SchedulerConfig,
        reload: ReloadContext,
        seed: u64,
    ) -> Result<Self, RegionError> {
        let inbox = Inbox::new(config.max_queued_tokens, seed);
        let row_counts = RowCounts::create(RowCountsShape {
            ranks: reload.ranks,
            layers: model.num_layers as u32,
            experts: model.layers.values().map(|layer| layer.num_experts).max().unwrap_or(0) as u32,
        })?;
        Ok(Shared {
            front: Mutex::new(Front {
                inbox,
                drain_waiters: Vec::new(),
                reloads: Vec::new(),
                sessions: Vec::new(),
                has_ended: false,
            }),
            has_mail: AtomicBool::new(false),
            bell: RouterBell::create()?,
            model: RwLock::new(Arc::new(model)),
            state: watch::Sender::new(ServiceState::Loading),
            status: Mutex::new(ServiceStatus::default()),
            steps_total: AtomicU64::new(0),
            row_counts,
            config,
            reload,
            started: Instant::now(),
            sessions: Arc::default(),
        })
    }

    /// Locks the shared state. A panic under the lock leaves valid counts, because a single statement writes each of them.
    pub(super) fn front(&self) -> MutexGuard<'_, Front> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a reload for the step loop. One that finds the step loop gone is dropped, which its caller notices.
    fn ask_to_reload(&self, mail: ReloadMail) {
        let mut front = self.front();
        if !front.has_ended {
            front.reloads.push(mail);
        }
        self.has_mail.store(true, Ordering::Release);
        drop(front);
        self.bell.bell().ring();
    }

    /// Leaves news of a session for the step loop, if there is one.
    fn send_session(&self, mail: SessionMail) {
        let mut front = self.front();
        if !front.has_ended {
            front.sessions.push(mail);
        }
        self.has_mail.store(true, Ordering::Release);
        drop(front);
        self.bell.bell().ring();
    }

    /// The rows that experts have computed since the service started.
    pub(super) fn expert_rows(&self) -> ExpertRows {
        let model = Arc::clone(&self.model.read().unwrap_or_else(PoisonError::into_inner));
        let layers = model.layers.iter().map(|(&layer, info)| LayerRows {
            layer,
            ranks: self.row_counts.layer(layer.index(), info.num_experts),
        });
        ExpertRows { layers: layers.collect() }
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

    pub(super) fn set_weights(&self, weight_version: WeightVersion, weight_fingerprint: WeightFingerprint) {
        let mut model = self.model.write().unwrap_or_else(PoisonError::into_inner);
        *model = Arc::new(ModelInfo { weight_version, weight_fingerprint, ..ModelInfo::clone(&model) });
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

/// Handle of the step loop and its EP group.
pub struct Service {
    shared: Arc<Shared>,
    /// The step loop's thread owns the sender, which is dropped with the thread however it ends.
    end: watch::Receiver<Option<ServiceEnd>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Service {
    /// Starts the step loop, which forms the first generation.
    ///
    /// # Errors
    /// If shared memory or the thread cannot be created.
    pub fn start(
        model: ModelInfo,
        cluster: ClusterConfig,
        config: SchedulerConfig,
    ) -> Result<Arc<Self>, StartError> {
        let seed = RandomState::new().hash_one(std::process::id());
        let reload = ReloadContext {
            checkpoint: cluster.checkpoint.clone(),
            spec: cluster.description.clone(),
            ranks: cluster.shape.ranks,
            weights: cluster.weights,
        };
        metrics::gauge!(crate::telemetry::names::MODEL_INFO, "model" => model.name.clone()).set(1.0);
        let shared = Arc::new(Shared::new(model, config.clone(), reload, seed)?);
        crate::expert_rows::export(Arc::downgrade(&shared), config.expert_metrics, Shared::expert_rows)?;
        let (thread, end) = thread::start(Arc::clone(&shared), cluster, config, seed)?;
        Ok(Arc::new(Service { shared, end, thread: Mutex::new(Some(thread)) }))
    }

    /// Resolves when the service has ended, also after a panic of the step loop.
    pub async fn ended(&self) -> ServiceEnd {
        let mut end = self.end.clone();
        loop {
            if let Some(end) = end.borrow_and_update().clone() {
                return end;
            }
            if end.changed().await.is_err() {
                return ServiceEnd::SetupFailed(thread::GONE.into());
            }
        }
    }

    /// Waits until the step loop and all ranks have ended. Call it after [`ended`](Self::ended).
    pub fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    /// The open sessions.
    #[must_use]
    pub fn sessions(&self) -> &Arc<SessionRegistry> {
        &self.shared.sessions
    }

    /// Tells the step loop of a new session, whose memory ranks then attach.
    pub(crate) fn session_opened(&self, session: Arc<SessionState>) {
        self.shared.send_session(SessionMail::Opened(session));
    }

    /// Tells the step loop of the end of a session that was opened.
    pub(crate) fn session_ended(&self, memory: MemoryId) {
        self.shared.send_session(SessionMail::Ended(memory));
    }

    /// Takes in a validated request whose rows lie in a session's memory; `call` gets its answer.
    ///
    /// # Errors
    /// [`SubmitError`] when it is not admitted now. The call then has no completion.
    pub(crate) fn submit_session(&self, request: Request, call: SessionCall) -> Result<(), SubmitError> {
        let (submission, now) = (self.submission(&request), self.shared.time(Instant::now()));
        let mut front = self.shared.front();
        if let Some(refusal) = front.inbox.refuse(now, &submission) {
            drop(front);
            call.forget();
            return Err(refusal.into());
        }
        let payload = Payload { request, reply: Reply::Session(call) };
        front.inbox.submit(now, submission, payload)?;
        // Under the lock, so that mail never lies there without the flag.
        self.shared.has_mail.store(true, Ordering::Release);
        drop(front);
        self.wake();
        Ok(())
    }

    /// The request as admission sees it.
    fn submission(&self, request: &Request) -> Submission {
        let model = self.shared.model.read().unwrap_or_else(PoisonError::into_inner);
        let own_k = model.layers.get(&request.layer).map_or(1, |layer| layer.top_k);
        drop(model);
        let top_k = request.routing.as_ref().map_or(own_k, |given| given.k);
        Submission {
            client: request.client,
            kind: StepKind { layer: request.layer, top_k },
            tokens: request.tokens,
            deadline: request.deadline.map(|deadline| self.shared.time(deadline)),
            expected_version: request.expected_version,
        }
    }

    /// Wakes the step loop.
    fn wake(&self) {
        self.shared.bell.bell().ring();
    }
}

/// Why the service could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Shared memory could not be created.
    #[error("cannot create shared memory: {0}")]
    Memory(#[from] RegionError),
    /// The thread could not be started.
    #[error("cannot start the step loop: {0}")]
    Thread(#[from] std::io::Error),
}

impl From<Refusal> for SubmitError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Overloaded { queued_tokens, max_queued_tokens, retry_after } => {
                SubmitError::Overloaded {
                    reason: format!(
                        "{queued_tokens} tokens wait for a step already, and this request would exceed \
                     max-queued-tokens = {max_queued_tokens}"
                    ),
                    retry_after,
                }
            }
            Refusal::Draining => SubmitError::Draining,
            Refusal::NotReady { reason, retry_after } => {
                SubmitError::NotReady { reason: reason.as_ref().to_owned(), retry_after }
            }
            Refusal::DeadlineExceeded => SubmitError::DeadlineExceeded,
        }
    }
}

impl Backend for Service {
    fn model(&self) -> Arc<ModelInfo> {
        Arc::clone(&self.shared.model.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn submit(&self, request: Request) -> Result<Pending, SubmitError> {
        let submission = self.submission(&request);
        let now = self.shared.time(Instant::now());
        let (reply, pending) = oneshot::channel();
        let payload = Payload { request, reply: Reply::Message(reply) };
        let mut front = self.shared.front();
        front.inbox.submit(now, submission, payload)?;
        // Under the lock, so that mail is never present without the flag.
        self.shared.has_mail.store(true, Ordering::Release);
        drop(front);
        self.wake();
        Ok(pending)
    }

    fn status(&self) -> ServiceStatus {
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        status.uptime = self.shared.started.elapsed();
        status.sessions = self.shared.sessions.status();
        status.steps_total = self.shared.steps_total.load(Ordering::Relaxed);
        status.tokens_queued = self.shared.front().inbox.queued_tokens() as u64;
        status
    }

    fn expert_rows(&self) -> ExpertRows {
        self.shared.expert_rows()
    }

    fn watch_state(&self) -> watch::Receiver<ServiceState> {
        self.shared.state.subscribe()
    }

    fn drain(&self, timeout: Option<Duration>) -> DrainFuture {
        let (report, reported) = oneshot::channel();
        let deadline = Instant::now() + timeout.unwrap_or(self.shared.config.drain_timeout);
        let deadline = self.shared.time(deadline);
        let mut front = self.shared.front();
        front.inbox.drain(deadline);
        if !front.has_ended {
            front.drain_waiters.push(report);
        }
        self.shared.has_mail.store(true, Ordering::Release);
        drop(front);
        self.wake();
        // After the end of the step loop a drain has nothing to wait for.
        Box::pin(async move { reported.await.unwrap_or(DrainReport { requests_dropped: 0 }) })
    }

    fn reload(&self, folder: Option<PathBuf>) -> ReloadFuture {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let planner = shared.config.reload;
            let planning = Arc::clone(&shared);
            let plan = tokio::task::spawn_blocking(move || (planner.0)(&planning.reload, folder.as_deref()));
            let source =
                plan.await.map_err(|error| format!("the check of the checkpoint failed: {error}"))??;
            let (reply, replied) = oneshot::channel();
            shared.ask_to_reload(ReloadMail { source, reply });
            replied.await.unwrap_or_else(|_| Err("the service ended before the new weights served".into()))
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use expertd_types::{Coverage, LayerId, LayerRange};

    use super::*;
    use crate::backend::{ClientKey, Limits};

    /// Shared state without a step loop.
    pub(in crate::steps) fn shared() -> Arc<Shared> {
        let limits = Limits {
            max_tokens_per_request: 64,
            max_tokens_per_step: 32,
            max_tokens_per_rank: 32,
            max_message_bytes: 1 << 20,
            max_streams_per_connection: 1,
            max_requests_per_stream: 1,
            max_connections: 1,
            max_bytes_in_flight: 1 << 20,
        };
        let model = ModelInfo {
            name: "m".into(),
            family: "f".into(),
            weight_version: WeightVersion(1),
            weight_fingerprint: WeightFingerprint { coverage: Coverage::Sampled, digest: [1; 16] },
            generation: Generation(0),
            hidden: 8,
            num_layers: 1,
            held: LayerRange::whole(1),
            layers: std::collections::BTreeMap::new(),
            weight_formats: Vec::new(),
            limits,
            placement: Vec::new(),
        };
        let config = SchedulerConfig {
            max_tokens_per_step: 32,
            max_queued_tokens: 64,
            max_wait: Duration::ZERO,
            drain_timeout: Duration::from_secs(1),
            on_fault: OnFault::Retry,
            copy_threads: 1,
            expert_metrics: false,
            reload: ReloadPlanner(|_, _| Err("not here".into())),
        };
        let checkpoint = CheckpointSource {
            folder: PathBuf::new(),
            layers: LayerRange::whole(1),
            fingerprint: model.weight_fingerprint,
        };
        let reload = ReloadContext {
            checkpoint,
            spec: serde_json::Value::Null,
            ranks: 1,
            weights: WeightHolder::Router,
        };
        Arc::new(Shared::new(model, config, reload, 1).unwrap())
    }

    /// A service whose thread has ended.
    pub(in crate::steps) fn service(end: watch::Receiver<Option<ServiceEnd>>) -> Service {
        Service { shared: shared(), end, thread: Mutex::new(None) }
    }

    pub(in crate::steps) fn submission() -> Submission {
        let kind = StepKind { layer: LayerId(0), top_k: 1 };
        Submission { client: ClientKey(1), kind, tokens: 1, deadline: None, expected_version: None }
    }
}
