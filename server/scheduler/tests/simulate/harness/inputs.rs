//! What the inputs of a schedule do.

use std::time::Duration;

use expertd_scheduler::{
    Ask, ClientKey, ConnectionKey, Fault, FaultKind, Refusal, RequestKey, StepLoop, Submission, Time,
};
use expertd_types::{MemoryId, WeightVersion};

use super::callers::Caller;
use super::ranks::Source;
use super::schedule::{Failing, Input};
use super::world::{Reload, World};

/// A request that a caller sends.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Call {
    pub(super) client: u64,
    pub(super) kind: usize,
    pub(super) tokens: usize,
    pub(super) deadline: Option<Time>,
    pub(super) is_poison: bool,
    pub(super) is_closed_loop: bool,
    pub(super) memory: Option<MemoryId>,
    pub(super) expected: Option<WeightVersion>,
}

impl World {
    pub(super) fn apply(&mut self, input: Input) {
        match input {
            Input::Submit { client, kind, tokens, deadline_millis, is_poison, is_pinned, session } => {
                let deadline = deadline_millis.map(|millis| self.now + Duration::from_millis(millis));
                let memories = session.map(|_| self.open_memories()).unwrap_or_default();
                let memory = session.and_then(|which| memories.get(which % memories.len().max(1)).copied());
                let expected = self.told.version.filter(|_| is_pinned);
                let is_closed_loop = false;
                let call =
                    Call { client, kind, tokens, deadline, is_poison, is_closed_loop, memory, expected };
                self.submit(call);
            }
            Input::Leave { which } => {
                if let Some(index) = self.open.get(which).copied() {
                    self.callers[index].left.get_or_insert(self.now);
                }
            }
            Input::Drain { timeout_millis } => self.ask_to_drain(Duration::from_millis(timeout_millis)),
            Input::Turns { .. } | Input::UntilAsleep => {}
            Input::Pass { micros } => self.now = self.now + Duration::from_micros(micros),
            Input::Ready => {
                self.ranks_ready();
            }
            Input::Experts => {
                self.ranks_end_experts();
            }
            Input::Tell { skips } => self.ranks_tell(skips),
            Input::Done => {
                self.ranks_complete();
            }
            Input::Fault { is_load: false } => self.ranks_fail("a fault of the schedule", FaultKind::Exit),
            Input::Fault { is_load: true } => self.ranks_fail("a fault of the schedule", FaultKind::Load),
            Input::NextFails { what } => match what {
                Failing::Load => self.next_load_fails = true,
                Failing::Form => self.next_form_fails = true,
                Failing::Launch => self.next_launch_fails = true,
                Failing::End => self.next_end_leaves = true,
                Failing::QuickEnd => self.next_end_is_slow = true,
            },
            Input::Reload { has_room, is_quick, is_outdated } => {
                let checked_against = self.served.0.0 - u64::from(is_outdated);
                let ticket = self.reloads.len();
                let source = Source(ticket);
                let version = WeightVersion(checked_against);
                self.reload_mail.push(Ask { source, checked_against: version, has_room, ticket });
                let reload = Reload { checked_against, has_room, is_quick, ..Reload::default() };
                self.reloads.push(reload);
                self.has_mail = true;
            }
            Input::Packed => {
                self.loaders_pack();
            }
            Input::LoaderDies { lacks_room } => self.loaders_fail(lacks_room),
            Input::OpenSession => self.open_session(),
            Input::EndSession { which } => {
                let memories = self.open_memories();
                if let Some(memory) = memories.get(which % memories.len().max(1)) {
                    self.close_session(*memory);
                }
            }
            Input::RankAnswers { refuses } => {
                self.rank_answers(refuses);
            }
            Input::Reaped => {
                self.ranks_end();
            }
            Input::RankLies => self.rank_lies(),
            Input::OrderIsLate => self.order_is_late(),
            Input::StaleNews => self.stale_news = true,
            Input::ClosedLoop { client, kind, tokens } => {
                self.submit(Call { client, kind, tokens, is_closed_loop: true, ..Call::default() });
                self.shares.add(client, tokens, kind);
            }
            Input::Backlog { client, kind, tokens, size } => {
                self.shares.add_backlog(client, size, kind, tokens);
            }
            Input::Round => self.begin_round(),
            Input::EndRound => {
                let is_healthy = self.end.is_none() && self.told.serving.is_some();
                let checked = self.shares.check(&self.schedule, is_healthy);
                self.demand(checked);
            }
        }
    }

    /// A caller sends a request.
    pub(super) fn submit(&mut self, call: Call) {
        let Call { client, kind, tokens, deadline, is_poison, is_closed_loop, memory, expected } = call;
        let kind = self.schedule.kinds[kind];
        let submission = Submission {
            client: ClientKey(client),
            connection: ConnectionKey(client),
            kind,
            tokens,
            deadline,
            expected_version: expected,
            in_place: memory.is_some(),
        };
        let queued = self.inbox.queued_tokens();
        let index = self.callers.len();
        match self.inbox.submit(self.now, submission, index) {
            Ok(key) => {
                self.has_mail = true;
                let checked = self.check_admission(&submission, queued);
                self.demand(checked);
                if key != RequestKey(index as u64 + 1) {
                    self.demand(Err(format!("request {key} was numbered after {index} others")));
                }
                self.seen.admitted_while_reforming += u64::from(!self.is_told_serving);
                self.callers.push(Caller {
                    key,
                    client,
                    kind,
                    tokens,
                    deadline,
                    admitted: self.now,
                    is_poison,
                    memory,
                    is_told: false,
                    expected,
                    is_closed_loop,
                    left: None,
                    was_withdrawn: false,
                    is_received: false,
                    is_answered: false,
                    waits_since: self.now,
                    begun: 0,
                    completed: 0,
                    steps: Vec::new(),
                    version: None,
                    is_mixed: false,
                    generation: None,
                    lost: 0,
                    was_lost_alone: false,
                    steps_waited: 0,
                    max_steps_waited: 0,
                });
                self.open.push(index);
                self.bound_wait(index);
            }
            Err(refusal) => {
                self.note(|| format!("    refused: {refusal:?}"));
                self.seen.overloaded += u64::from(matches!(refusal, Refusal::Overloaded { .. }));
                let checked = self.check_refusal(&submission, queued, &refusal);
                self.demand(checked);
            }
        }
    }

    pub(super) fn ask_to_drain(&mut self, timeout: Duration) {
        let deadline = self.now + timeout;
        self.inbox.drain(deadline);
        self.has_mail = true;
        self.drain = Some(self.drain.map_or(deadline, |before| before.min(deadline)));
    }

    /// Forms, computes and completes a step. The next step forms when the experts phase of this one ends, if a slot is free.
    fn begin_round(&mut self) {
        for (client, kind, tokens, size) in self.shares.backlogs() {
            let of = |caller: &Caller| caller.client == client && caller.kind == self.schedule.kinds[kind];
            let open = self.open.iter().map(|index| &self.callers[*index]);
            let mut waiting: usize = open.filter(|c| of(c)).map(Caller::waiting_tokens).sum();
            while waiting < tokens {
                self.submit(Call { client, kind, tokens: size, ..Call::default() });
                waiting += size;
            }
        }
        let rest = [
            Input::UntilAsleep,
            Input::Experts,
            Input::UntilAsleep,
            Input::Done,
            Input::Pass { micros: 100 },
            Input::UntilAsleep,
            Input::EndRound,
        ];
        for input in rest.into_iter().rev() {
            self.inputs.push_front(input);
        }
    }

    /// News of an ended generation reach the step loop late.
    pub(super) fn tell_stale_news(&mut self, steps: &mut StepLoop) {
        let current = self.told.group;
        let stale = self.last_step.filter(|(old, _)| self.stale_news && Some(*old) != current);
        let Some((generation, step)) = stale else { return };
        self.stale_news = false;
        let step = self.told.in_flight.front().map_or(step, |(running, _)| running.id);
        let fault = Fault { kind: FaultKind::Exit, message: "stale".to_owned() };
        steps.step_done(generation, step, self.now);
        steps.experts_ended(generation, step, self.now);
        steps.group_ready(generation, WeightVersion(999), self.now);
        steps.group_ended(generation, &fault);
    }
}
