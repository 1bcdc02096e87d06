//! What the step loop's thread does in a round: it tells the state machines what callers, ranks and loaders have done, and has these
//! carry out what they decide.

mod generations;
mod memories;
mod ranks;

use std::collections::VecDeque;

use expertd_types::{Generation, MemoryId, StepId, WeightVersion};

pub use self::ranks::{Callers, Mail, MemoryMail, Ranks, ReloadFailure};
use crate::attachments::Attachments;
use crate::weights::Weights;
use crate::{Action, Config, End, RequestKey, StepLoop, Time};

/// The driver of the state machines. One thread calls [`round`](Self::round) again and again, and waits in between.
#[derive(Debug)]
pub struct Driver<R: Ranks> {
    ranks: R,
    steps: StepLoop,
    weights: Weights<R::Source, R::Ticket>,
    attachments: Attachments,
    /// The generation whose ranks run, and the weights that they have.
    group: Option<(Generation, WeightVersion)>,
    /// A generation whose ranks are ready, while they attach the memories of sessions that were open then.
    ready: Option<(Generation, WeightVersion)>,
    /// Whether the ranks are being ended.
    is_ending: bool,
    /// Steps in flight, and the memory of each of their segments whose rows ranks access in place.
    launched: VecDeque<(StepId, Vec<MemoryId>)>,
    /// The newest step whose end of the experts phase the step loop was told.
    experts_ended: Option<StepId>,
    /// When the present or last order about a memory was sent.
    ordered: Time,
    /// When the next one may be sent.
    next_order: Time,
    /// When the step loop was asked last for what to do.
    decided: Time,
}

impl<R: Ranks> Driver<R> {
    /// A driver that forms its first generation in its first round, with the weights `version` from `source`.
    pub fn new(config: Config, version: WeightVersion, source: R::Source, ranks: R) -> Self {
        Driver {
            attachments: Attachments::new(config.ranks),
            steps: StepLoop::new(config),
            weights: Weights::new(version, source),
            group: None,
            ready: None,
            is_ending: false,
            launched: VecDeque::new(),
            experts_ended: None,
            ordered: ranks.now(),
            next_order: ranks.now(),
            decided: ranks.now(),
            ranks,
        }
    }

    /// The time of the next round, if nothing happens before. It counts from the time of the last decision: what became due since then
    /// is due now.
    #[must_use]
    pub fn wake_at(&self) -> Time {
        self.steps.wake_at(self.decided)
    }

    /// The step loop, and what carries out its decisions.
    pub const fn parts(&mut self) -> (&mut StepLoop, &mut R) {
        (&mut self.steps, &mut self.ranks)
    }

    /// The newest step whose end of the experts phase was heard.
    pub const fn heard_experts(&self) -> Option<StepId> {
        self.experts_ended
    }

    /// Takes in all that has happened and carries out what follows. Returns how the service ends, when it does; no other call may follow
    /// then.
    pub fn round(&mut self) -> Option<End> {
        if self.exchange() {
            // The rows of a new call are on their way to the ranks before anything else is looked at, the answers of the last step
            // included.
            self.hear_experts();
            if self.steps.is_draining() {
                // The end of a drain fails what it does not know to be complete.
                self.hear_ranks();
            }
            if let Some(end) = self.act() {
                return Some(end);
            }
        }
        self.hear_end();
        self.hear_loaders();
        self.hear_ranks();
        self.order_memories();
        self.begin_steps();
        self.act()
    }

    /// Takes new requests, drains, reloads and memories from callers, and publishes counts to them. Returns whether there was anything
    /// to take.
    fn exchange(&mut self) -> bool {
        let now = self.ranks.now();
        // Clear the flag first: mail that arrives after that sets it again.
        let has_mail = self.ranks.take_mail_flag();
        if !has_mail && !self.steps.has_news_for_inbox(now) {
            return false;
        }
        let mail = self.ranks.exchange(&mut self.steps, now);
        for news in mail.memories {
            match news {
                MemoryMail::Opened(memory) => self.attachments.open(memory),
                MemoryMail::Ended(memory) => self.attachments.close(memory),
            }
        }
        for ask in mail.reloads {
            self.start_reload(ask, now);
        }
        let ranks = &mut self.ranks;
        self.steps.receive(mail.delivery, now, |key, payload| ranks.keep(key, payload));
        has_mail
    }

    /// Carries out the step loop's actions. Returns how the service ends, when it does.
    fn act(&mut self) -> Option<End> {
        loop {
            self.decided = self.ranks.now();
            let ranks = &self.ranks;
            match self.steps.poll(self.decided, &|key: RequestKey| ranks.has_left(key))? {
                Action::FormGroup { generation } => {
                    self.ranks.note_forming(generation);
                    self.form_group();
                }
                Action::EndGroup { .. } => self.end_group(),
                Action::Launch { step } => self.launch(step),
                Action::Answer { key, receipt } => self.ranks.answer(key, receipt),
                Action::Fail { key, failure } => self.ranks.fail(key, failure),
                Action::Restart { key } => self.ranks.restart(key),
                Action::Show { state, reason } => {
                    // After the inbox, so that callers who see the new state find the inbox in agreement with it.
                    self.exchange();
                    self.ranks.show(state, &reason);
                }
                Action::ReportDrain { requests_dropped } => self.ranks.report_drain(requests_dropped),
                Action::End(end) => return Some(end),
            }
        }
    }
}
