//! Sessions: clients on the same host that share memory with the service.
//!
//! * `table`: the calls of one session, without threads or I/O: which may enter and when it ends.
//! * `session`: one session: its memory, its thread that takes requests, its completions.
//! * `attachments`: which memories the ranks have attached, without threads or I/O.
//! * `call`: a call that the step loop has.
//! * `registry`: all sessions: limits, status.
//! * `listener`: the session socket.
//! * `cuda`: sessions whose rows lie in the memory of the client's GPU.
//! * `open`: a session of either kind.
//!
//! `docs/sessions.md` has the protocol and says what is trusted.

mod attachments;
mod call;
mod cuda;
mod listener;
mod open;
mod registry;
mod session;
mod table;

pub(crate) use attachments::{Action as AttachAction, Answer as AttachAnswer, Attachments, Outcome};
pub(crate) use call::SessionCall;
pub(crate) use cuda::CudaCall;
pub use listener::{SessionConfig, SessionServer};
pub(crate) use open::OpenSession;
pub use registry::{RowsTravel, SessionLimits, SessionRegistry, SessionStatus};
