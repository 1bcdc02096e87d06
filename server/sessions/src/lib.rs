//! Sessions: clients on the same host that share memory with the service.
//!
//! * `listener`: the session socket; `shared`: what its threads share; `connection`: what the socket of a client carries; `opening`: how a
//!   session is opened.
//! * `session`: what both kinds of sessions have in common; `host`: rows lie in host memory; `cuda`: rows lie in the memory of the client's
//!   GPU; `open`: a session of either kind.
//! * `call`: a call that the step loop has; `completion`: what the client reads of its end.
//! * `network`: sessions of clients on other hosts, each with an agent process that is its client here.
//! * `registry`: the open sessions; `limits` and `shares`: how many there may be, in all and of one owner; `release`: the pages of ended sessions are freed.
//!
//! `docs/sessions.md` has the protocol and says what is trusted.

#![forbid(unsafe_code)]

mod call;
mod completion;
mod connection;
mod cuda;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod host;
mod limits;
mod listener;
mod network;
mod open;
mod opening;
mod registry;
mod release;
mod session;
mod shared;
mod shares;

pub use limits::{MAX_OPENING, SessionLimits};
pub use listener::SessionServer;
pub use network::{AgentGuard, NetworkAgent, NetworkConfig, NetworkRequest, NetworkSessions};
pub use shared::{DescribeModel, SessionConfig};
