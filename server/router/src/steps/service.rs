//! The scheduler as the API sees it: admission on the caller's thread, everything else on the step loop's.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use super::driver::Driver;
use crate::backend::{
    Backend, DrainFuture, DrainReport, ModelInfo, Pending, Request, ServiceState, ServiceStatus, StepError,
    SubmitError,
};
use crate::cluster::ClusterConfig;
use expertd_ipc::{RegionError, RouterBell};
use expertd_types::Generation;

/// Seconds after which an overloaded caller may try again while no step has told yet how fast they are.
const UNKNOWN_WAIT: f64 = 0.1;

/// How steps are formed and how much may wait for them.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Rows of one step, all ranks together.
    pub max_tokens_per_step: usize,
    /// Rows that may wait; a request is taken in whatever its size while nothing waits.
    pub max_queued_tokens: usize,
    /// How long the first request of a step waits for company.
    pub max_wait: Duration,
    /// How long requests in flight may take once a drain has begun, if the drain does not say.
    pub drain_timeout: Duration,
    /// Threads that copy the rows of large steps from requests and to answers, the step loop's own included.
    pub copy_threads: usize,
}

/// How the service ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceEnd {
    /// By a drain.
    Drained,
    /// Weights could not be loaded, several times over.
    LoadFailed(String),
    /// Generations kept ending before they were ready.
    SetupFailed(String),
}

/// The answer's way back.
pub(super) type Reply = oneshot::Sender<Result<crate::backend::Answer, StepError>>;

/// A request on its way from the API to the step loop.
pub(super) struct Incoming {
    pub(super) request: Request,
    pub(super) reply: Reply,
    pub(super) admitted: Instant,
}

/// Whether requests are taken in.
pub(super) enum Admission {
    Open,
    NotReady { reason: String, retry_after: Duration },
    Draining,
}

/// What the API writes and the step loop takes out.
pub(super) struct Inbox {
    pub(super) admission: Admission,
    pub(super) incoming: Vec<Incoming>,
    /// Rows admitted and not yet in a step.
    pub(super) queued_tokens: usize,
    /// Rows per second of late; what the hint to an overloaded caller follows from.
    pub(super) tokens_per_second: f64,
    pub(super) drain: Option<Drain>,
}

/// A drain that was asked for.
pub(super) struct Drain {
    pub(super) deadline: Instant,
    pub(super) waiters: Vec<oneshot::Sender<DrainReport>>,
}

/// What both sides share.
pub(super) struct Shared {
    pub(super) inbox: Mutex<Inbox>,
    /// Set with the inbox, so that the step loop need not lock it to see that nothing came.
    pub(super) mail: AtomicBool,
    pub(super) bell: RouterBell,
    pub(super) model: RwLock<Arc<ModelInfo>>,
    pub(super) state: watch::Sender<ServiceState>,
    pub(super) status: Mutex<ServiceStatus>,
    pub(super) steps_total: AtomicU64,
    pub(super) end: watch::Sender<Option<ServiceEnd>>,
    config: SchedulerConfig,
    started: Instant,
}

impl Shared {
    pub(super) fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the step loop.
    pub(super) fn wake(&self) {
        self.mail.store(true, Ordering::Release);
        self.bell.bell().ring();
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

/// The scheduler and the EP group under it.
pub struct Service {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Service {
    /// Starts the step loop, which forms the first generation.
    ///
    /// # Errors
    /// If there is no memory or thread for it.
    pub fn start(
        model: ModelInfo,
        cluster: ClusterConfig,
        config: SchedulerConfig,
    ) -> Result<Arc<Self>, StartError> {
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Inbox {
                admission: Admission::NotReady {
                    reason: "the weights are being loaded".into(),
                    retry_after: Duration::from_secs(1),
                },
                incoming: Vec::new(),
                queued_tokens: 0,
                tokens_per_second: 0.0,
                drain: None,
            }),
            mail: AtomicBool::new(false),
            bell: RouterBell::create()?,
            model: RwLock::new(Arc::new(model)),
            state: watch::Sender::new(ServiceState::Loading),
            status: Mutex::new(ServiceStatus::default()),
            steps_total: AtomicU64::new(0),
            end: watch::Sender::new(None),
            config: config.clone(),
            started: Instant::now(),
        });
        let driver = Driver::new(Arc::clone(&shared), cluster, config);
        // One thread for the whole life of the service: ranks die with the thread that started them.
        let thread = std::thread::Builder::new().name("steps".into()).spawn(move || driver.run())?;
        Ok(Arc::new(Service { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Resolves when the service has ended.
    pub async fn ended(&self) -> ServiceEnd {
        let mut end = self.shared.end.subscribe();
        loop {
            if let Some(end) = end.borrow_and_update().clone() {
                return end;
            }
            if end.changed().await.is_err() {
                return ServiceEnd::SetupFailed("the step loop ended unexpectedly".into());
            }
        }
    }

    /// Waits for the step loop, and with it every rank, to be gone. Call it after [`ended`](Self::ended).
    pub fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// Why the service could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No shared memory.
    #[error("cannot make shared memory: {0}")]
    Memory(#[from] RegionError),
    /// No thread.
    #[error("cannot start the step loop: {0}")]
    Thread(#[from] std::io::Error),
}

impl Backend for Service {
    fn model(&self) -> Arc<ModelInfo> {
        Arc::clone(&self.shared.model.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn submit(&self, request: Request) -> Result<Pending, SubmitError> {
        let now = Instant::now();
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            return Err(SubmitError::DeadlineExceeded);
        }
        let limit = self.shared.config.max_queued_tokens;
        let mut inbox = self.shared.inbox();
        match &inbox.admission {
            Admission::Open => {}
            Admission::Draining => return Err(SubmitError::Draining),
            Admission::NotReady { reason, retry_after } => {
                return Err(SubmitError::NotReady { reason: reason.clone(), retry_after: *retry_after });
            }
        }
        let queued = inbox.queued_tokens;
        if queued > 0 && queued + request.tokens > limit {
            let reason = format!(
                "{queued} tokens wait for a step already, and {} more would exceed max-queued-tokens = {limit}",
                request.tokens
            );
            let rate = inbox.tokens_per_second;
            let wait = if rate > 0.0 { queued as f64 / rate } else { UNKNOWN_WAIT };
            return Err(SubmitError::Overloaded {
                reason,
                retry_after: Duration::from_secs_f64(wait.clamp(0.005, 5.0)),
            });
        }
        inbox.queued_tokens += request.tokens;
        let (reply, pending) = oneshot::channel();
        inbox.incoming.push(Incoming { request, reply, admitted: now });
        drop(inbox);
        self.shared.wake();
        Ok(pending)
    }

    fn status(&self) -> ServiceStatus {
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        status.uptime = self.shared.started.elapsed();
        status.steps_total = self.shared.steps_total.load(Ordering::Relaxed);
        status.tokens_queued = self.shared.inbox().queued_tokens as u64;
        status
    }

    fn watch_state(&self) -> watch::Receiver<ServiceState> {
        self.shared.state.subscribe()
    }

    fn drain(&self, timeout: Option<Duration>) -> DrainFuture {
        let (report, reported) = oneshot::channel();
        let deadline = Instant::now() + timeout.unwrap_or(self.shared.config.drain_timeout);
        let mut inbox = self.shared.inbox();
        inbox.admission = Admission::Draining;
        let drain = inbox.drain.get_or_insert_with(|| Drain { deadline, waiters: Vec::new() });
        drain.deadline = drain.deadline.min(deadline);
        drain.waiters.push(report);
        drop(inbox);
        self.shared.set_state(ServiceState::Draining, "draining");
        self.shared.wake();
        // A drain that finds the step loop gone has nothing left to wait for.
        Box::pin(async move { reported.await.unwrap_or(DrainReport { requests_dropped: 0 }) })
    }
}
