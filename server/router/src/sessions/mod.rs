//! Sessions: clients on the same host that share memory with the service.
//!
//! * `table`: the calls of one session, without threads or I/O: which may enter and when it ends.
//! * `session`: one session: its memory, its thread that takes requests, its completions.
//! * `call`: a call that the step loop has.
//! * `registry`: all sessions: limits, status.
//! * `listener`: the session socket.
//!
//! `docs/sessions.md` has the protocol and says what is trusted.

mod call;
mod listener;
mod registry;
mod session;
mod table;

pub(crate) use call::SessionCall;
pub use listener::{SessionConfig, SessionServer};
pub use registry::{SessionLimits, SessionRegistry, SessionStatus};
