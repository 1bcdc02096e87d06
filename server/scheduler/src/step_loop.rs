//! The step loop.

mod admission;
mod answering;
mod forming;
mod gathering;
mod generation;
mod interface;
mod spread;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use expertd_types::{Generation, LayerId, StepId, WeightVersion};

use self::admission::Told;
use self::gathering::Gathering;
pub use self::interface::{Action, Config, End, OnFault, RankRows, ServiceState, Step};
pub use self::spread::spread;
use crate::hash::KeyMap;
use crate::queue::FairQueue;
use crate::recovery::Recovery;
use crate::throughput::Throughput;
use crate::{ClientKey, ConnectionKey, Fault, RequestKey, StepKind, Time, Unanswered};

/// Waiting requests are checked for deadlines and for callers that left at least this often.
pub const SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// An admitted request until its answer or failure.
#[derive(Clone, Debug)]
struct Request {
    client: ClientKey,
    connection: ConnectionKey,
    kind: StepKind,
    tokens: usize,
    deadline: Option<Time>,
    admitted: Time,
    /// Number of rows that are complete. They are the first ones.
    completed: usize,
    /// The only version of the weights that may compute rows of the request.
    expected_version: Option<WeightVersion>,
    /// Number of rows that are complete or in a step. They are the first ones.
    begun: usize,
    first_step: Option<Time>,
    /// Number of generations that ended while rows of the request were in a step.
    lost_steps: u32,
    /// The steps that computed the complete rows.
    steps: Vec<StepId>,
    /// Number of complete rows per rank.
    tokens_per_rank: Vec<u32>,
    /// Whether ranks use memory that the caller lends.
    in_place: bool,
    /// Why the request ends without an answer once no step in flight names it. Its waiting rows have left the queue.
    withdrawn: Option<Unanswered>,
}

impl Request {
    fn is_late(&self, now: Time) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    const fn is_in_step(&self) -> bool {
        self.begun > self.completed
    }
}

/// The current generation.
#[derive(Clone, Copy, Debug)]
struct GroupLife {
    generation: Generation,
    /// When its ranks started, or, while they have not, when it was wanted.
    started: Time,
    ready: Option<Time>,
    steps_completed: u64,
    /// Number of launched steps, which determines the slot of the next one.
    steps_launched: u64,
}

/// Why the ranks of a generation are being ended.
#[derive(Clone, Debug)]
enum Leaving {
    /// The generation had this fault.
    Fault(Fault),
    /// The next one serves other weights.
    Replaced,
    /// The drain's deadline passed.
    Drained,
}

/// The step loop as a state machine. The crate's documentation and `docs/step-loop.md` describe its use.
#[derive(Clone, Debug)]
pub struct StepLoop {
    config: Config,
    queue: FairQueue,
    requests: KeyMap<RequestKey, Request>,
    /// Number of requests with rows in a step.
    in_step: usize,
    /// Requests that lost several steps and run alone, the oldest first. They are not in the queue.
    suspects: BTreeSet<RequestKey>,
    /// Number of rows of suspects that are not in a step.
    suspect_tokens: usize,
    in_flight: VecDeque<Step>,
    gathering: Gathering,
    /// The generation that forms, runs, or whose ranks are being ended.
    group: Option<GroupLife>,
    /// Set while ranks are being ended. Steps in flight then have no answer yet, and may still get one.
    leaving: Option<Leaving>,
    last_generation: u64,
    last_step: u64,
    /// Whether any generation has served.
    has_served: bool,
    weight_version: Option<WeightVersion>,
    recovery: Recovery,
    throughput: Throughput,
    /// Number of poisoned requests of each layer since its last complete step.
    poisoned: KeyMap<LayerId, u32>,
    /// A kind whose layer has reached the limit of poisoned requests, so that a row of zeros is tried next, and the number of
    /// generations that ended with such a row in a step.
    trial: Option<(StepKind, u32)>,
    /// Whether a generation with other weights is to replace this one: no step forms, and the generation ends after the steps in
    /// flight.
    is_replaced: bool,
    /// Whether the last generation was replaced: requests then wait for the next one, for any value of `on_fault`.
    is_replacement: bool,
    steps_since_aged: u32,
    next_sweep: Time,
    /// Number of queue entries that were examined to form the last step.
    examined: usize,
    drain: Option<Time>,
    /// How the service will end, once the inbox is closed.
    ending: Option<End>,
    is_closed: bool,
    has_ended: bool,
    /// Why no generation serves.
    reason: Arc<str>,
    jitter: u64,
    actions: VecDeque<Action>,
    told: Option<Told>,
}

impl StepLoop {
    /// A step loop that forms its first generation at once.
    #[must_use]
    pub fn new(config: Config) -> Self {
        StepLoop {
            queue: FairQueue::default(),
            requests: KeyMap::default(),
            in_step: 0,
            suspects: BTreeSet::new(),
            suspect_tokens: 0,
            in_flight: VecDeque::new(),
            gathering: Gathering::default(),
            group: None,
            leaving: None,
            last_generation: 0,
            last_step: 0,
            has_served: false,
            weight_version: None,
            recovery: Recovery::new(config.recovery.clone()),
            throughput: Throughput::default(),
            poisoned: KeyMap::default(),
            trial: None,
            is_replaced: false,
            is_replacement: false,
            steps_since_aged: 0,
            next_sweep: Time(0),
            examined: 0,
            drain: None,
            ending: None,
            is_closed: false,
            has_ended: false,
            reason: "the weights are being loaded".into(),
            jitter: config.seed,
            actions: VecDeque::new(),
            told: None,
            config,
        }
    }

    /// Returns the next action to carry out, or `None`. `has_left` tells whether the caller of a request has left. If an action fails, the caller must report that as an event before the next
    /// call.
    pub fn poll(&mut self, now: Time, has_left: &impl Fn(RequestKey) -> bool) -> Option<Action> {
        loop {
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            if self.has_ended || !self.advance(now, has_left) {
                return None;
            }
        }
    }

    /// Makes one decision. Returns whether there was one to make.
    fn advance(&mut self, now: Time, has_left: &impl Fn(RequestKey) -> bool) -> bool {
        if self.ending.is_some() {
            if !self.is_closed {
                return false;
            }
            return self.end();
        }
        if self.check_drain(now) {
            return true;
        }
        if now >= self.next_sweep {
            self.sweep(now, has_left);
        }
        if self.has_actions() || self.end_replaced_group() {
            return true;
        }
        if self.group.is_none() { self.form_group(now) } else { self.form_step(now, has_left) }
    }

    /// Time at which [`poll`](Self::poll) must be called again if no event comes before.
    #[must_use]
    pub fn wake_at(&self, now: Time) -> Time {
        let mut at = now + SWEEP_INTERVAL;
        if !self.requests.is_empty() {
            at = at.min(self.next_sweep);
        }
        // One that has passed waits for the end of ranks.
        if let Some(deadline) = self.drain.filter(|deadline| *deadline > now) {
            at = at.min(deadline);
        }
        if self.group.is_none() {
            at = at.min(self.recovery.next_attempt());
        } else if let Some(ripe) = self.next_ripe(now) {
            at = at.min(ripe);
        }
        at
    }

    /// Number of received rows that are not in a step.
    pub const fn queued_tokens(&self) -> usize {
        self.queue.tokens() + self.suspect_tokens
    }

    /// Whether a request waits for the end of its last step to fail.
    pub fn is_withdrawn(&self, key: RequestKey) -> bool {
        self.requests.get(&key).is_some_and(|request| request.withdrawn.is_some())
    }

    /// Number of requests without rows in a step.
    pub fn requests_queued(&self) -> usize {
        self.requests.len() - self.in_step
    }

    /// Number of requests with rows in a step.
    pub const fn requests_in_step(&self) -> usize {
        self.in_step
    }

    /// Whether any rows wait for a step. If so, ranks report the end of an experts phase early.
    pub fn has_waiting(&self) -> bool {
        !self.queue.is_empty() || !self.suspects.is_empty()
    }

    /// Whether decided actions wait for [`poll`](Self::poll).
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// The steps under way, the oldest first.
    pub const fn in_flight(&self) -> &VecDeque<Step> {
        &self.in_flight
    }

    /// Number of clients with nothing waiting whose use the fair queue remembers.
    pub fn idle_clients(&self) -> usize {
        self.queue.idle_clients()
    }

    /// Number of queue entries that were examined to form the last step.
    pub const fn entries_examined(&self) -> usize {
        self.examined
    }

    /// Whether the service drains.
    pub const fn is_draining(&self) -> bool {
        self.drain.is_some()
    }

    /// The generation whose processes run, whether or not it serves.
    pub fn generation(&self) -> Option<Generation> {
        self.group.map(|group| group.generation)
    }

    /// Whether the ranks of the generation are being ended.
    pub const fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Whether a generation serves.
    pub fn is_serving(&self) -> bool {
        self.leaving.is_none() && self.group.is_some_and(|group| group.ready.is_some())
    }

    fn show(&mut self, state: ServiceState, reason: Arc<str>) {
        // States that have not been shown yet are outdated.
        self.actions.retain(|action| !matches!(action, Action::Show { .. }));
        self.actions.push_back(Action::Show { state, reason });
    }
}
