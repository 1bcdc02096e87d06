//! Sessions: clients on the same host that share memory with the service.
//!
//! * `table`: the calls of one session, without threads or I/O: which may enter and when it ends.
//! * `session`: one session: its memory, its thread that takes requests, its completions.
//! * `attachments`: which memories the ranks have attached, without threads or I/O.
//! * `call`: a call that the step loop has.
//! * `registry`: all sessions: limits, status.
//! * `listener`: the session socket.
//!
//! `docs/sessions.md` has the protocol and says what is trusted.

mod attachments;
mod call;
mod listener;
mod registry;
mod session;
mod table;

pub(crate) use attachments::{Action as AttachAction, Answer as AttachAnswer, Attachments, Outcome};
pub(crate) use call::SessionCall;
pub use listener::{SessionConfig, SessionServer};
pub use registry::{RowsTravel, SessionLimits, SessionRegistry, SessionStatus};
pub(crate) use session::SessionState;
