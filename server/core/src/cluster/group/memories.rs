//! Orders to ranks about the memories of clients, and their answers.

use std::os::fd::BorrowedFd;

use expertd_ipc::control::{MemoryKind, ToRank};
use expertd_scheduler::AttachAnswer;
use expertd_types::{MemoryId, Rank};

use super::{Group, RunningRank};

impl Group {
    /// Sends a client's memory to every source rank: the others access no rows of clients.
    pub(crate) fn attach(&self, memory: MemoryId, kind: MemoryKind, fds: &[BorrowedFd<'_>]) {
        for member in self.sources() {
            member.process.send_with_fds(&ToRank::Attach { memory, kind }, fds);
        }
    }

    /// Asks every source rank to detach a client's memory.
    pub(crate) fn detach(&self, memory: MemoryId) {
        for member in self.sources() {
            member.process.send(ToRank::Detach { memory });
        }
    }

    fn sources(&self) -> impl Iterator<Item = &RunningRank> {
        self.members.iter().take(self.config.shape.sources as usize)
    }

    /// Takes the oldest answer of a rank to [`attach`](Self::attach) or [`detach`](Self::detach).
    pub(crate) fn take_attach_answer(&mut self) -> Option<(Rank, MemoryId, AttachAnswer)> {
        self.attach_answers.pop_front()
    }
}
