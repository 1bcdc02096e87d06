//! The memories of sessions: which ones ranks attach, and when they are released.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_types::MemoryId;

use super::Driver;
use crate::cluster::{Fault, FaultKind};
use crate::sessions::{AttachAction, Attachments, Outcome, RowsTravel, SessionState};
use crate::steps::service::SessionMail;

/// After an order, ranks get no other one for this many times its duration, so that clients that open and close sessions all the
/// time take a tenth of the ranks' time at most.
const PAUSE_FACTOR: u32 = 9;
/// The longest pause between two orders.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// The memories of sessions and what ranks have of them.
pub(super) struct Memories {
    pub(super) attachments: Attachments,
    /// Held until no rank has the memory.
    sessions: HashMap<MemoryId, Arc<SessionState>>,
    /// Why a rank cannot attach a memory, until every rank has answered.
    refusals: HashMap<MemoryId, String>,
    /// When the present or last order was sent.
    ordered: Instant,
    /// When the next order may be sent.
    next_order: Instant,
}

impl Memories {
    pub(super) fn new(ranks: usize) -> Self {
        Memories {
            attachments: Attachments::new(ranks),
            sessions: HashMap::new(),
            refusals: HashMap::new(),
            ordered: Instant::now(),
            next_order: Instant::now(),
        }
    }

    pub(super) fn take_in(&mut self, mail: SessionMail) {
        match mail {
            SessionMail::Opened(session) => {
                self.attachments.open(session.memory_id());
                self.sessions.insert(session.memory_id(), session);
            }
            SessionMail::Ended(memory) => self.attachments.close(memory),
        }
    }

    /// The generation's ranks are gone, except the processes `left`. Sessions whose memory such a process may still write end: their
    /// calls must not be computed again beside it.
    pub(super) fn end_generation(&mut self, left: &[u32]) {
        for memory in self.attachments.held_by_ranks() {
            let Some(session) = self.sessions.get(&memory) else { continue };
            session.set_rows_travel(RowsTravel::Copied);
            if !left.is_empty() {
                let reason = format!(
                    "processes {left:?}, ranks that were killed, do not end and may still write to the session's memory; \
                     open another session"
                );
                tracing::error!(session = session.number(), reason, "the service ends a session");
                session.close_apart(reason);
            }
        }
        self.refusals.clear();
        self.next_order = Instant::now();
        self.attachments.end_generation();
    }
}

impl Driver {
    /// Takes in the answers of ranks to orders about memories.
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
            let (memory, rows_travel) = match outcome {
                None => continue,
                Some(Outcome::Attached(memory)) => (memory, RowsTravel::InPlace),
                Some(Outcome::Refused(memory)) => {
                    let reason = memories.refusals.remove(&memory).unwrap_or_default();
                    tracing::warn!(%memory, reason, "the router copies a session's rows");
                    (memory, RowsTravel::Refused(reason))
                }
            };
            if let Some(session) = memories.sessions.get(&memory) {
                tracing::debug!(session = session.number(), ?rows_travel, "ranks have answered");
                session.set_rows_travel(rows_travel);
            }
        }
        Ok(())
    }

    /// Sends orders about memories to ranks, and releases memories that are no longer used.
    pub(super) fn order_memories(&mut self) {
        let Driver { group, memories, .. } = self;
        let now = Instant::now();
        // A pause ends with the next event, or with the periodic tick.
        while let Some(action) = memories.attachments.poll(now >= memories.next_order) {
            if !matches!(action, AttachAction::Release(_)) {
                memories.ordered = now;
            }
            match (action, &group) {
                (AttachAction::Attach(memory), Some(group)) => {
                    if let Some(session) = memories.sessions.get(&memory) {
                        group.attach(memory, session.region());
                    }
                }
                (AttachAction::Detach(memory), Some(group)) => group.detach(memory),
                (AttachAction::Release(memory), _) => {
                    memories.sessions.remove(&memory);
                }
                // Without ranks there are no orders.
                (AttachAction::Attach(_) | AttachAction::Detach(_), None) => {}
            }
        }
    }
}
