//! The simulated sessions, whose memory ranks attach.

use expertd_scheduler::{AttachAnswer, MemoryMail};
use expertd_types::{MemoryId, Rank};

use super::world::World;

/// A session, as its client and the driver know it.
#[derive(Clone, Debug, Default)]
pub(super) struct Session {
    /// Whether its client was told that it is open.
    pub(super) is_open: bool,
    pub(super) has_ended: bool,
    /// Whether the driver was told of its beginning, and of its end.
    pub(super) is_known: bool,
    pub(super) is_known_to_end: bool,
    pub(super) is_released: bool,
}

impl World {
    pub(super) fn session(&mut self, memory: MemoryId) -> Option<&mut Session> {
        self.sessions.get_mut((memory.0 as usize).wrapping_sub(1))
    }

    pub(super) fn open_session(&mut self) {
        self.sessions.push(Session::default());
        self.memory_mail.push(MemoryMail::Opened(MemoryId(self.sessions.len() as u32)));
        self.has_mail = true;
    }

    /// The memories of sessions whose clients may send calls.
    pub(super) fn open_memories(&self) -> Vec<MemoryId> {
        let open = |(_, session): &(u32, &Session)| session.is_open && !session.has_ended;
        (1..).zip(&self.sessions).filter(open).map(|(memory, _)| MemoryId(memory)).collect()
    }

    /// A client goes, or its session is ended: nothing waits for its calls any more.
    pub(super) fn close_session(&mut self, memory: MemoryId) {
        let Some(session) = self.session(memory) else { return };
        if std::mem::replace(&mut session.has_ended, true) {
            return;
        }
        for index in &self.open {
            if self.callers[*index].memory == Some(memory) {
                self.callers[*index].left.get_or_insert(self.now);
            }
        }
        self.memory_mail.push(MemoryMail::Ended(memory));
        self.has_mail = true;
    }

    /// A rank carries out the order under way, or refuses it. Returns whether there was one.
    pub(super) fn rank_answers(&mut self, refuses: bool) -> bool {
        let Some(ranks) = self.ranks.as_mut().filter(|ranks| !ranks.is_dead) else { return false };
        let Some(order) = &mut ranks.order else { return false };
        let Some(rank) = order.answered.iter().position(|answered| !answered) else { return false };
        order.answered[rank] = true;
        let memory = order.memory;
        let answer = if !order.is_attach {
            ranks.has[rank].remove(&memory);
            AttachAnswer::Detached
        } else if refuses {
            AttachAnswer::Attached { error: Some("no room".to_owned()) }
        } else {
            ranks.has[rank].insert(memory);
            AttachAnswer::Attached { error: None }
        };
        if !order.answered.contains(&false) {
            ranks.order = None;
        }
        ranks.answers.push_back((Rank(rank as u32), memory, answer));
        true
    }

    /// A rank answers an order that it was not given.
    pub(super) fn rank_lies(&mut self) {
        let memory = MemoryId(self.sessions.len() as u32 + 1);
        if let Some(ranks) = self.ranks.as_mut().filter(|ranks| ranks.is_ready_heard && !ranks.is_dead) {
            ranks.answers.push_back((Rank(0), memory, AttachAnswer::Detached));
        }
    }

    /// The order under way takes longer than ranks may take.
    pub(super) fn order_is_late(&mut self) {
        if let Some(order) = self.ranks.as_mut().and_then(|ranks| ranks.order.as_mut()) {
            order.is_late = true;
        }
    }
}
