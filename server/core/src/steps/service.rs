//! The service in front of the step loop. Admission runs on the caller's thread, everything else on the step loop's.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use expertd_ipc::control::DeviceKind;
use expertd_scheduler::{StepKind, Submission};
use expertd_shm::RegionError;
use expertd_telemetry::names;
use expertd_types::MemoryId;
use tokio::sync::{oneshot, watch};

use super::caller::{Caller, ClientMemory, MessageCaller, Steps};
use super::config::{ReloadContext, ReloadPlan, SchedulerConfig, ServiceEnd};
use super::shared::{MemoryMail, Payload, ReloadMail, Shared};
use super::thread;
use crate::backend::{
    Backend, DrainFuture, DrainReport, ExpertRows, ModelInfo, Pending, ReloadFuture, ReloadRequest, Request,
    ServiceState, ServiceStatus, SessionStatus,
};
use crate::cluster::{ClusterConfig, left_processes};
use crate::failure::Failure;

/// Handle of the step loop and its EP group.
pub struct Service {
    shared: Arc<Shared>,
    /// The step loop's thread owns the sender, which is dropped with the thread however it ends.
    end: watch::Receiver<Option<ServiceEnd>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Longest time of a step.
    step_timeout: Duration,
    /// The arguments of the step loop's thread; `None` once it has started.
    unstarted: Mutex<Option<(ClusterConfig, watch::Sender<Option<ServiceEnd>>)>>,
}

impl Service {
    /// Creates a service whose step loop starts with [`begin`](Self::begin), so that its addresses can be bound before any rank starts.
    ///
    /// # Errors
    /// If shared memory or a thread cannot be created.
    pub fn new(
        model: ModelInfo,
        cluster: ClusterConfig,
        config: SchedulerConfig,
    ) -> Result<Arc<Self>, StartError> {
        let reload = ReloadContext {
            checkpoint: cluster.checkpoint.clone(),
            serving_placement: cluster.checkpoint.placement.clone(),
            spec: cluster.description.clone(),
            devices: cluster.devices.clone(),
            max_weight_bytes: cluster.max_weight_bytes,
        };
        metrics::gauge!(names::MODEL_INFO, "model" => model.name.clone()).set(1.0);
        let per_expert = config.expert_metrics;
        let shared = Arc::new(Shared::new(model, config, reload)?);
        crate::expert_rows::export(Arc::downgrade(&shared), per_expert, Shared::expert_rows, Shared::tier)?;
        let (result, end) = watch::channel(None);
        let (thread, step_timeout) = (Mutex::new(None), cluster.step_timeout);
        let unstarted = Mutex::new(Some((cluster, result)));
        Ok(Arc::new(Service { shared, end, thread, step_timeout, unstarted }))
    }

    /// Starts the step loop, which forms the first generation.
    pub fn begin(&self) -> Result<(), StartError> {
        let unstarted = self.unstarted.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((cluster, result)) = unstarted {
            let thread = thread::begin(Arc::clone(&self.shared), cluster, result)?;
            *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        }
        Ok(())
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

    /// Sets what lists the open sessions for [`status`](Backend::status).
    pub fn list_sessions_with(&self, list: impl Fn() -> Vec<SessionStatus> + Send + Sync + 'static) {
        let _ = self.shared.sessions.set(Box::new(list));
    }

    /// Leaves a request for the step loop, or returns its caller with the reason why it is not admitted.
    fn enter(&self, request: Request, caller: Box<dyn Caller>) -> Result<(), (Failure, Box<dyn Caller>)> {
        let in_place = caller.memory().is_some();
        let (submission, now) = (self.submission(&request, in_place), self.shared.time(Instant::now()));
        let mut front = self.shared.front();
        if let Some(refusal) = front.inbox.refuse(now, &submission) {
            return Err((refusal.into(), caller));
        }
        if front.inbox.queued_tokens() == 0 {
            front.waiting_since = Instant::now();
        }
        front.inbox.admit(now, submission, Payload { request, caller });
        self.shared.hand_over(front);
        Ok(())
    }

    /// The request as admission sees it.
    fn submission(&self, request: &Request, in_place: bool) -> Submission {
        let model = self.shared.model.read().unwrap_or_else(PoisonError::into_inner);
        let own_k = model.layers.get(&request.layer).map_or(1, |layer| layer.top_k);
        drop(model);
        let top_k = request.routing.as_ref().map_or(own_k, |given| given.k);
        Submission {
            client: request.client,
            connection: request.connection,
            kind: StepKind { layer: request.layer, top_k },
            tokens: request.tokens,
            deadline: request.deadline.map(|deadline| self.shared.time(deadline)),
            expected_version: request.expected_version,
            in_place,
        }
    }
}

/// Why the service could not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum StartError {
    #[error("cannot create shared memory: {0}")]
    Memory(#[from] RegionError),
    #[error("cannot start the step loop: {0}")]
    Thread(#[from] std::io::Error),
}

impl Steps for Service {
    fn model(&self) -> Arc<ModelInfo> {
        Backend::model(self)
    }

    fn device(&self) -> DeviceKind {
        self.shared.reload.devices.first().copied().unwrap_or(DeviceKind::Cpu)
    }

    fn state(&self) -> ServiceState {
        *self.shared.state.borrow()
    }

    fn take_in(&self, request: Request, caller: Box<dyn Caller>) {
        if let Err((refusal, caller)) = self.enter(request, caller) {
            caller.fail(refusal);
        }
    }

    fn memory_opened(&self, memory: Box<dyn ClientMemory>) {
        self.shared.send_memory(MemoryMail::Opened(memory));
    }

    fn memory_ended(&self, memory: MemoryId) {
        self.shared.send_memory(MemoryMail::Ended(memory));
    }
}

impl Backend for Service {
    fn model(&self) -> Arc<ModelInfo> {
        Arc::clone(&self.shared.model.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn submit(&self, mut request: Request) -> Result<Pending, Failure> {
        let (reply, pending) = oneshot::channel();
        let caller = MessageCaller { rows: std::mem::take(&mut request.rows), reply };
        self.enter(request, Box::new(caller)).map_err(|(refusal, _)| refusal)?;
        Ok(pending)
    }

    fn status(&self) -> ServiceStatus {
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        status.uptime = self.shared.started.elapsed();
        status.weight_folder = self.shared.weight_folder();
        status.sessions = self.shared.sessions.get().map(|list| list()).unwrap_or_default();
        status.steps_total = self.shared.steps_total.load(Ordering::Relaxed);
        status.tier = self.shared.tier();
        status.tokens_queued = self.shared.front().inbox.queued_tokens() as u64;
        let left = left_processes();
        if !left.is_empty() {
            let separator = if status.reason.is_empty() { "" } else { "; " };
            // In words that `public_text` knows.
            let left: Vec<_> = left.iter().map(|pid| format!("killed process {pid} does not end")).collect();
            status.reason = format!("{}{separator}{}", status.reason, left.join("; "));
        }
        status
    }

    fn expert_rows(&self) -> ExpertRows {
        self.shared.expert_rows()
    }

    fn standstill(&self) -> Option<String> {
        let front = self.shared.front();
        let (queued, waiting_since) = (front.inbox.queued_tokens(), front.waiting_since);
        drop(front);
        let activity = *self.shared.activity.lock().unwrap_or_else(PoisonError::into_inner);
        let max_wait = self.shared.config.max_wait.unwrap_or_default();
        let age = activity.standstill(waiting_since, Instant::now(), self.step_timeout, max_wait);
        let age = age.filter(|_| queued > 0)?;
        Some(format!("{queued} tokens wait, and no step has begun or ended for {:.0} s", age.as_secs_f64()))
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
        self.shared.hand_over(front);
        // After the end of the step loop a drain has nothing to wait for.
        Box::pin(async move { reported.await.unwrap_or(DrainReport { requests_dropped: 0 }) })
    }

    fn reload(&self, request: ReloadRequest) -> ReloadFuture {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let planner = shared.config.reload.clone();
            let ReloadRequest { folder, placement } = request;
            let planned = async {
                let (version, context) = shared.reload_context(placement)?;
                let plan = tokio::task::spawn_blocking(move || planner(&context, folder.as_deref())).await;
                let plan = plan.map_err(|error| format!("the check of the checkpoint failed: {error}"))?;
                plan.map(|plan| (version, plan))
            };
            let (checked_against, ReloadPlan { source, has_room }) = planned
                .await
                .inspect_err(|reason: &String| tracing::warn!(reason, "the reload is refused"))?;
            let (reply, replied) = oneshot::channel();
            shared.ask_to_reload(ReloadMail { source, checked_against, has_room, reply });
            replied.await.unwrap_or_else(|_| Err("the service ended before the new weights served".into()))
        })
    }
}
