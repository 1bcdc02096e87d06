//! What the driver needs of the world: callers, ranks and loaders.

use std::time::Duration;

use expertd_types::{Generation, MemoryId, Rank, StepId, WeightVersion};

use crate::{
    Ask, AttachAnswer, Attachment, Delivery, Fault, LoadFailure, Receipt, Reloaded, RequestKey, ServiceState,
    Step, StepLoop, Time, Unanswered,
};

/// News of a client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryMail {
    /// Ranks are to attach it.
    Opened(MemoryId),
    /// No further call names it.
    Ended(MemoryId),
}

/// Messages of callers for the driver.
#[derive(Debug)]
pub struct Mail<P, S, T> {
    /// Requests, with their payloads.
    pub delivery: Delivery<P>,
    /// Reloads that are asked for.
    pub reloads: Vec<Ask<S, T>>,
    /// Memories that were opened or have ended, in order.
    pub memories: Vec<MemoryMail>,
}

/// Why a reload brings no weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReloadFailure {
    /// It has not begun.
    Refused(String),
    /// The new weights could not be loaded; the present ones go on.
    GoOn(String),
    /// The new weights could not be loaded; the earlier ones are loaded again.
    Again(String),
    /// The generation with the new weights ended before it served; the earlier ones go on.
    NotServed(Fault),
}

/// The callers' side: what they send, and what they are told.
pub trait Callers {
    /// The part of a request that the state machines do not need.
    type Payload;
    /// Where weights come from.
    type Source: Clone;
    /// Receiver of a reload's result; dropped if the service ends before.
    type Ticket;

    /// The present time.
    fn now(&self) -> Time;

    /// Whether callers have left something since the last call.
    fn take_mail_flag(&mut self) -> bool;

    /// Calls [`StepLoop::exchange`] under the callers' lock, and takes what else they have left.
    fn exchange(
        &mut self,
        steps: &mut StepLoop,
        now: Time,
    ) -> Mail<Self::Payload, Self::Source, Self::Ticket>;

    /// Keeps a request's payload until its answer or failure.
    fn keep(&mut self, key: RequestKey, payload: Self::Payload);

    /// Whether the caller of a request has left.
    fn has_left(&self, key: RequestKey) -> bool;

    /// The memory whose rows ranks access in place for a request.
    fn memory_of(&self, key: RequestKey) -> Option<MemoryId>;

    /// Sends a request's rows, which are complete.
    fn answer(&mut self, key: RequestKey, receipt: Receipt);

    /// Ends a request without an answer.
    fn fail(&mut self, key: RequestKey, failure: Unanswered);

    /// Drops the computed rows of a request.
    fn restart(&mut self, key: RequestKey);

    /// Publishes the state of the service.
    fn show(&mut self, state: ServiceState, reason: &str);

    /// Reports the end of a drain.
    fn report_drain(&mut self, requests_dropped: u64);

    /// Tells how a reload has ended.
    fn end_reload(&mut self, ticket: Self::Ticket, end: Result<Reloaded, ReloadFailure>);

    /// Tells a client what ranks have of its memory.
    fn set_attachment(&mut self, memory: MemoryId, attachment: Attachment);

    /// Ends the session of a memory that the processes `left` of an ended generation may still write.
    fn end_session(&mut self, memory: MemoryId, left: &[u32]);

    /// Releases a memory: its client is gone, no rank has it, and no step names it.
    fn release(&mut self, memory: MemoryId);
}

/// The ranks of one generation, and loaders of one set of weights at a time. Nothing here waits.
pub trait Ranks: Callers {
    /// Starts the loaders of a set. `beside`: a generation serves meanwhile. Otherwise loaders wait until the system has the
    /// memory of freed sets and of ended loaders back.
    fn load(
        &mut self,
        version: WeightVersion,
        source: &Self::Source,
        beside: bool,
    ) -> Result<(), LoadFailure>;

    /// Takes in news of loaders. Returns how they have ended, if they have: the set is whole then, or they are gone.
    fn poll_loaders(&mut self) -> Option<Result<(), LoadFailure>>;

    /// Frees a whole set.
    fn free(&mut self, version: WeightVersion);

    /// Reports that the weights that serve are dropped before others are loaded. `lacks_room`: why they cannot be loaded beside
    /// them; `None` if that was known before.
    fn note_drop(&mut self, lacks_room: Option<&str>);

    /// A generation is about to form.
    fn note_forming(&mut self, generation: Generation);

    /// Starts the ranks of a generation with a whole set.
    fn form(&mut self, generation: Generation, version: WeightVersion) -> Result<(), Fault>;

    /// Takes in news of ranks. Returns whether they have just become ready for steps.
    ///
    /// # Errors
    /// The fault that ends the generation. What was completed before it can still be collected.
    fn poll(&mut self) -> Result<bool, Fault>;

    /// The newest step in flight whose experts phase has ended on every rank.
    fn experts_ended(&mut self) -> Option<StepId>;

    /// Copies the rows of a step to its slot and hands it to the ranks.
    ///
    /// # Errors
    /// The fault that ends the generation.
    fn launch(&mut self, step: &Step) -> Result<(), Fault>;

    /// Takes the oldest step in flight if every rank has completed it, and keeps its rows. Returns when it ended.
    fn collect(&mut self) -> Option<(StepId, Time)>;

    /// After the end of the ranks: as [`collect`](Self::collect), for the oldest step whose calls were told of their end by a rank.
    /// Earlier steps may have failed. If there is none, what the ranks shared with the service is released.
    fn collect_told(&mut self) -> Option<(StepId, Time)>;

    /// A generation has ended by a fault; the service serves no more.
    fn note_fault(&mut self, generation: Generation, fault: &Fault);

    /// Kills the ranks, if there are any, and has them reaped. Until they are gone no other call is made about them.
    fn end(&mut self);

    /// Returns once the ranks are reaped, or have not ended in time: the processes that do not end, which may still access the memory
    /// that they mapped.
    fn poll_end(&mut self) -> Option<Vec<u32>>;

    /// A generation is ready, with the weights that come from `source`.
    fn note_ready(&mut self, generation: Generation, version: WeightVersion, source: &Self::Source);

    /// Steps are about to form in a new generation.
    fn note_steps(&mut self);

    /// Has every rank attach a memory.
    fn attach(&mut self, memory: MemoryId);

    /// Has every rank detach a memory.
    fn detach(&mut self, memory: MemoryId);

    /// Takes the oldest answer of a rank to [`attach`](Self::attach) or [`detach`](Self::detach).
    fn take_attach_answer(&mut self) -> Option<(Rank, MemoryId, AttachAnswer)>;

    /// The time within which ranks must answer an order, if the last one is older.
    fn late_order(&mut self) -> Option<Duration>;
}
