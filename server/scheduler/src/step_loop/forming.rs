//! Forming of steps: the choice of the requests that the next step takes.

use expertd_types::{Slot, StepId};

use super::spread::cut;
use super::{Action, Request, Step, StepLoop};
use crate::queue::{AGED_STEP_INTERVAL, Take, Taken};
use crate::{RequestKey, StepKind, Time, Unanswered};

/// The requests that the next step may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// A row of zeros, alone.
    Trial(StepKind),
    /// One suspected request, alone.
    Suspect(RequestKey),
    /// Requests of a kind, `lead` first if given.
    Kind { kind: StepKind, lead: Option<RequestKey> },
}

impl StepLoop {
    /// Forms a step if there is work and a free slot. Returns whether it formed a step or dropped requests.
    pub(super) fn form_step(&mut self, now: Time, has_left: &impl Fn(RequestKey) -> bool) -> bool {
        match self.choose(now) {
            Some(Choice::Trial(kind)) => {
                self.launch(kind, &[], true, now);
                true
            }
            Some(Choice::Suspect(key)) => self.form_alone(key, now, has_left),
            Some(Choice::Kind { kind, lead }) => self.form_shared(kind, lead, now, has_left),
            None => false,
        }
    }

    /// Time at which a request has waited long enough for others to join its step, if a step could form then. Requests that have
    /// already waited long enough are taken by the next `poll`, or after an event.
    pub(super) fn next_ripe(&self, now: Time) -> Option<Time> {
        if !self.may_form(true) {
            return None;
        }
        let Some(max_wait) = self.config.max_wait else {
            return self.gathering.end().filter(|end| *end > now && !self.queue.is_empty());
        };
        let oldest = |kind| self.queue.oldest(kind).and_then(|key| self.requests.get(&key));
        let due = self.queue.kinds().filter_map(oldest).map(|request| request.admitted + max_wait);
        due.filter(|due| *due > now).min()
    }

    /// Whether a step of waiting requests could be formed now.
    pub fn can_form(&self, now: Time) -> bool {
        self.choose(now).is_some()
    }

    /// Whether a step may form now. One experts phase runs at a time. A step forms when the last step's experts phase has ended, so
    /// that arrivals can join it until then. A `full` step forms as soon as there is a slot, so that its rows are copied while the
    /// last one computes.
    fn may_form(&self, full: bool) -> bool {
        self.is_serving()
            && !self.is_replaced
            && self.in_flight.len() < self.config.slots
            && self.in_flight.back().is_none_or(|last| !last.is_alone && (full || last.experts_ended))
    }

    fn choose(&self, now: Time) -> Option<Choice> {
        if !self.may_form(true) {
            return None;
        }
        if let Some((kind, _)) = self.trial {
            return self.in_flight.is_empty().then_some(Choice::Trial(kind));
        }
        if let Some(key) = self.suspects.first() {
            return self.in_flight.is_empty().then_some(Choice::Suspect(*key));
        }
        let full = |kind: &StepKind| self.queue.tokens_of(*kind) >= self.config.max_tokens_per_step;
        let oldest = |kind: &StepKind| self.queue.oldest(*kind).and_then(|key| self.requests.get(&key));
        // Requests that lost a step have already waited.
        let is_urgent = |kind: &StepKind| {
            self.drain.is_some() || full(kind) || oldest(kind).is_some_and(|oldest| oldest.lost_steps > 0)
        };
        let max_wait = self.config.max_wait.unwrap_or_default();
        let ripe = |kind: &StepKind| {
            max_wait.is_zero()
                || is_urgent(kind)
                || oldest(kind).is_some_and(|oldest| now >= oldest.admitted + max_wait)
        };
        let is_aged = self.steps_since_aged + 1 >= AGED_STEP_INTERVAL;
        let mut ripe_kinds = self.queue.kinds().filter(ripe);
        let (kind, lead) = if is_aged {
            let (lead, kind) =
                ripe_kinds.filter_map(|kind| self.queue.oldest(kind).map(|key| (key, kind))).min()?;
            (kind, Some(lead))
        } else {
            (ripe_kinds.next()?, None)
        };
        // The kind whose turn it is waits, and no other one overtakes it, so that a wait holds nothing back twice.
        let may_wait = |oldest: &Request| {
            self.gathering.until(oldest.connection, oldest.deadline).is_some_and(|until| now < until)
        };
        let gathers =
            self.config.max_wait.is_none() && !is_urgent(&kind) && oldest(&kind).is_some_and(may_wait);
        (self.may_form(full(&kind)) && !gathers).then_some(Choice::Kind { kind, lead })
    }

    fn form_shared(
        &mut self,
        kind: StepKind,
        lead: Option<RequestKey>,
        now: Time,
        has_left: &impl Fn(RequestKey) -> bool,
    ) -> bool {
        let limit = self.config.max_tokens_per_step;
        // A range has at least one row, so there can be too many ranges only if a rank accepts fewer ranges than rows.
        let segments = self.config.max_segments_per_rank;
        let max_takes =
            if segments >= limit.div_ceil(self.config.ranks) { usize::MAX } else { segments.max(1) };
        let requests = &self.requests;
        // Deadlines and callers are checked only while a step forms; rows that are in a step are always computed.
        let unwanted = |key| requests.get(&key).is_none_or(|request| request.is_late(now) || has_left(key));
        let Taken { takes, dropped, examined } = self.queue.take(kind, limit, max_takes, lead, unwanted);
        self.examined = examined;
        for key in dropped {
            self.withdraw(key, now, has_left);
        }
        if takes.is_empty() {
            return true;
        }
        self.steps_since_aged = if lead.is_some() { 0 } else { self.steps_since_aged + 1 };
        self.launch(kind, &takes, false, now);
        true
    }

    fn form_alone(&mut self, key: RequestKey, now: Time, has_left: &impl Fn(RequestKey) -> bool) -> bool {
        let Some(request) = self.requests.get(&key) else {
            self.suspects.remove(&key);
            return true;
        };
        let (kind, waiting) = (request.kind, request.tokens - request.begun);
        if request.is_late(now) || has_left(key) {
            self.leave_suspects(key);
            self.withdraw(key, now, has_left);
            return true;
        }
        let tokens = waiting.min(self.config.max_tokens_per_step);
        self.suspect_tokens -= tokens;
        self.launch(kind, &[Take { key, tokens }], true, now);
        true
    }

    /// Launches a step of `takes`, or one of a row of zeros if there are none.
    fn launch(&mut self, kind: StepKind, takes: &[Take], is_alone: bool, now: Time) {
        let Some(group) = &mut self.group else { return };
        let slot = Slot((group.steps_launched % self.config.slots as u64) as u32);
        group.steps_launched += 1;
        self.last_step += 1;
        let id = StepId(self.last_step);
        let is_trial = takes.is_empty();
        let tokens = if is_trial { 1 } else { takes.iter().map(|take| take.tokens).sum() };
        let shared = takes.iter().filter(|_| !is_alone);
        let taken = shared.filter_map(|take| self.requests.get(&take.key));
        let arrived = taken.clone().map(|request| request.admitted).min().unwrap_or(now);
        self.gathering.formed(taken.map(|request| request.connection), arrived, now);
        let (requests, in_step) = (&mut self.requests, &mut self.in_step);
        let mut clients = Vec::with_capacity(if is_alone { 0 } else { takes.len() });
        let ranges = takes.iter().filter_map(|take| {
            let request = requests.get_mut(&take.key)?;
            if !is_alone {
                clients.push(request.client);
            }
            *in_step += usize::from(!request.is_in_step());
            request.first_step.get_or_insert(now);
            let begin = request.begun;
            request.begun += take.tokens;
            Some((take.key, begin..request.begun))
        });
        let trial = is_trial.then_some((RequestKey::TRIAL, 0..1));
        let rows = cut(ranges.chain(trial), tokens, self.config.ranks);
        self.in_flight.push_back(Step {
            id,
            slot,
            kind,
            formed: now,
            tokens,
            rows,
            is_alone,
            experts_ended: false,
            clients,
        });
        // The launch comes before the failures of dropped requests, because ranks wait for it.
        self.actions.push_front(Action::Launch { step: id });
    }

    /// Whether a request must not end yet, because a step in flight names it. While ranks are being ended, this holds for two
    /// kinds of requests only: those that lend memory, which ranks may access until they are gone, and one that was alone in its
    /// step, because it may be the cause of the fault.
    fn is_held(&self, request: &Request) -> bool {
        let was_alone = || self.in_flight.front().is_some_and(|step| step.is_alone);
        request.is_in_step() && (request.in_place || !self.is_leaving() || was_alone())
    }

    /// Ends a request that is late or whose caller has left. Its waiting rows have left the queue. A request that is held fails
    /// when its last step has ended.
    fn withdraw(&mut self, key: RequestKey, now: Time, has_left: &impl Fn(RequestKey) -> bool) {
        let Some(request) = self.requests.get(&key) else { return };
        let failure = if request.is_late(now) && !has_left(key) {
            Unanswered::DeadlineExceeded
        } else {
            Unanswered::Cancelled
        };
        if !self.is_held(request) {
            self.end_request(key, failure);
        } else if let Some(request) = self.requests.get_mut(&key) {
            request.withdrawn = Some(failure);
        }
    }

    /// Drops requests that are late or whose callers have left, unless they are held.
    pub(super) fn sweep(&mut self, now: Time, has_left: &impl Fn(RequestKey) -> bool) {
        self.next_sweep = now + super::SWEEP_INTERVAL;
        let unwanted = |(key, request): (&RequestKey, &Request)| {
            let unwanted = !self.is_held(request) && (request.is_late(now) || has_left(*key));
            unwanted.then_some(*key)
        };
        let mut keys: Vec<RequestKey> = self.requests.iter().filter_map(unwanted).collect();
        keys.sort_unstable();
        for key in keys {
            self.leave_queue(key);
            self.withdraw(key, now, has_left);
        }
    }

    /// Removes a request's waiting rows from the queue or from the suspects.
    pub(super) fn leave_queue(&mut self, key: RequestKey) {
        let Some(request) = self.requests.get(&key) else { return };
        if self.suspects.contains(&key) {
            self.leave_suspects(key);
        } else if request.begun < request.tokens && request.withdrawn.is_none() {
            self.queue.remove(request.kind, request.client, key);
        }
    }

    pub(super) fn leave_suspects(&mut self, key: RequestKey) {
        if self.suspects.remove(&key)
            && let Some(request) = self.requests.get(&key)
        {
            self.suspect_tokens -= request.tokens - request.begun;
        }
    }

    /// Fails a request whose waiting rows have left the queue.
    pub(super) fn end_request(&mut self, key: RequestKey, failure: Unanswered) {
        if let Some(request) = self.requests.remove(&key) {
            self.in_step -= usize::from(request.is_in_step());
            self.actions.push_back(Action::Fail { key, failure });
        }
    }
}
