//! What the driver is given instead of callers, ranks and loaders. Inputs of the schedule are applied at any of its calls.

use std::time::Duration;

use expertd_scheduler::{
    AttachAnswer, Attachment, Callers, Fault, FaultKind, LoadFailure, Mail, MemoryMail, Ranks as Machine,
    Receipt, ReloadFailure, Reloaded, RequestKey, ServiceState, Step, StepLoop, Time, Unanswered,
};
use expertd_types::{Generation, MemoryId, Rank, StepId, WeightVersion};

use super::check_steps::is_trial;
use super::inputs::Call;
use super::ranks::{Ending, Loaders, Order, RankStep, Ranks, Source};
use super::sessions::Session;
use super::world::World;

impl Callers for World {
    type Payload = usize;
    type Source = Source;
    type Ticket = usize;

    fn now(&self) -> Time {
        self.asked.set(self.now);
        self.now
    }

    fn take_mail_flag(&mut self) -> bool {
        self.pulse();
        std::mem::take(&mut self.has_mail)
    }

    fn exchange(&mut self, steps: &mut StepLoop, now: Time) -> Mail<usize, Source, usize> {
        self.pulse();
        let delivery = steps.exchange(&mut self.inbox, now);
        self.check_exchange();
        let memories = std::mem::take(&mut self.memory_mail);
        for mail in &memories {
            let (MemoryMail::Opened(memory) | MemoryMail::Ended(memory)) = *mail;
            let is_end = matches!(mail, MemoryMail::Ended(_));
            if let Some(session) = self.session(memory) {
                (session.is_known, session.is_known_to_end) = (true, is_end);
            }
        }
        let reloads = std::mem::take(&mut self.reload_mail);
        for ask in &reloads {
            self.reloads[ask.ticket].is_known = true;
        }
        self.pulse();
        Mail { delivery, reloads, memories }
    }

    fn keep(&mut self, _key: RequestKey, index: usize) {
        self.callers[index].is_received = true;
        let client = self.callers[index].client;
        self.told.absent.retain(|absent| *absent != client);
        self.callers[index].waits_since = self.asked.get();
    }

    fn has_left(&self, key: RequestKey) -> bool {
        self.callers[key.0 as usize - 1].left.is_some()
    }

    fn memory_of(&self, key: RequestKey) -> Option<MemoryId> {
        self.callers.get((key.0 as usize).checked_sub(1)?)?.memory
    }

    fn answer(&mut self, key: RequestKey, receipt: Receipt) {
        self.note(|| format!("    answer {key}: {receipt:?}"));
        let checked = self.check_answer(key, &receipt);
        self.demand(checked);
        self.close(key);
        let caller = &self.callers[key.0 as usize - 1];
        if caller.is_closed_loop && !self.is_over {
            let (client, tokens, kind) = (caller.client, caller.tokens, caller.kind);
            let kind = self.schedule.kinds.iter().position(|k| *k == kind).unwrap_or(0);
            self.submit(Call { client, kind, tokens, is_closed_loop: true, ..Call::default() });
        }
        self.pulse();
    }

    fn fail(&mut self, key: RequestKey, failure: Unanswered) {
        self.note(|| format!("    fail {key}: {failure:?}"));
        let checked = self.check_failure(key, &failure);
        self.demand(checked);
        self.dropped_tokens += self.callers[key.0 as usize - 1].waiting_tokens();
        self.close(key);
        self.pulse();
    }

    fn restart(&mut self, key: RequestKey) {
        self.note(|| format!("    restart {key}"));
        let checked = self.check_restart(key);
        self.demand(checked);
        let caller = &mut self.callers[key.0 as usize - 1];
        (caller.begun, caller.completed, caller.version) = (0, 0, None);
        caller.steps.clear();
    }

    fn show(&mut self, state: ServiceState, reason: &str) {
        self.note(|| format!("    show {state:?}: {reason}"));
        self.shown = state;
        let checked = self.check_shown();
        self.demand(checked);
        self.pulse();
    }

    fn report_drain(&mut self, requests_dropped: u64) {
        self.note(|| format!("    drained, {requests_dropped} dropped"));
        let checked = self.check_drain_report(requests_dropped);
        self.demand(checked);
        self.drain_reported = true;
    }

    fn end_reload(&mut self, ticket: usize, end: Result<Reloaded, ReloadFailure>) {
        self.note(|| format!("    reload {ticket} ends: {end:?}"));
        let checked = self.check_reload_end(ticket, &end);
        self.demand(checked);
        self.reloads[ticket].is_answered = true;
        self.pulse();
    }

    fn set_attachment(&mut self, memory: MemoryId, attachment: Attachment) {
        self.note(|| format!("    memory {memory} is {attachment:?}"));
        let checked = self.check_attachment(memory, &attachment);
        self.demand(checked);
        let mut seen = self.seen;
        if let Some(session) = self.session(memory)
            && attachment == Attachment::Attached
            && !session.has_ended
        {
            let was_open = std::mem::replace(&mut session.is_open, true);
            seen.sessions_opened += u64::from(!was_open);
            seen.sessions_reattached += u64::from(was_open);
        }
        self.seen = seen;
        if matches!(attachment, Attachment::Refused(_)) {
            // Its client is told, or its opening fails.
            self.seen.memories_refused += 1;
            self.close_session(memory);
        }
    }

    fn end_session(&mut self, memory: MemoryId, left: &[u32]) {
        self.note(|| format!("    the session of memory {memory} ends: {left:?} are left"));
        self.seen.sessions_ended_by_the_service += 1;
        self.endangered.retain(|endangered| *endangered != memory);
        self.close_session(memory);
    }

    fn release(&mut self, memory: MemoryId) {
        self.note(|| format!("    release memory {memory}"));
        let checked = self.check_release(memory);
        self.demand(checked);
        if let Some(session) = self.session(memory) {
            session.is_released = true;
        }
        self.seen.memories_released += 1;
    }
}

impl Machine for World {
    fn load(&mut self, version: WeightVersion, source: &Source, beside: bool) -> Result<(), LoadFailure> {
        self.note(|| format!("    load version {version} from {source:?}, beside: {beside}"));
        let checked = self.check_load(version, *source, beside);
        self.demand(checked);
        if std::mem::take(&mut self.next_load_fails) {
            self.load_failed = Some((*source, beside));
            let message = "no process".to_owned();
            return Err(LoadFailure { message, lacks_room: false, is_setup: true });
        }
        let is_quick = self.reloads.get(source.0).is_some_and(|reload| reload.is_quick);
        self.loaders = Some(Loaders { version, source: *source, beside, end: is_quick.then_some(Ok(())) });
        Ok(())
    }

    fn poll_loaders(&mut self) -> Option<Result<(), LoadFailure>> {
        self.pulse();
        let Loaders { version, source, beside, end } =
            self.loaders.take_if(|loaders| loaders.end.is_some())?;
        self.note(|| format!("    loaders of version {version}: {end:?}"));
        match &end {
            Some(Ok(())) => {
                self.sets.push((version, source));
                self.told.is_replaced |= beside && self.told.group.is_some() && !self.is_ending();
            }
            Some(Err(failure)) => {
                self.load_failed = Some((source, beside));
                self.reloads[source.0].lacked_room |= failure.lacks_room;
                self.seen.loaders_died_without_reload += u64::from(source == self.served.1);
            }
            None => {}
        }
        end
    }

    fn free(&mut self, version: WeightVersion) {
        self.note(|| format!("    free version {version}"));
        let checked = self.check_free(version);
        self.demand(checked);
        self.sets.retain(|(set, _)| *set != version);
    }

    fn note_drop(&mut self, lacks_room: Option<&str>) {
        self.note(|| format!("    weights are to be dropped: {lacks_room:?}"));
        self.told.is_replaced |= self.told.group.is_some() && !self.is_ending();
    }

    fn note_forming(&mut self, generation: Generation) {
        self.note(|| format!("    form generation {generation}"));
        let checked = self.check_forming(generation);
        self.demand(checked);
        self.told.group = Some(generation);
        self.pulse();
    }

    fn form(&mut self, generation: Generation, version: WeightVersion) -> Result<(), Fault> {
        self.note(|| format!("    start the ranks of generation {generation} with version {version}"));
        let checked = self.check_ranks(generation, version);
        self.demand(checked);
        if std::mem::take(&mut self.next_form_fails) {
            self.failed_to_form = Some(version);
            return Err(Fault { kind: FaultKind::Setup, message: "no process".to_owned() });
        }
        self.ranks = Some(Ranks::new(generation, version, self.schedule.config.ranks));
        self.pulse();
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, Fault> {
        self.pulse();
        let Some(ranks) = &mut self.ranks else { return Ok(false) };
        if let Some(fault) = ranks.fault.take() {
            return Err(fault);
        }
        Ok(ranks.is_ready && !ranks.is_dead && !std::mem::replace(&mut ranks.is_ready_heard, ranks.is_ready))
    }

    fn experts_ended(&mut self) -> Option<StepId> {
        let ended = self.ended_experts()?;
        if let Some((last, false)) = self.told.in_flight.back().filter(|(last, _)| last.id <= ended) {
            let formed = last.formed;
            self.note_experts(formed);
        }
        for (earlier, has_ended) in &mut self.told.in_flight {
            *has_ended |= earlier.id <= ended;
        }
        Some(ended)
    }

    fn launch(&mut self, step: &Step) -> Result<(), Fault> {
        let id = step.id;
        self.note(|| format!("    launch {step:?}"));
        let checked = self.check_step(step).and_then(|()| self.check_named_memories(step));
        self.demand(checked);
        self.dropped_tokens = 0;
        self.told.absent.clear();
        let mut is_poison = self.schedule.broken == Some(step.kind.layer);
        let (mut tells, mut is_in_place) = (true, false);
        for range in &step.rows {
            let Some(caller) = range.key.0.checked_sub(1).map(|index| &mut self.callers[index as usize])
            else {
                tells = false;
                continue;
            };
            caller.begun = range.rows.end;
            if !step.is_alone {
                self.told.absent.push(caller.client);
            }
            is_poison |= caller.is_poison;
            tells &= caller.memory.is_some() && caller.tokens <= self.schedule.config.max_tokens_per_step;
            is_in_place |= caller.memory.is_some();
            self.shares.count(caller.client, range.rows.len());
        }
        // Words are told in the order of steps.
        let told_before = |ranks: &Ranks| ranks.steps.iter().all(|earlier| earlier.tells);
        tells &= self.ranks.as_ref().is_some_and(told_before);
        if !step.is_alone {
            for index in &self.open {
                let caller = &mut self.callers[*index];
                caller.steps_waited += usize::from(caller.waits());
            }
        }
        self.seen.steps += 1;
        self.seen.trials += u64::from(is_trial(step));
        self.seen.steps_in_place += u64::from(is_in_place);
        self.told.in_flight.push_back((step.clone(), false));
        let checked = self.check_waits();
        self.demand(checked);
        if std::mem::take(&mut self.next_launch_fails) {
            return Err(Fault { kind: FaultKind::Channel, message: format!("no room for step {id}") });
        }
        if let Some(ranks) = &mut self.ranks {
            let (experts_ended, is_done, has_told) = (false, false, false);
            let step = step.clone();
            ranks.steps.push_back(RankStep { step, is_poison, experts_ended, is_done, tells, has_told });
        }
        self.pulse();
        Ok(())
    }

    fn collect(&mut self) -> Option<(StepId, Time)> {
        let ranks = self.ranks.as_mut()?;
        let done = ranks.steps.front().filter(|step| step.is_done)?.step.id;
        ranks.steps.pop_front();
        let generation = ranks.generation;
        self.note(|| format!("    step {done} is complete"));
        self.note_done(generation, done);
        Some((done, self.now))
    }

    fn collect_told(&mut self) -> Option<(StepId, Time)> {
        let told = self.ranks.as_mut().and_then(|ranks| {
            let at = ranks.steps.iter().position(|step| step.has_told)?;
            let step = ranks.steps.remove(at)?;
            Some((ranks.generation, step.step.id, at))
        });
        let Some((generation, step, at)) = told else {
            self.note_gone();
            return None;
        };
        self.note(|| format!("    step {step} was told to be complete"));
        self.seen.told_steps_kept += 1;
        self.seen.told_behind_a_failed_step += u64::from(at > 0);
        self.seen.told_before_a_drains_end += u64::from(!self.told.has_fault);
        self.note_done(generation, step);
        Some((step, self.now))
    }

    fn note_fault(&mut self, generation: Generation, fault: &Fault) {
        self.note(|| format!("    generation {generation} ends: {fault}"));
        self.seen.answers_to_no_order += u64::from(fault.message.contains("not asked"));
        self.seen.orders_too_late += u64::from(fault.message.contains("within"));
        self.heard_fault = true;
        self.note_ending(true);
    }

    fn end(&mut self) {
        self.note(|| "    the ranks are ended".to_owned());
        let checked = self.check_replaced();
        self.demand(checked);
        self.note_ending(false);
        self.left = if std::mem::take(&mut self.next_end_leaves) { vec![4711] } else { Vec::new() };
        let is_slow = std::mem::take(&mut self.next_end_is_slow);
        if let Some(ranks) = &mut self.ranks {
            ranks.is_dead = true;
            ranks.ending = Some(if is_slow { Ending::Slow } else { Ending::Reaped });
        }
        self.failed_to_form = None;
        self.pulse();
    }

    fn poll_end(&mut self) -> Option<Vec<u32>> {
        self.pulse();
        if let Some(ranks) = &mut self.ranks {
            if ranks.ending != Some(Ending::Reaped) {
                return None;
            }
            ranks.ending = Some(Ending::Heard);
        }
        self.note(|| "    the ranks are gone".to_owned());
        Some(self.left.clone())
    }

    fn note_ready(&mut self, generation: Generation, version: WeightVersion, source: &Source) {
        self.note(|| format!("    generation {generation} is ready with version {version} from {source:?}"));
        let checked = self.check_ready(generation, version, *source);
        self.demand(checked);
        self.served = (version, *source);
        let is_open = |(_, session): &(u32, &Session)| session.is_known && !session.is_known_to_end;
        let open = (1..).zip(&self.sessions).filter(is_open);
        self.awaited = open.map(|(memory, _)| MemoryId(memory)).collect();
    }

    fn note_steps(&mut self) {
        self.note(|| "    steps form".to_owned());
        let checked = self.check_answered_orders();
        self.demand(checked);
        self.asked.set(self.now);
        let Some(ranks) = &self.ranks else { return };
        // A fault may have been heard in the same round.
        if self.told.group != Some(ranks.generation) {
            return;
        }
        self.told.serving = Some((ranks.generation, ranks.version));
        self.told.version = Some(ranks.version);
        self.told.is_replacement = false;
        self.told.ready_at = Some(self.now);
        self.told.has_served = true;
        self.told.unready = 0;
        self.is_just_ready = true;
        self.bound_waits();
    }

    fn attach(&mut self, memory: MemoryId) {
        self.order(memory, true);
    }

    fn detach(&mut self, memory: MemoryId) {
        self.order(memory, false);
    }

    fn take_attach_answer(&mut self) -> Option<(Rank, MemoryId, AttachAnswer)> {
        self.pulse();
        self.ranks.as_mut()?.answers.pop_front()
    }

    fn late_order(&mut self) -> Option<Duration> {
        let order = self.ranks.as_ref()?.order.as_ref()?;
        order.is_late.then_some(Duration::from_secs(1))
    }
}

impl World {
    /// The newest step in flight whose experts phase has ended.
    pub(super) fn ended_experts(&self) -> Option<StepId> {
        let steps = &self.ranks.as_ref()?.steps;
        steps.iter().rev().find(|step| step.experts_ended).map(|step| step.step.id)
    }

    fn order(&mut self, memory: MemoryId, is_attach: bool) {
        self.note(|| format!("    order: memory {memory}, attach: {is_attach}"));
        let checked = self.check_order(memory, is_attach);
        self.demand(checked);
        let answered = vec![false; self.schedule.config.ranks];
        if let Some(ranks) = &mut self.ranks {
            ranks.asked.insert(memory);
            ranks.order = Some(Order { memory, is_attach, answered, is_late: false });
        }
        self.pulse();
    }

    fn close(&mut self, key: RequestKey) {
        let index = key.0 as usize - 1;
        self.callers[index].is_answered = true;
        self.open.retain(|open| *open != index);
    }
}
