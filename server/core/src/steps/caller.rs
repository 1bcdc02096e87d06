//! Callers, which want rows computed: the interface between the step loop and the ways in.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bytes::Bytes;
use expertd_ipc::control::{DeviceKind, MemoryKind};
use expertd_ipc::{Raise, RowSource};
use expertd_types::MemoryId;
use tokio::sync::oneshot;

use crate::backend::{Answer, Attachment, ModelInfo, Receipt, Request, ServiceState};
use crate::failure::Failure;
use expertd_telemetry::names;

/// Who raises the completion word of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raising {
    /// The caller itself, when it is answered.
    Caller,
    /// Rank 0 has raised it; the client may have begun its next call.
    Rank,
    /// Rank 0, which was killed: it has raised it or was about to.
    KilledRank,
}

/// The caller of one request. The step loop ends each call with [`answer`](Self::answer) or [`fail`](Self::fail). It ends one that
/// lends memory only when no step in flight names the request: the memory is then its own again.
pub trait Caller: Send + fmt::Debug {
    /// Whether nothing waits for the answer any more.
    fn has_left(&self) -> bool;

    /// Bytes `range` of the request's rows.
    fn rows(&self, range: Range<usize>) -> RowSource<'_>;

    /// The memory that the caller lends, in which ranks read rows and write the answer.
    fn memory(&self) -> Option<MemoryId> {
        None
    }

    /// Ends the call with its complete answer. `rows` is empty if ranks have written the rows in place. `is_idle`: no step is in
    /// flight.
    fn answer(self: Box<Self>, rows: Bytes, receipt: Receipt, is_idle: bool);

    /// Ends the call without an answer.
    fn fail(self: Box<Self>, failure: Failure);

    /// The completion word that rank 0 can raise for a call that one step computes whole.
    fn raise(&self) -> Option<Raise> {
        None
    }

    /// Sets who raises the completion word.
    fn set_raising(&mut self, _raising: Raising) {}
}

/// A caller whose rows lie in the router's memory and whose answer is sent over a channel.
#[derive(Debug)]
pub(super) struct MessageCaller {
    pub(super) rows: Bytes,
    pub(super) reply: oneshot::Sender<Result<Answer, Failure>>,
}

impl Caller for MessageCaller {
    fn has_left(&self) -> bool {
        self.reply.is_closed()
    }

    fn rows(&self, range: Range<usize>) -> RowSource<'_> {
        self.rows[range].into()
    }

    fn answer(self: Box<Self>, rows: Bytes, receipt: Receipt, _is_idle: bool) {
        if self.reply.send(Ok(Answer { rows, receipt })).is_err() {
            metrics::counter!(names::REQUESTS_CANCELLED_TOTAL).increment(1);
        }
    }

    fn fail(self: Box<Self>, failure: Failure) {
        let _ = self.reply.send(Err(failure));
    }
}

/// Memory of a client that ranks attach, so that they read rows and write answers in place.
pub trait ClientMemory: Send + Sync + fmt::Debug {
    /// The number under which ranks attach it.
    fn id(&self) -> MemoryId;

    /// The memory as ranks receive it, with its descriptors.
    fn parts(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>);

    /// Records whether the ranks have attached the memory.
    fn set_attachment(&self, attachment: Attachment);

    /// Ends the client's use of it. Must not wait for the client.
    fn end(&self, reason: String);
}

/// What takes the calls of clients that lend their memory: the step loop, or a replacement in tests.
pub trait Steps: Send + Sync {
    /// The model that it serves.
    fn model(&self) -> Arc<ModelInfo>;

    /// The device of the ranks that access rows.
    fn device(&self) -> DeviceKind;

    /// The state of the service.
    fn state(&self) -> ServiceState;

    /// Takes in a validated request, whose `caller` gets its answer or its failure.
    fn take_in(&self, request: Request, caller: Box<dyn Caller>);

    /// Takes note of a client's memory, which ranks then attach.
    fn memory_opened(&self, memory: Box<dyn ClientMemory>);

    /// Takes note that no further call names a client's memory.
    fn memory_ended(&self, memory: MemoryId);
}
