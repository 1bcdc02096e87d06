//! The step loop: one thread that takes requests in, forms steps, hands answers back, and keeps a generation of the
//! EP group alive under it.

mod show;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use self::show::show_counters_of_faults;
use super::active::{Active, IDS, Output, ROWS, WEIGHTS};
use super::plan::pieces;
use super::queue::FairQueue;
use super::rate::Rate;
use super::service::{Admission, SchedulerConfig, ServiceEnd, Shared};
use crate::backend::{ClientKey, DrainReport, PhaseTimes, ServiceState, StepError, StepTiming};
use crate::cluster::{ClusterConfig, Fault, FaultKind, Group, StepDone};
use crate::telemetry::{StepMetrics, names};
use expertd_ipc::{Copier, StagedRows, WaitPolicy};
use expertd_types::{Generation, LayerId, StepId};

/// The loop looks at deadlines and at its ranks at least this often.
const TICK: Duration = Duration::from_millis(100);
/// Generations in a row that may end before they are ready.
const MAX_ATTEMPTS: u32 = 5;
/// The longest pause between two of them.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// What the requests of one step must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Lane {
    layer: LayerId,
    top_k: usize,
}

/// Number of a request within the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key(u64);

/// A step that was launched: whose rows stand where.
struct Launched {
    step: StepId,
    lane: Lane,
    formed: Instant,
    parts: Vec<(Key, StagedRows)>,
    tokens_per_rank: Vec<usize>,
}

pub(super) struct Driver {
    shared: Arc<Shared>,
    cluster: Arc<ClusterConfig>,
    config: SchedulerConfig,
    metrics: StepMetrics,
    copier: Copier,
    queue: FairQueue<Lane, ClientKey, Key>,
    active: HashMap<Key, Active>,
    launched: VecDeque<Launched>,
    group: Option<Group>,
    last_generation: u64,
    last_step: u64,
    last_key: u64,
    /// Generations in a row that ended before they were ready.
    attempts: u32,
    next_attempt: Instant,
    /// When there was last something to do.
    last_event: Instant,
    /// Whether the next tick is due.
    next_sweep: Instant,
    end: Option<ServiceEnd>,
    rate: Rate,
}

impl Driver {
    pub(super) fn new(shared: Arc<Shared>, cluster: ClusterConfig, config: SchedulerConfig) -> Self {
        let metrics = StepMetrics::new(cluster.shape.ranks as usize);
        let copier = Copier::new(config.copy_threads, cluster.spin);
        Driver {
            shared,
            cluster: Arc::new(cluster),
            config,
            metrics,
            copier,
            queue: FairQueue::default(),
            active: HashMap::new(),
            launched: VecDeque::new(),
            group: None,
            last_generation: 0,
            last_step: 0,
            last_key: 0,
            attempts: 0,
            next_attempt: Instant::now(),
            last_event: Instant::now(),
            next_sweep: Instant::now(),
            end: None,
            rate: Rate::default(),
        }
    }

    pub(super) fn run(mut self) {
        show_counters_of_faults();
        while self.end.is_none() {
            self.take_mail();
            if let Err(fault) = self.advance() {
                self.end_generation(&fault);
            }
            self.sweep();
            self.check_drain();
            if self.end.is_none() {
                self.wait();
            }
        }
        if let Some(group) = self.group.take() {
            group.leave(Instant::now() + Duration::from_secs(1));
        }
        self.shared.end.send_replace(self.end.take());
    }

    /// Sleeps until something happened: mail, a completion, a rank's news, or the next tick.
    fn wait(&mut self) {
        let now = Instant::now();
        let mut until = now + TICK;
        if self.group.is_none() {
            until = until.min(self.next_attempt);
        }
        let full = self.is_full();
        if let Some(lane) = self.queue.next_lane()
            && self.group.as_ref().is_some_and(|group| group.next_slot(full).is_some())
            && let Some(oldest) = self.queue.oldest(lane)
        {
            until = until.min(oldest + self.config.max_wait);
        }
        let waiting = !self.queue.is_empty();
        let Driver { shared, group, .. } = self;
        let had_slot = group.as_ref().is_some_and(|group| group.next_slot(full).is_some());
        if let Some(group) = group {
            group.want_early_notice(waiting);
        }
        let spin = self.cluster.spin.saturating_sub(now - self.last_event);
        let policy = WaitPolicy { spin, deadline: Some(until) };
        let event = shared.bell.bell().wait_until(policy, || {
            shared.mail.load(Ordering::Acquire)
                || group.as_mut().is_some_and(|group| {
                    group.collect() || (waiting && !had_slot && group.next_slot(full).is_some())
                })
        });
        // Timing out is the tick, which is none.
        if event.is_ok() {
            self.last_event = Instant::now();
        }
    }

    fn take_mail(&mut self) {
        if !self.shared.mail.swap(false, Ordering::AcqRel) {
            return;
        }
        let incoming = std::mem::take(&mut self.shared.inbox().incoming);
        for mail in incoming {
            self.last_key += 1;
            let key = Key(self.last_key);
            let default_k = self
                .shared
                .model
                .read()
                .ok()
                .and_then(|m| m.layers.get(&mail.request.layer).map(|l| l.top_k));
            let top_k = mail.request.routing.as_ref().map_or(default_k.unwrap_or(1), |r| r.k);
            let lane = Lane { layer: mail.request.layer, top_k };
            self.queue.push(lane, mail.request.client, key, mail.request.tokens, mail.admitted);
            self.active.insert(key, Active::new(mail, self.cluster.shape.hidden));
        }
        self.show_queue();
    }

    /// Moves the generation on: forms one if there is none, answers completed steps, forms new ones.
    fn advance(&mut self) -> Result<(), Fault> {
        let Some(group) = &mut self.group else {
            return self.form_generation();
        };
        let was_started = group.is_started();
        let news = group.poll()?;
        if news && !was_started {
            self.show_ranks();
            if self.group.as_ref().is_some_and(Group::is_started) {
                self.begin_serving();
            }
        }
        while let Some(done) = self.group.as_mut().and_then(Group::take_done) {
            self.answer(&done);
        }
        while self.form_step()? {}
        Ok(())
    }

    fn form_generation(&mut self) -> Result<(), Fault> {
        if Instant::now() < self.next_attempt {
            return Ok(());
        }
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        tracing::info!(generation = generation.0, ranks = self.cluster.shape.ranks, "forming a generation");
        let group = Group::form(&self.cluster, generation, &self.shared.bell)
            .map_err(|error| Fault { kind: FaultKind::Setup, message: error.to_string() })?;
        self.group = Some(group);
        self.show_ranks();
        Ok(())
    }

    fn begin_serving(&mut self) {
        let generation = Generation(self.last_generation);
        self.attempts = 0;
        self.shared.set_generation(generation);
        metrics::gauge!(names::GENERATION).set(generation.0 as f64);
        let version =
            self.shared.model.read().map_or_else(|e| e.into_inner().weight_version, |m| m.weight_version);
        metrics::gauge!(names::WEIGHT_VERSION, "version" => version.to_string()).set(1.0);
        let mut inbox = self.shared.inbox();
        if !matches!(inbox.admission, Admission::Draining) {
            inbox.admission = Admission::Open;
            drop(inbox);
            self.shared.set_state(ServiceState::Serving, "");
            metrics::gauge!(names::READY).set(1.0);
            tracing::info!(generation = generation.0, "serving");
        }
    }

    /// Fails what is in flight, kills and reaps every rank, and leaves the next generation to [`advance`](Self::advance).
    fn end_generation(&mut self, fault: &Fault) {
        let was_serving = self.group.as_ref().is_some_and(Group::is_started);
        tracing::error!(generation = self.last_generation, reason = fault.kind.label(), %fault, "generation ended");
        metrics::counter!(names::GENERATION_ENDS_TOTAL, "reason" => fault.kind.label()).increment(1);
        metrics::gauge!(names::READY).set(0.0);
        let retry_after = Duration::from_millis(500);
        let reason = format!("the EP group is re-forming: {fault}");
        let draining = {
            let mut inbox = self.shared.inbox();
            let draining = matches!(inbox.admission, Admission::Draining);
            if !draining {
                inbox.admission = Admission::NotReady { reason: reason.clone(), retry_after };
            }
            draining
        };
        self.take_mail();
        if !draining {
            let state =
                if fault.kind == FaultKind::Load { ServiceState::Failed } else { ServiceState::Reforming };
            self.shared.set_state(state, &reason);
        }
        self.fail_all(&StepError::Unavailable { reason, retry_after });
        // Kills and reaps: a rank that wakes up late has nothing left to write to.
        self.group = None;
        self.show_ranks();
        self.attempts = if was_serving { 0 } else { self.attempts + 1 };
        self.next_attempt = Instant::now()
            + if self.attempts == 0 {
                Duration::ZERO
            } else {
                (TICK * 2u32.pow(self.attempts)).min(MAX_BACKOFF)
            };
        if self.attempts >= MAX_ATTEMPTS {
            let message = format!(
                "{MAX_ATTEMPTS} generations in a row ended before they were ready; the last one: {fault}"
            );
            self.shared.set_state(ServiceState::Failed, &message);
            self.end = Some(match fault.kind {
                FaultKind::Load => ServiceEnd::LoadFailed(message),
                _ => ServiceEnd::SetupFailed(message),
            });
        }
    }

    fn fail_all(&mut self, error: &StepError) {
        self.queue = FairQueue::default();
        self.launched.clear();
        for (_, active) in self.active.drain() {
            active.finish(Err(error.clone()));
        }
        self.shared.inbox().queued_tokens = 0;
        self.show_queue();
    }

    /// Whether the next step would have no room for what arrives later.
    fn is_full(&self) -> bool {
        let waiting = |lane| self.queue.waiting_tokens(lane) >= self.config.max_tokens_per_step;
        self.queue.next_lane().is_some_and(waiting)
    }

    /// Forms and launches one step if there is work and a slot; whether it did.
    fn form_step(&mut self) -> Result<bool, Fault> {
        let full = self.is_full();
        let Some(group) = &mut self.group else { return Ok(false) };
        let (Some(lane), Some(slot)) = (self.queue.next_lane(), group.next_slot(full)) else {
            return Ok(false);
        };
        let limit = self.config.max_tokens_per_step;
        let now = Instant::now();
        if !self.config.max_wait.is_zero()
            && self.queue.waiting_tokens(lane) < limit
            && self.queue.oldest(lane).is_some_and(|oldest| now < oldest + self.config.max_wait)
        {
            return Ok(false);
        }
        let mut takes = self.queue.take(lane, limit, usize::MAX);
        let taken: usize = takes.iter().map(|take| take.tokens).sum();
        self.shared.inbox().queued_tokens -= taken;
        // Deadlines and cancellations are looked at here, and only here matter: what is in a step is computed.
        takes.retain(|take| {
            let Some(active) = self.active.get(&take.item) else { return false };
            let gone = active.is_cancelled() || active.is_late(now);
            if gone {
                let rest = self.queue.remove_where(|key| key == take.item);
                self.shared.inbox().queued_tokens -= rest.iter().map(|(_, tokens)| tokens).sum::<usize>();
                if let Some(active) = self.active.remove(&take.item) {
                    active.leave(now);
                }
            }
            !gone
        });
        if takes.is_empty() {
            self.show_queue();
            return Ok(true);
        }

        self.last_step += 1;
        let step = StepId(self.last_step);
        let ranks = self.cluster.shape.ranks as usize;
        let total: usize = takes.iter().map(|take| take.tokens).sum();
        let ranges = takes.iter().filter_map(|take| {
            let active = self.active.get_mut(&take.item)?;
            Some((take.item, active.begin_step(step, take.tokens, now)))
        });
        let plan = pieces(ranges.collect::<Vec<_>>().into_iter(), total, ranks);
        let mut tokens_per_rank = vec![0; ranks];
        for piece in &plan {
            tokens_per_rank[piece.rank.index()] += piece.rows.len();
            if let Some(active) = self.active.get_mut(&piece.item) {
                active.count_tokens(piece.rank, piece.rows.len());
            }
        }
        let mut forming = group.begin(slot, lane.top_k);
        let mut parts = Vec::with_capacity(plan.len());
        for piece in plan {
            let Some(active) = self.active.get(&piece.item) else { continue };
            parts.push((piece.item, forming.stage(piece.rank, &active.rows(piece.rows))?));
        }
        forming.copy(&mut self.copier);
        group.launch(step, slot, lane.layer, lane.top_k, total)?;
        tracing::debug!(%step, layer = %lane.layer, tokens = total, requests = takes.len(), "step launched");
        self.launched.push_back(Launched { step, lane, formed: now, parts, tokens_per_rank });
        self.show_queue();
        Ok(true)
    }

    /// Hands the rows of a completed step to their requests, and answers those that are whole.
    fn answer(&mut self, done: &StepDone) {
        let Some(launched) = self.launched.pop_front() else { return };
        debug_assert_eq!(launched.step, done.step, "steps complete in order");
        let Some(group) = &self.group else { return };
        let [copy_in, gate, prepare, dispatch, experts, combine, copy_out] =
            done.phase_ns.map(Duration::from_nanos);
        let timing = StepTiming {
            step: done.step,
            tokens: done.tokens as u32,
            phases: PhaseTimes { copy_in, gate, prepare, dispatch, experts, combine, copy_out },
            computed: Duration::from_nanos(done.computed_ns()),
        };
        let now = Instant::now();
        let generation = group.generation();
        let ranks = self.cluster.shape.ranks as usize;
        // A request's parts follow each other.
        let (mut keys, mut outputs, mut pieces) = (Vec::new(), Vec::<Output>::new(), Vec::new());
        let mut first = 0;
        for (key, staged) in &launched.parts {
            let Some(active) = self.active.get_mut(key) else { continue };
            if keys.last() != Some(key) {
                active.time(timing);
                keys.push(*key);
                first = outputs.as_flattened().len();
                outputs.push(active.give_output());
            }
            pieces.push((first + ROWS, group.answer(staged)));
            if active.wants_routing() {
                let (ids, weights) = group.routing(staged, launched.lane.top_k);
                pieces.extend([(first + IDS, ids), (first + WEIGHTS, weights)]);
            }
        }
        self.copier.append(&pieces, outputs.as_flattened_mut());
        for (key, output) in keys.iter().zip(outputs) {
            let Some(active) = self.active.get_mut(key) else { continue };
            active.take_output(output);
            if active.is_whole()
                && let Some(active) = self.active.remove(key)
            {
                let version = self
                    .shared
                    .model
                    .read()
                    .map_or_else(|e| e.into_inner().weight_version, |m| m.weight_version);
                active.answer(generation, version, ranks, now);
            }
        }
        let elapsed = now - launched.formed;
        self.shared.steps_total.fetch_add(1, Ordering::Relaxed);
        self.metrics.step(done.tokens, elapsed);
        for (rank, (completion, tokens)) in done.completions.iter().zip(&launched.tokens_per_rank).enumerate()
        {
            let phases = completion.phase_ns.map(Duration::from_nanos);
            self.metrics.rank(rank, *tokens as u64, u64::from(completion.expert_rows), &phases);
        }
        if let Some(rate) = self.rate.add(done.tokens, launched.formed, now) {
            self.shared.inbox().tokens_per_second = rate;
        }
    }

    /// Drops requests whose caller went away or whose deadline passed while no step could be formed.
    fn sweep(&mut self) {
        let now = Instant::now();
        if now < self.next_sweep {
            return;
        }
        self.next_sweep = now + TICK;
        let Driver { queue, active, .. } = self;
        let gone = queue.remove_where(|key| {
            active.get(&key).is_none_or(|a| !a.is_in_step() && (a.is_cancelled() || a.is_late(now)))
        });
        for (key, tokens) in gone {
            self.shared.inbox().queued_tokens -= tokens;
            if let Some(active) = self.active.remove(&key) {
                active.leave(now);
            }
        }
        // Answers do not show it: without this, a service that went idle would show its last requests for ever.
        self.show_queue();
    }

    fn check_drain(&mut self) {
        let mut inbox = self.shared.inbox();
        let Some(drain) = &mut inbox.drain else { return };
        let idle = self.active.is_empty();
        if !idle && Instant::now() < drain.deadline {
            return;
        }
        if !inbox.incoming.is_empty() {
            return;
        }
        let waiters = inbox.drain.take().map(|drain| drain.waiters).unwrap_or_default();
        drop(inbox);
        let dropped = self.active.len() as u64;
        self.fail_all(&StepError::Unavailable {
            reason: "the service is draining, and its drain timeout passed before the answer was complete"
                .into(),
            retry_after: Duration::from_secs(1),
        });
        tracing::info!(requests_dropped = dropped, "drained");
        for waiter in waiters {
            let _ = waiter.send(DrainReport { requests_dropped: dropped });
        }
        self.end = Some(ServiceEnd::Drained);
    }
}
