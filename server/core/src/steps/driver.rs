//! The thread's side of the step loop: processes, the rows of requests, and what callers see. The driver of the state machines
//! ([`expertd_scheduler::Driver`]) decides what happens when.

mod callers;
mod ranks;
mod rows;
mod show;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_ipc::{Copier, StagedRows};
use expertd_scheduler::{Callers as _, Config, Driver, RecoveryPolicy, RequestKey, StepLoop, Time};
use expertd_shm::wait::spin_between_steps;
use expertd_shm::{ObservedTime, WaitPolicy};
use expertd_types::{MemoryId, StepId, WeightVersion};

use self::rows::Unrecorded;
use self::show::{QueueCounts, show_counters_of_faults};
use super::active::Active;
use super::caller::ClientMemory;
use super::config::ServiceEnd;
use super::shared::Shared;
use crate::cluster::{ClusterConfig, Freeing, Group, Loading, WeightSet};
use expertd_telemetry::{StepMetrics, progress};

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
    /// Number of ranks that run it: the first ones.
    ranks: usize,
    /// Whether rank 0 raises the completion words of its calls.
    raises: bool,
}

/// The state with which the driver's decisions are carried out: ranks, loaders, weights, requests.
struct Processes {
    shared: Arc<Shared>,
    cluster: Arc<ClusterConfig>,
    metrics: StepMetrics,
    copier: Copier,
    active: HashMap<RequestKey, Active>,
    launched: VecDeque<Launched>,
    /// Completed steps that the metrics lack.
    unrecorded: Vec<Unrecorded>,
    group: Option<Group>,
    /// The loaders of a set.
    loading: Option<Loading>,
    /// Whole sets.
    sets: Vec<WeightSet>,
    /// Memory of sets and of ended loaders that may not be free yet.
    freeing: Freeing,
    /// Memories of clients, held until no rank has them.
    clients: HashMap<MemoryId, Box<dyn ClientMemory>>,
    /// Time since the last order about a memory.
    order_time: ObservedTime,
    /// Time of the last event, from which spinning is timed.
    last_event: Instant,
    shown: QueueCounts,
}

/// Runs the step loop until the service ends.
pub(super) fn run(shared: Arc<Shared>, cluster: ClusterConfig) -> ServiceEnd {
    show_counters_of_faults();
    let config = &shared.config;
    let rules = Config {
        ranks: cluster.shape.sources as usize,
        slots: cluster.shape.slots as usize,
        max_tokens_per_step: config.max_tokens_per_step,
        max_segments_per_rank: cluster.shape.max_segments,
        max_wait: config.max_wait,
        on_fault: config.on_fault,
        recovery: RecoveryPolicy::default(),
        seed: shared.seed,
    };
    let source = cluster.checkpoint.clone();
    let processes = Processes {
        metrics: StepMetrics::new(cluster.shape.ranks as usize),
        copier: Copier::new(config.copy_threads, cluster.spin),
        shared,
        cluster: Arc::new(cluster),
        active: HashMap::new(),
        launched: VecDeque::new(),
        unrecorded: Vec::new(),
        group: None,
        loading: None,
        sets: Vec::new(),
        freeing: Freeing::default(),
        clients: HashMap::new(),
        order_time: ObservedTime::start(Instant::now()),
        last_event: Instant::now(),
        shown: QueueCounts::default(),
    };
    let mut driver = Driver::new(rules, FIRST_VERSION, source, processes);
    let end = loop {
        // A round lasts at most SWEEP_INTERVAL; longer operations tick by themselves.
        progress::tick();
        if let Some(end) = driver.round() {
            break end;
        }
        let (wake_at, heard) = (driver.wake_at(), driver.heard_experts());
        let (steps, processes) = driver.parts();
        if processes.is_quiet() {
            processes.record_steps();
            processes.show_queue(steps);
        }
        if !steps.has_news_for_inbox(processes.now()) {
            processes.wait(steps, wake_at, heard);
        }
    };
    let (_, processes) = driver.parts();
    if let Some(group) = processes.group.take() {
        group.leave(Instant::now() + LEAVE_TIMEOUT);
    }
    // Nothing waits for memory that is freed at the end.
    processes.sets.drain(..).for_each(|set| drop(set.free(&processes.shared.bell)));
    end
}

impl Processes {
    /// Whether metrics can be recorded without delaying a call: while a step runs, or when no event has come for a while.
    fn is_quiet(&self) -> bool {
        !self.launched.is_empty() || self.cluster.spin.is_zero() || self.last_event.elapsed() >= QUIET
    }

    /// Sleeps until mail, a completion, an event of a rank, or `wake_at`. `heard` is the newest step whose end of the
    /// experts phase the step loop was told.
    fn wait(&mut self, steps: &StepLoop, wake_at: Time, heard: Option<StepId>) {
        let now = Instant::now();
        let mut until = self.shared.instant(wake_at);
        if !self.is_quiet() && self.has_unpublished(steps) {
            until = until.min(self.last_event + QUIET);
        }
        let has_waiting = steps.has_waiting();
        let spin = match self.launched.is_empty() {
            true => spin_between_steps(self.cluster.spin, self.cluster.usable_cores),
            false => self.cluster.spin,
        };
        let spin = spin.saturating_sub(now - self.last_event);
        let Processes { shared, group, loading, .. } = self;
        if let Some(group) = group {
            group.want_early_notice(has_waiting);
        }
        let policy = WaitPolicy { spin, deadline: Some(until) };
        let event = shared.bell.bell().wait_until(policy, || {
            shared.has_mail()
                || loading.as_mut().is_some_and(Loading::collect)
                || group.as_mut().is_some_and(|group| {
                    group.collect()
                        || (has_waiting
                            && !group.is_ending()
                            && group.experts_ended().is_some_and(|step| Some(step) != heard))
                })
        });
        // A timeout is the periodic tick; it does not count as an event.
        if event.is_ok() {
            self.last_event = Instant::now();
        }
    }
}
