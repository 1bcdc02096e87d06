//! The step loop.

mod answering;
mod forming;
mod generation;
mod interface;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use expertd_types::{Generation, LayerId, StepId, WeightVersion};

pub use self::interface::{Action, Callers, Config, End, GroupFault, OnFault, RankRows, ServiceState, Step};
use crate::hash::KeyMap;
use crate::inbox::{Admission, View};
use crate::queue::FairQueue;
use crate::recovery::{Recovery, jittered};
use crate::throughput::Throughput;
use crate::{ClientKey, Delivery, Failure, Inbox, RequestKey, StepKind, Time};

/// Waiting requests are checked for deadlines and for callers that left at least this often.
pub const SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// An admitted request until its answer or failure.
#[derive(Clone, Debug)]
struct Request {
    client: ClientKey,
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
    formed: Time,
    ready: Option<Time>,
    steps_completed: u64,
    /// Number of launched steps, which determines the slot of the next one.
    steps_launched: u64,
}

/// Whether requests may be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Open,
    Recovering,
    NotReady,
    Ended,
}

/// The state that the inbox was told last.
#[derive(Clone, Copy, Debug)]
struct Told {
    waiting_tokens: usize,
    standing: Standing,
    ready_at: Option<Time>,
    tokens_per_second: f64,
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
    group: Option<GroupLife>,
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
            group: None,
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

    /// Whether [`exchange`](Self::exchange) would tell the inbox something new.
    #[must_use]
    pub fn has_news_for_inbox(&self, now: Time) -> bool {
        self.told.is_none_or(|told| {
            told.waiting_tokens != self.queued_tokens()
                || told.standing != self.standing()
                || told.tokens_per_second != self.throughput.tokens_per_second()
                // While a generation is overdue, the expected time moves. The inbox is told again when the time it was told has passed.
                || told.ready_at.is_some_and(|ready_at| ready_at <= now)
        })
    }

    /// Exchanges state with the callers' side, under the lock. It takes constant time. The delivery must be given to
    /// [`receive`](Self::receive) after the lock is released.
    pub fn exchange<P>(&mut self, inbox: &mut Inbox<P>, now: Time) -> Delivery<P> {
        let admission = self.admission(now);
        let ready_at = match &admission {
            Admission::Recovering { ready_at, .. } | Admission::NotReady { ready_at, .. } => Some(*ready_at),
            Admission::Open | Admission::Ended { .. } => None,
        };
        let waiting_tokens = self.queued_tokens();
        let tokens_per_second = self.throughput.tokens_per_second();
        let (delivery, drain) = inbox.exchange(View { waiting_tokens, admission, tokens_per_second });
        if let Some(deadline) = drain
            && self.drain.replace(deadline).is_none()
            && self.ending.is_none()
            && !self.has_ended
        {
            self.show(ServiceState::Draining, "draining".into());
        }
        self.told = Some(Told {
            waiting_tokens: waiting_tokens + delivery.tokens(),
            standing: self.standing(),
            ready_at,
            tokens_per_second,
        });
        self.is_closed = self.ending.is_some();
        delivery
    }

    /// Queues the requests of a delivery. `keep` gets each request's `P`, before any action names the request.
    pub fn receive<P>(&mut self, delivery: Delivery<P>, now: Time, mut keep: impl FnMut(RequestKey, P)) {
        for mail in delivery.0 {
            keep(mail.key, mail.payload);
            let submission = mail.submission;
            let request = Request {
                client: submission.client,
                kind: submission.kind,
                tokens: submission.tokens,
                deadline: submission.deadline,
                admitted: mail.admitted,
                expected_version: submission.expected_version,
                completed: 0,
                begun: 0,
                first_step: None,
                lost_steps: 0,
                steps: Vec::new(),
                tokens_per_rank: Vec::new(),
            };
            // The inbox learns of a fault or of the end at the next exchange; requests that arrived before are refused here.
            let refused = match self.admission(now) {
                Admission::Open => false,
                Admission::Recovering { ready_at, .. } => {
                    request.deadline.is_some_and(|deadline| deadline < ready_at)
                }
                Admission::NotReady { .. } | Admission::Ended { .. } => true,
            };
            if refused {
                let failure = self.unavailable(now);
                self.actions.push_back(Action::Fail { key: mail.key, failure });
                continue;
            }
            // Where no generation serves, the next one decides.
            if self.is_serving()
                && let Some(failure) = self.other_weights(&request)
            {
                self.actions.push_back(Action::Fail { key: mail.key, failure });
                continue;
            }
            self.queue.push(request.kind, request.client, mail.key, request.tokens);
            self.requests.insert(mail.key, request);
        }
    }

    /// Returns the next action to carry out, or `None`. If an action fails, the caller must report that as an event before the next
    /// call.
    pub fn poll(&mut self, now: Time, callers: &impl Callers) -> Option<Action> {
        loop {
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            if self.has_ended || !self.advance(now, callers) {
                return None;
            }
        }
    }

    /// Makes one decision. Returns whether there was one to make.
    fn advance(&mut self, now: Time, callers: &impl Callers) -> bool {
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
            self.sweep(now, callers);
        }
        if self.has_actions() || self.end_replaced_group(now) {
            return true;
        }
        if self.group.is_none() { self.form_group(now) } else { self.form_step(now, callers) }
    }

    /// Time at which [`poll`](Self::poll) must be called again if no event comes before.
    #[must_use]
    pub fn wake_at(&self, now: Time) -> Time {
        let mut at = now + SWEEP_INTERVAL;
        if !self.requests.is_empty() {
            at = at.min(self.next_sweep);
        }
        if let Some(deadline) = self.drain {
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
    #[must_use]
    pub const fn queued_tokens(&self) -> usize {
        self.queue.tokens() + self.suspect_tokens
    }

    /// Number of requests without rows in a step.
    #[must_use]
    pub fn requests_queued(&self) -> usize {
        self.requests.len() - self.in_step
    }

    /// Number of requests with rows in a step.
    #[must_use]
    pub const fn requests_in_step(&self) -> usize {
        self.in_step
    }

    /// Whether any rows wait for a step. If so, ranks report the end of an experts phase early.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        !self.queue.is_empty() || !self.suspects.is_empty()
    }

    /// Whether decided actions wait for [`poll`](Self::poll).
    #[must_use]
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// The steps under way, the oldest first.
    #[must_use]
    pub const fn in_flight(&self) -> &VecDeque<Step> {
        &self.in_flight
    }

    /// Number of clients with nothing waiting whose use the fair queue remembers.
    #[must_use]
    pub fn idle_clients(&self) -> usize {
        self.queue.idle_clients()
    }

    /// Number of queue entries that were examined to form the last step.
    #[must_use]
    pub const fn entries_examined(&self) -> usize {
        self.examined
    }

    /// The generation whose processes run, whether or not it serves.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        self.group.map(|group| group.generation)
    }

    /// Whether a generation serves.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.group.is_some_and(|group| group.ready.is_some())
    }

    /// Whether requests may be admitted, without the reason and the retry time for callers.
    fn standing(&self) -> Standing {
        if self.ending.is_some() || self.has_ended {
            Standing::Ended
        } else if self.is_serving() {
            Standing::Open
        } else if self.has_served && (self.config.on_fault == OnFault::Retry || self.is_replacement) {
            Standing::Recovering
        } else {
            Standing::NotReady
        }
    }

    fn admission(&self, now: Time) -> Admission {
        let (reason, ready_at) = (&self.reason, || self.expected_ready(now));
        match self.standing() {
            Standing::Open => Admission::Open,
            Standing::Recovering => {
                Admission::Recovering { reason: Arc::clone(reason), ready_at: ready_at() }
            }
            Standing::NotReady => Admission::NotReady { reason: Arc::clone(reason), ready_at: ready_at() },
            Standing::Ended => Admission::Ended { reason: Arc::clone(reason) },
        }
    }

    fn expected_ready(&self, now: Time) -> Time {
        self.recovery.expected_ready(self.group.map(|group| group.formed), now)
    }

    /// The failure of requests that do not wait for the next generation.
    fn unavailable(&mut self, now: Time) -> Failure {
        let wait = self.expected_ready(now).since(now);
        Failure::Unavailable {
            reason: Arc::clone(&self.reason),
            retry_after: jittered(wait, &mut self.jitter),
        }
    }

    fn show(&mut self, state: ServiceState, reason: Arc<str>) {
        // States that have not been shown yet are outdated.
        self.actions.retain(|action| !matches!(action, Action::Show { .. }));
        self.actions.push_back(Action::Show { state, reason });
    }
}
