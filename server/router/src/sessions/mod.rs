//! Sessions: clients on the same host that share memory with the service.
//!
//! * `table`: the calls of one session, without threads or I/O: which may enter and when it ends.
//! * `sizes`: sizes and places of a request.
//! * `session`: what both kinds of sessions have in common.
//! * `host`: a host session: its memory, its thread that takes requests, its completions.
//! * `host_call`: a call of a host session that the step loop has.
//! * `completion`: completion records.
//! * `registry`: all sessions: limits, status.
//! * `listener`: the session socket.
//! * `connection`: what the socket of a client carries.
//! * `release`: the pages of ended sessions are freed.
//! * `cuda`: sessions whose rows lie in the memory of the client's GPU.
//! * `open`: a session of either kind.
//! * `opening`: how one is opened.
//!
//! `docs/sessions.md` has the protocol and says what is trusted.

mod completion;
mod connection;
mod cuda;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod host;
mod host_call;
mod listener;
mod open;
mod opening;
mod registry;
mod release;
mod session;
mod sizes;
mod table;

#[cfg(feature = "fuzzing")]
pub use cuda::fuzzing as cuda_fuzzing;

use std::sync::Arc;

use expertd_ipc::control::DeviceKind;
use expertd_types::MemoryId;

use crate::backend::{Backend, ModelInfo, Request};
use crate::steps::{Caller, ClientMemory, Service};

pub use listener::{MAX_OPENING, SessionConfig, SessionServer};
pub use registry::{SessionLimits, SessionRegistry, SessionStatus};

/// What takes the calls of sessions: the step loop.
pub(crate) trait Steps: Send + Sync {
    /// The model that it serves.
    fn model(&self) -> Arc<ModelInfo>;

    /// The ranks' device.
    fn device(&self) -> DeviceKind;

    /// Takes in a request, whose `caller` gets its answer or its failure.
    fn take_in(&self, request: Request, caller: Box<dyn Caller>);

    /// Takes note of the memory of a new session.
    fn memory_opened(&self, memory: Box<dyn ClientMemory>);

    /// Takes note of the end of a session whose memory was opened.
    fn memory_ended(&self, memory: MemoryId);
}

impl Steps for Service {
    fn model(&self) -> Arc<ModelInfo> {
        Backend::model(self)
    }

    fn device(&self) -> DeviceKind {
        Service::device(self)
    }

    fn take_in(&self, request: Request, caller: Box<dyn Caller>) {
        Service::take_in(self, request, caller);
    }

    fn memory_opened(&self, memory: Box<dyn ClientMemory>) {
        Service::memory_opened(self, memory);
    }

    fn memory_ended(&self, memory: MemoryId) {
        Service::memory_ended(self, memory);
    }
}
