//! The thread's side of the step loop: it sends events to the state machine, carries out its actions, and owns the rows of
//! requests and the EP group.

mod generations;
mod memories;
mod reload;
mod rows;
mod show;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_ipc::control::CheckpointSource;
use expertd_ipc::{Copier, StagedRows};
use expertd_scheduler::{Action, Config, Failure, Receipt, RecoveryPolicy, RequestKey, StepLoop, Time};
use expertd_shm::WaitPolicy;
use expertd_shm::wait::spin_between_steps;
use expertd_types::{Generation, MemoryId, StepId, WeightVersion};

use self::memories::Memories;
use self::reload::Reload;
use self::rows::Unrecorded;
use self::show::{Shown, show_counters_of_faults};
use super::active::Active;
use super::config::{SchedulerConfig, ServiceEnd};
use super::shared::Shared;
use crate::backend::{DrainReport, ServiceState, StepError};
use crate::cluster::{ClusterConfig, Freeing, Group, Loading, WeightSet};
use expertd_telemetry::{StepMetrics, names, progress};

/// Time that ranks have to exit by themselves when the service ends.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long after an event, while no step runs, metrics wait for the next call.
const QUIET: Duration = Duration::from_micros(50);

/// Version of the first weights.
const FIRST_VERSION: WeightVersion = WeightVersion(1);

/// A launched step and where each request's rows were staged.
struct Launched {
    step: StepId,
    top_k: usize,
    formed: Instant,
    staged: Vec<(RequestKey, StagedRows)>,
    tokens_per_rank: Vec<usize>,
    /// The memory of each segment whose rows ranks access in place.
    memories: Vec<MemoryId>,
    /// Whether rank 0 raises the completion words of its calls.
    raises: bool,
}

pub(super) struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) cluster: Arc<ClusterConfig>,
    metrics: StepMetrics,
    copier: Copier,
    pub(super) step_loop: StepLoop,
    active: HashMap<RequestKey, Active>,
    launched: VecDeque<Launched>,
    /// Completed steps that the metrics lack.
    unrecorded: Vec<Unrecorded>,
    group: Option<Group>,
    /// The weights that generations serve; `None` until loaders have packed them.
    pub(super) weights: Option<Arc<WeightSet>>,
    /// Version and source of the weights that served last, or are to serve first.
    served: (WeightVersion, CheckpointSource),
    /// Weights that are loaded while no generation serves, and the generation that waits for them.
    loading: Option<(Generation, Loading)>,
    /// Loaders that were ended, and may still hold memory.
    ended_loaders: Option<Freeing>,
    /// The weights that the present generation serves or is formed for.
    pub(super) group_weights: Option<Arc<WeightSet>>,
    /// A reload that is under way.
    reload: Option<Reload>,
    memories: Memories,
    /// The newest step whose end of the experts phase was reported to the state machine.
    experts_ended: Option<StepId>,
    /// Time of the last event, from which spinning is timed.
    last_event: Instant,
    shown: Shown,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        cluster: ClusterConfig,
        config: SchedulerConfig,
        seed: u64,
    ) -> Self {
        let step_loop = StepLoop::new(Config {
            ranks: cluster.shape.ranks as usize,
            slots: cluster.shape.slots as usize,
            max_tokens_per_step: config.max_tokens_per_step,
            max_segments_per_rank: cluster.shape.max_segments,
            max_wait: config.max_wait,
            on_fault: config.on_fault,
            recovery: RecoveryPolicy::default(),
            seed,
        });
        let memories = Memories::new(cluster.shape.ranks as usize);
        Driver {
            metrics: StepMetrics::new(cluster.shape.ranks as usize),
            copier: Copier::new(config.copy_threads, cluster.spin),
            shared,
            served: (FIRST_VERSION, cluster.checkpoint.clone()),
            cluster: Arc::new(cluster),
            step_loop,
            active: HashMap::new(),
            launched: VecDeque::new(),
            unrecorded: Vec::new(),
            group: None,
            weights: None,
            loading: None,
            ended_loaders: None,
            group_weights: None,
            reload: None,
            memories,
            experts_ended: None,
            last_event: Instant::now(),
            shown: Shown::default(),
        }
    }

    /// Runs until the service ends.
    pub(super) fn run(mut self) -> ServiceEnd {
        show_counters_of_faults();
        let end = loop {
            // A round lasts at most SWEEP_INTERVAL; longer operations tick by themselves.
            progress::tick();
            if self.exchange() {
                // The rows of a new call are on their way to the ranks before anything else is looked at, the answers of the last step
                // included.
                self.hear_experts();
                if let Some(end) = self.act() {
                    break end;
                }
            }
            self.hear_loaders();
            self.hear_reload();
            self.hear_ranks();
            self.order_memories();
            self.begin_steps();
            if let Some(end) = self.act() {
                break end;
            }
            if self.is_quiet() {
                self.record_steps();
                self.show_queue();
            }
            if !self.step_loop.has_news_for_inbox(self.now()) {
                self.wait();
            }
        };
        if let Some(group) = self.group.take() {
            group.leave(Instant::now() + LEAVE_TIMEOUT);
        }
        end
    }

    pub(super) fn now(&self) -> Time {
        self.shared.time(Instant::now())
    }

    /// Whether metrics can be recorded without delaying a call: while a step runs, or when no event has come for a while.
    fn is_quiet(&self) -> bool {
        !self.launched.is_empty() || self.cluster.spin.is_zero() || self.last_event.elapsed() >= QUIET
    }

    /// Takes new requests and drains from callers, and publishes counts to them. Returns whether there was anything to take.
    fn exchange(&mut self) -> bool {
        let now = self.now();
        // Clear the flag first: mail that arrives after that sets it again.
        let has_mail = self.shared.take_mail_flag();
        if !has_mail && !self.step_loop.has_news_for_inbox(now) {
            return false;
        }
        let mut front = self.shared.front();
        let delivery = self.step_loop.exchange(&mut front.inbox, now);
        let reloads = std::mem::take(&mut front.reloads);
        let memories = std::mem::take(&mut front.memories);
        drop(front);
        for mail in memories {
            self.memories.take_in(mail);
        }
        for mail in reloads {
            self.start_reload(mail);
        }
        let (active, hidden) = (&mut self.active, self.cluster.shape.hidden);
        self.step_loop.receive(delivery, now, |key, payload| {
            active.insert(key, Active::new(payload.request, payload.caller, hidden));
        });
        has_mail
    }

    /// Reports the end of experts phases to the state machine.
    fn hear_experts(&mut self) {
        let Some(group) = &self.group else { return };
        let ended = group.experts_ended();
        if ended.is_some() && ended != self.experts_ended {
            self.experts_ended = ended;
            if let Some(step) = ended {
                self.step_loop.experts_ended(group.generation(), step);
            }
        }
    }

    /// Reports events of ranks to the state machine.
    fn hear_ranks(&mut self) {
        let Some(group) = &mut self.group else { return };
        let generation = group.generation();
        let was_started = group.is_started();
        let news = group.poll();
        let usage_changed = group.take_usage_change();
        let is_started = group.is_started();
        self.hear_experts();
        // Steps that all ranks completed before a fault count.
        while let Some(done) = self.group.as_mut().and_then(Group::take_done) {
            self.collect(done);
        }
        match news.and_then(|news| self.hear_memories().map(|()| news)) {
            Err(fault) => self.fault(generation, &fault),
            Ok(news) if news && !was_started => {
                self.show_ranks();
                if is_started {
                    self.begin_serving(generation);
                }
            }
            Ok(_) if usage_changed => self.show_ranks(),
            Ok(_) => {}
        }
    }

    /// Carries out the state machine's actions. Returns how the service ends, when it does.
    fn act(&mut self) -> Option<ServiceEnd> {
        loop {
            let (now, active) = (self.now(), &self.active);
            let has_left = |key: RequestKey| active.get(&key).is_none_or(Active::is_cancelled);
            match self.step_loop.poll(now, &has_left)? {
                Action::FormGroup { generation } => self.form_group(generation),
                Action::EndGroup { .. } => {
                    self.serves_no_more("the ranks of the generation are being ended");
                    // Ranks are killed and reaped, so that a rank that wakes up late cannot write to the next generation.
                    let left = self.group.take().map(Group::end).unwrap_or_default();
                    self.memories.end_generation(&left);
                    self.end_loading();
                    self.note_pause();
                    self.launched.clear();
                    self.shared.note_steps(false);
                    self.experts_ended = None;
                    self.show_ranks();
                }
                Action::Launch { step } => self.launch(step),
                Action::Answer { key, receipt } => self.answer(key, receipt),
                Action::Fail { key, failure } => self.fail(key, failure),
                Action::Restart { key } => {
                    if let Some(active) = self.active.get_mut(&key) {
                        active.restart();
                    }
                }
                Action::Show { state, reason } => {
                    // After the inbox, so that callers who see the new state find the inbox in agreement with it.
                    self.exchange();
                    self.shared.set_state(state, &reason);
                    let reason = Some(&*reason).filter(|reason| !reason.is_empty());
                    tracing::info!(reason, "state: {}", format!("{state:?}").to_lowercase());
                }
                Action::ReportDrain { requests_dropped } => {
                    let dropped = Some(requests_dropped).filter(|&dropped| dropped > 0);
                    tracing::info!(requests_dropped = dropped, "drained");
                    for waiter in std::mem::take(&mut self.shared.front().drain_waiters) {
                        let _ = waiter.send(DrainReport { requests_dropped });
                    }
                }
                Action::End(end) => return Some(end),
            }
        }
    }

    /// Says at once that no generation serves: its end may wait for processes that do not end.
    pub(super) fn serves_no_more(&self, reason: &str) {
        if *self.shared.state.borrow() == ServiceState::Serving {
            self.shared.set_state(ServiceState::Reforming, reason);
        }
    }

    fn answer(&mut self, key: RequestKey, receipt: Receipt) {
        if let Some(active) = self.active.remove(&key) {
            let fingerprint = self.shared.fingerprint();
            active.answer(receipt, fingerprint, self.launched.is_empty());
        }
    }

    fn fail(&mut self, key: RequestKey, failure: Failure) {
        let Some(active) = self.active.remove(&key) else { return };
        let request = active.request();
        match failure {
            Failure::Unavailable { reason, retry_after } => {
                active.fail(StepError::Unavailable { reason: reason.as_ref().to_owned(), retry_after });
            }
            Failure::DeadlineExceeded => active.fail(StepError::DeadlineExceeded),
            Failure::OtherWeights { expected, loaded } => {
                active.fail(StepError::OtherWeights { expected, loaded });
            }
            Failure::Cancelled => {
                tracing::debug!(request = %request.id, "cancelled");
                metrics::counter!(names::REQUESTS_CANCELLED_TOTAL).increment(1);
            }
            Failure::Poisoned { lost_steps } => {
                tracing::error!(
                    request = %request.id, layer = %request.layer, tokens = request.tokens, dtype = %request.dtype,
                    k = request.routing.as_ref().map(|given| given.k), lost_steps,
                    "a request ended a generation that computed nothing else; it will not be retried"
                );
                metrics::counter!(names::REQUESTS_POISONED_TOTAL).increment(1);
                active.fail(StepError::Poisoned { lost_steps });
            }
        }
    }

    /// Sleeps until mail, a completion, an event of a rank, or the time of the next decision.
    fn wait(&mut self) {
        let now = Instant::now();
        let mut until = self.shared.instant(self.step_loop.wake_at(self.shared.time(now)));
        if !self.is_quiet() && self.has_unpublished() {
            until = until.min(self.last_event + QUIET);
        }
        let has_waiting = self.step_loop.has_waiting();
        let spin = match self.launched.is_empty() {
            true => spin_between_steps(self.cluster.spin, self.cluster.usable_cores),
            false => self.cluster.spin,
        };
        let spin = spin.saturating_sub(now - self.last_event);
        let Driver { shared, group, loading, reload, experts_ended, .. } = self;
        if let Some(group) = group {
            group.want_early_notice(has_waiting);
        }
        let policy = WaitPolicy { spin, deadline: Some(until) };
        let event = shared.bell.bell().wait_until(policy, || {
            shared.has_mail()
                || loading.as_mut().is_some_and(|(_, loading)| loading.collect())
                || reload.as_mut().is_some_and(Reload::collect)
                || group.as_mut().is_some_and(|group| {
                    group.collect()
                        || (has_waiting
                            && group.experts_ended().is_some_and(|step| Some(step) != *experts_ended))
                })
        });
        // A timeout is the periodic tick; it does not count as an event.
        if event.is_ok() {
            self.last_event = Instant::now();
        }
    }
}
