//! Network sessions: sessions of engines on other hosts, whose rows travel by one-sided writes over NIXL.
//!
//! NIXL is loaded at run time: a build needs nothing of it. This crate is all that knows it, at both ends:
//!
//! * [`Library`]: where NIXL is found, and which versions were tried. [`Endpoint`]: an agent with one registered row area.
//! * [`wire`]: what the two ends tell each other.
//! * [`ClientEnd`]: the client's relay, behind an ordinary [`Session`](expertd_session::Session).
//! * [`Relay`]: what it shares with the service's relay, which is the crate `expertd-agent`.
//!
//! `docs/network.md` says how they are used and what is trusted.

mod client;
mod endpoint;
mod library;
mod live;
mod probe;
mod relay;
mod sys;
pub mod wire;

use std::hash::{BuildHasher as _, RandomState};

pub use client::{ClientEnd, Opened};
pub use endpoint::{Card, Endpoint, Transports};
pub use expertd_session::devices::{device_of, listening_address};
pub use library::{Library, NetworkError, TRIED, VARIABLE};
pub use live::End;
pub use probe::probe;
pub use relay::{LONG_PAUSE, Relay, Spin, Waiting, accept_completion, accept_request, is_coming};

/// A name that no other agent has.
#[must_use]
pub fn random_name(role: &str) -> String {
    format!("expertd-{role}-{:016x}", RandomState::new().hash_one(std::process::id()))
}
