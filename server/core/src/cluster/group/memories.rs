//! Orders to ranks about the memories of clients, and their answers.

use std::os::fd::BorrowedFd;

use expertd_ipc::control::{MemoryKind, ToRank};
use expertd_types::{MemoryId, Rank};

use super::Group;
use crate::attachments::Answer as AttachAnswer;

/// The answer of a rank to an order about a client's memory.
#[derive(Debug)]
pub(crate) struct AttachNews {
    /// The rank.
    pub rank: Rank,
    /// The memory.
    pub memory: MemoryId,
    /// The answer.
    pub(crate) answer: AttachAnswer,
    /// Why the memory is not attached.
    pub error: Option<String>,
}

impl Group {
    /// Sends a client's memory to every rank.
    pub(crate) fn attach(&self, memory: MemoryId, kind: MemoryKind, fds: &[BorrowedFd<'_>]) {
        for member in &self.members {
            member.process.send_with_fds(&ToRank::Attach { memory, kind }, fds);
        }
    }

    /// Asks every rank to detach a client's memory.
    pub(crate) fn detach(&self, memory: MemoryId) {
        for member in &self.members {
            member.process.send(ToRank::Detach { memory });
        }
    }

    /// Takes the oldest answer of a rank to [`attach`](Self::attach) or [`detach`](Self::detach).
    pub(crate) fn take_attach_answer(&mut self) -> Option<AttachNews> {
        self.attach_answers.pop_front()
    }
}
