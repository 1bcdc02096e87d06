//! The agent of a network session: a process that serves one client on another host, and what the router says to it.
//!
//! * [`run_agent`]: the service's relay, the client of an ordinary host session.
//! * `confine` and `files`: what the process may no longer do.
//! * [`control`]: the socket between router and agent.
//!
//! `docs/network.md` says who is trusted.

mod agent;
mod confine;
pub mod control;
mod files;

pub use agent::run_agent;
pub use files::has_landlock;
