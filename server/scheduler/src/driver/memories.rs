//! Orders to ranks about the memories of clients, and their answers.

use std::time::Duration;

use super::{Driver, Ranks};
use crate::attachments::MemoryAction;
use crate::{Attachment, Fault, FaultKind, Time};

/// After an order, ranks get no other one for this many times its duration, so that clients that open and close sessions all the
/// time take a tenth of the ranks' time at most.
const PAUSE_FACTOR: u32 = 9;
/// The longest pause between two orders.
const MAX_PAUSE: Duration = Duration::from_millis(100);

impl<R: Ranks> Driver<R> {
    /// Takes in the answers of ranks to orders. A rank that does not answer an order ends the generation, as one that does not end a
    /// step.
    pub(super) fn hear_memories(&mut self) -> Result<(), Fault> {
        while let Some((rank, memory, answer)) = self.ranks.take_attach_answer() {
            let outcome = self
                .attachments
                .answered(rank, memory, answer)
                .map_err(|message| Fault { kind: FaultKind::Channel, message })?;
            if !self.attachments.is_ordering() {
                let now = self.ranks.now();
                self.next_order = now + (PAUSE_FACTOR * now.since(self.ordered)).min(MAX_PAUSE);
            }
            if let Some(attachment) = outcome {
                self.ranks.set_attachment(memory, attachment);
            }
        }
        if let Some((memory, ranks)) = self.attachments.unanswered()
            && let Some(limit) = self.ranks.late_order()
        {
            let ranks: Vec<u32> = ranks.into_iter().map(|rank| rank.0).collect();
            let message =
                format!("ranks {ranks:?} have not attached or detached memory {memory} within {limit:?}");
            return Err(Fault { kind: FaultKind::StepTimeout, message });
        }
        Ok(())
    }

    /// Sends orders to ranks, and releases memories that are no longer used.
    pub(super) fn order_memories(&mut self) {
        let now = self.ranks.now();
        // A pause ends with the next event, or with the periodic tick. Before steps form, orders disturb no call.
        let may_order = !self.is_ending && (self.ready.is_some() || now >= self.next_order);
        while let Some(action) = self.attachments.poll(may_order) {
            match action {
                MemoryAction::Attach(memory) => self.ranks.attach(memory),
                MemoryAction::Detach(memory) => self.ranks.detach(memory),
                MemoryAction::Release(memory) => {
                    self.ranks.release(memory);
                    continue;
                }
            }
            self.ordered = now;
        }
    }

    /// Takes in that the generation's ranks are gone, except the processes `left`. Sessions whose memory such a process may still
    /// write end, because their calls cannot be computed again safely.
    pub(super) fn leave_memories(&mut self, left: &[u32], now: Time) {
        for memory in self.attachments.held_by_ranks() {
            self.ranks.set_attachment(memory, Attachment::Awaited);
            if !left.is_empty() {
                self.ranks.end_session(memory, left);
            }
        }
        self.next_order = now;
        self.attachments.end_generation();
    }
}
