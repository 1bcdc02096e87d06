//! Sessions: clients on the same host that share memory with the service.
//!
//! * `table`: the calls of one session, without threads or I/O: which may enter and when it ends.
//! * `sizes`: sizes and places of a request.
//! * `session`: one session: its memory, its thread that takes requests, its completions.
//! * `attachments`: which memories the ranks have attached, without threads or I/O.
//! * `call`: a call that the step loop has.
//! * `registry`: all sessions: limits, status.
//! * `listener`: the session socket.
//! * `connection`: what the socket of a client carries.
//! * `release`: the pages of ended sessions are freed.
//! * `cuda`: sessions whose rows lie in the memory of the client's GPU.
//! * `open`: a session of either kind.
//!
//! `docs/sessions.md` has the protocol and says what is trusted.

mod attachments;
mod call;
mod connection;
mod cuda;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod listener;
mod open;
mod registry;
mod release;
mod session;
mod sizes;
mod table;

#[cfg(feature = "fuzzing")]
pub use cuda::fuzzing as cuda_fuzzing;

use std::sync::Arc;

use expertd_types::MemoryId;

use crate::backend::{Backend, ModelInfo, Request, SubmitError};
use crate::steps::Service;

pub(crate) use attachments::{Action as AttachAction, Answer as AttachAnswer, Attachments, Outcome};
pub(crate) use call::SessionCall;
pub(crate) use cuda::{CudaCall, Raising};
pub use listener::{MAX_OPENING, SessionConfig, SessionServer};
pub(crate) use open::OpenSession;
pub use registry::{RowsTravel, SessionLimits, SessionRegistry, SessionStatus};

/// What takes the calls of sessions: the step loop.
pub(crate) trait Steps: Send + Sync {
    /// The model that it serves.
    fn model(&self) -> Arc<ModelInfo>;

    /// Admits a call, whose `call` it completes later.
    ///
    /// # Errors
    /// [`SubmitError`] when it is not admitted now. The call then has no completion.
    fn submit(&self, request: Request, call: SessionCall) -> Result<(), SubmitError>;

    /// As [`submit`](Self::submit), for a call whose rows lie in the memory of a client's GPU.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn submit_cuda(&self, request: Request, call: CudaCall) -> Result<(), SubmitError>;

    /// Takes note of a new session.
    fn session_opened(&self, session: OpenSession);

    /// Takes note of the end of a session that was opened.
    fn session_ended(&self, memory: MemoryId);
}

impl Steps for Service {
    fn model(&self) -> Arc<ModelInfo> {
        Backend::model(self)
    }

    fn submit(&self, request: Request, call: SessionCall) -> Result<(), SubmitError> {
        self.submit_session(request, call)
    }

    fn submit_cuda(&self, request: Request, call: CudaCall) -> Result<(), SubmitError> {
        Service::submit_cuda(self, request, call)
    }

    fn session_opened(&self, session: OpenSession) {
        Service::session_opened(self, session);
    }

    fn session_ended(&self, memory: MemoryId) {
        Service::session_ended(self, memory);
    }
}
