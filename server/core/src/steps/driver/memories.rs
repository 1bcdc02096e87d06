//! The memories of clients: which ones ranks attach, and when they are released.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use expertd_types::{Generation, MemoryId, WeightVersion};

use super::Driver;
use crate::attachments::{Action as AttachAction, Attachments, Outcome};
use crate::backend::Attachment;
use crate::cluster::{Fault, FaultKind, ObservedTime};
use crate::steps::caller::ClientMemory;
use crate::steps::shared::MemoryMail;

/// After an order, ranks get no other one for this many times its duration, so that clients that open and close sessions all the
/// time take a tenth of the ranks' time at most.
const PAUSE_FACTOR: u32 = 9;
/// The longest pause between two orders.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// The memories of clients and what ranks have of them.
pub(super) struct Memories {
    pub(super) attachments: Attachments,
    /// Held until no rank has the memory.
    clients: HashMap<MemoryId, Box<dyn ClientMemory>>,
    /// Why a rank cannot attach a memory, until every rank has answered.
    refusals: HashMap<MemoryId, String>,
    /// A generation whose ranks are ready, while they attach memories, and those of the sessions that were open then.
    ready: Option<(Generation, WeightVersion, Vec<MemoryId>)>,
    /// When the present or last order was sent.
    ordered: Instant,
    /// Time since then.
    order_time: ObservedTime,
    /// When the next order may be sent.
    next_order: Instant,
}

impl Memories {
    pub(super) fn new(ranks: usize) -> Self {
        Memories {
            attachments: Attachments::new(ranks),
            clients: HashMap::new(),
            refusals: HashMap::new(),
            ready: None,
            ordered: Instant::now(),
            order_time: ObservedTime::start(Instant::now()),
            next_order: Instant::now(),
        }
    }

    /// The ranks of a generation are ready.
    pub(super) fn begin_generation(&mut self, generation: Generation, version: WeightVersion) {
        self.attachments.begin_generation();
        // Sessions that are opened later have no calls before ranks have attached them.
        self.ready = Some((generation, version, self.clients.keys().copied().collect()));
    }

    /// The generation that is ready, once its ranks have answered for every memory.
    pub(super) fn take_ready(&mut self) -> Option<(Generation, WeightVersion)> {
        let (.., awaited) = self.ready.as_ref()?;
        if awaited.iter().any(|memory| self.attachments.is_awaited(*memory)) {
            return None;
        }
        self.ready.take().map(|(generation, version, _)| (generation, version))
    }

    /// Checks that every rank has a memory that a step is to name.
    pub(super) fn expect_attached(&self, memory: MemoryId) -> Result<(), Fault> {
        if self.attachments.is_attached(memory) {
            return Ok(());
        }
        let message = format!("a step names memory {memory}, which the ranks have not attached");
        Err(Fault { kind: FaultKind::Channel, message })
    }

    pub(super) fn take_in(&mut self, mail: MemoryMail) {
        match mail {
            MemoryMail::Opened(client) => {
                self.attachments.open(client.id());
                self.clients.insert(client.id(), client);
            }
            MemoryMail::Ended(memory) => self.attachments.close(memory),
        }
    }

    /// The generation's ranks are gone, except the processes `left`. The session ends whose memory such a process may still write: its
    /// calls must not be computed again beside it.
    pub(super) fn end_generation(&mut self, left: &[u32]) {
        for memory in self.attachments.held_by_ranks() {
            let Some(client) = self.clients.get(&memory) else { continue };
            client.set_attachment(Attachment::Awaited);
            if !left.is_empty() {
                let reason = "ranks that were killed do not end and may still write to the session's memory; open another session"
                    .to_owned();
                tracing::error!(session = %memory, processes = ?left, reason, "the service ends a session");
                client.end(reason);
            }
        }
        self.refusals.clear();
        self.ready = None;
        self.next_order = Instant::now();
        self.attachments.end_generation();
    }
}

impl Driver {
    /// Takes in the answers of ranks to orders about memories. A rank that does not answer an order ends the generation, as one that
    /// does not end a step.
    pub(super) fn hear_memories(&mut self) -> Result<(), Fault> {
        let Driver { group: Some(group), memories, .. } = self else { return Ok(()) };
        while let Some(news) = group.take_attach_answer() {
            if let Some(error) = news.error {
                memories.refusals.insert(news.memory, format!("rank {}: {error}", news.rank));
            }
            let outcome = memories
                .attachments
                .answered(news.rank, news.memory, news.answer)
                .map_err(|message| Fault { kind: FaultKind::Channel, message })?;
            if !memories.attachments.is_ordering() {
                let now = Instant::now();
                memories.next_order = now + (PAUSE_FACTOR * (now - memories.ordered)).min(MAX_PAUSE);
            }
            let (memory, attachment) = match outcome {
                None => continue,
                Some(Outcome::Attached(memory)) => (memory, Attachment::Attached),
                Some(Outcome::Refused(memory)) => {
                    let reason = memories.refusals.remove(&memory).unwrap_or_default();
                    tracing::warn!(%memory, reason, "a rank cannot use a session's memory");
                    (memory, Attachment::Refused(reason))
                }
            };
            if let Some(client) = memories.clients.get(&memory) {
                tracing::debug!(%memory, ?attachment, "ranks have answered");
                client.set_attachment(attachment);
            }
        }
        // A step may be under way before the order, and orders are carried out as steps are.
        let limit = 2 * self.cluster.step_timeout;
        let waited = memories.order_time.look(Instant::now());
        match memories.attachments.unanswered().filter(|_| waited > limit) {
            None => Ok(()),
            Some((memory, ranks)) => {
                let ranks: Vec<u32> = ranks.into_iter().map(|rank| rank.0).collect();
                let message =
                    format!("ranks {ranks:?} have not attached or detached memory {memory} within {limit:?}");
                Err(Fault { kind: FaultKind::StepTimeout, message })
            }
        }
    }

    /// Sends orders about memories to ranks, and releases memories that are no longer used.
    pub(super) fn order_memories(&mut self) {
        let Driver { group, memories, .. } = self;
        let now = Instant::now();
        // A pause ends with the next event, or with the periodic tick. Before steps form, orders disturb no call.
        let may_order = memories.ready.is_some() || now >= memories.next_order;
        while let Some(action) = memories.attachments.poll(may_order) {
            if !matches!(action, AttachAction::Release(_)) {
                memories.ordered = now;
                memories.order_time = ObservedTime::start(now);
            }
            match (action, &group) {
                (AttachAction::Attach(memory), Some(group)) => {
                    if let Some(client) = memories.clients.get(&memory) {
                        let (kind, fds) = client.parts();
                        group.attach(memory, kind, &fds);
                    }
                }
                (AttachAction::Detach(memory), Some(group)) => group.detach(memory),
                (AttachAction::Release(memory), _) => {
                    memories.clients.remove(&memory);
                }
                // Without ranks there are no orders.
                (AttachAction::Attach(_) | AttachAction::Detach(_), None) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::fd::BorrowedFd;

    use expertd_ipc::control::MemoryKind;
    use expertd_types::Rank;

    use super::*;
    use crate::attachments::Answer as AttachAnswer;

    #[derive(Debug)]
    struct Client(MemoryId);

    impl ClientMemory for Client {
        fn id(&self) -> MemoryId {
            self.0
        }

        fn parts(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>) {
            panic!("not asked for")
        }

        fn set_attachment(&self, _: Attachment) {}

        fn end(&self, _: String) {}
    }

    #[test]
    fn a_generation_waits_for_the_sessions_that_were_open_when_its_ranks_were_ready() {
        let mut memories = Memories::new(1);
        let open = |memories: &mut Memories, memory| {
            memories.take_in(MemoryMail::Opened(Box::new(Client(MemoryId(memory)))));
        };
        open(&mut memories, 1);
        memories.begin_generation(Generation(1), WeightVersion(1));
        open(&mut memories, 2);
        assert_eq!(memories.attachments.poll(true), Some(AttachAction::Attach(MemoryId(1))));
        assert_eq!(memories.take_ready(), None, "the first memory is awaited");
        memories
            .attachments
            .answered(Rank(0), MemoryId(1), AttachAnswer::Attached { refused: false })
            .unwrap();
        assert_eq!(memories.take_ready(), Some((Generation(1), WeightVersion(1))));
        assert_eq!(memories.take_ready(), None, "it begins once");
    }
}
