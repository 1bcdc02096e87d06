//! The service in front of the step loop. Admission runs on the caller's thread, everything else on the step loop's.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use expertd_ipc::control::DeviceKind;
use expertd_scheduler::{Refusal, StepKind, Submission};
use expertd_shm::RegionError;
use expertd_telemetry::names;
use expertd_types::MemoryId;
use tokio::sync::{oneshot, watch};

use super::caller::{Caller, ClientMemory, MessageCaller, Steps};
use super::config::{ReloadContext, ReloadPlan, SchedulerConfig, ServiceEnd};
use super::shared::{MemoryMail, Payload, ReloadMail, Shared};
use super::thread::{self, UnstartedStepLoop};
use crate::backend::{
    Backend, CallError, DrainFuture, DrainReport, ExpertRows, ModelInfo, Pending, ReloadFuture,
    ReloadRequest, Request, ServiceState, ServiceStatus, SessionStatus, SubmitError,
};
use crate::cluster::{ClusterConfig, left_processes};

/// Handle of the step loop and its EP group.
pub struct Service {
    shared: Arc<Shared>,
    /// The step loop's thread owns the sender, which is dropped with the thread however it ends.
    end: watch::Receiver<Option<ServiceEnd>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Longest time of a step.
    step_timeout: Duration,
    /// `None` once the step loop has begun.
    step_loop: Mutex<Option<UnstartedStepLoop>>,
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
        let seed = RandomState::new().hash_one(std::process::id());
        let reload = ReloadContext {
            checkpoint: cluster.checkpoint.clone(),
            serving_placement: cluster.checkpoint.placement.clone(),
            spec: cluster.description.clone(),
            devices: cluster.devices.clone(),
            max_weight_bytes: cluster.max_weight_bytes,
        };
        metrics::gauge!(names::MODEL_INFO, "model" => model.name.clone()).set(1.0);
        let shared = Arc::new(Shared::new(model, config.clone(), reload, seed)?);
        crate::expert_rows::export(Arc::downgrade(&shared), config.expert_metrics, Shared::expert_rows)?;
        let (result, end) = watch::channel(None);
        let step_timeout = cluster.step_timeout;
        let step_loop = UnstartedStepLoop { shared: Arc::clone(&shared), cluster, config, seed, result };
        Ok(Arc::new(Service {
            shared,
            end,
            thread: Mutex::new(None),
            step_timeout,
            step_loop: Mutex::new(Some(step_loop)),
        }))
    }

    /// Starts the step loop, which forms the first generation.
    pub fn begin(&self) -> Result<(), StartError> {
        let step_loop = self.step_loop.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(step_loop) = step_loop {
            *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(step_loop.begin()?);
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
    fn enter(&self, request: Request, caller: Box<dyn Caller>) -> Result<(), (SubmitError, Box<dyn Caller>)> {
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
            caller.fail(CallError::Refused(refusal));
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

    fn submit(&self, request: Request) -> Result<Pending, SubmitError> {
        let (reply, pending) = oneshot::channel();
        let mut request = request;
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
        let max_wait = self.shared.config.max_wait;
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
                let plan =
                    tokio::task::spawn_blocking(move || planner.plan(&context, folder.as_deref())).await;
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use expertd_ipc::control::CheckpointSource;
    use expertd_scheduler::OnFault;
    use expertd_types::{Coverage, Generation, LayerRange, WeightFingerprint, WeightVersion};

    use super::*;
    use crate::backend::Limits;
    use crate::steps::config::ReloadPlanner;

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
            sources: 1,
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
            reload: ReloadPlanner::new(|_, _| Err("not here".into())),
        };
        let checkpoint = CheckpointSource {
            folder: std::path::PathBuf::new(),
            layers: LayerRange::whole(1),
            fingerprint: model.weight_fingerprint,
            placement: None,
        };
        let spec = serde_json::Value::Null;
        let devices = vec![DeviceKind::Cpu];
        let reload =
            ReloadContext { checkpoint, serving_placement: None, spec, devices, max_weight_bytes: None };
        Arc::new(Shared::new(model, config, reload, 1).unwrap())
    }

    /// A service whose thread has ended.
    pub(in crate::steps) fn service(end: watch::Receiver<Option<ServiceEnd>>) -> Service {
        let (thread, step_loop) = (Mutex::new(None), Mutex::new(None));
        Service { shared: shared(), end, thread, step_timeout: Duration::from_secs(60), step_loop }
    }
}
