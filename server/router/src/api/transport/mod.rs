//! Listeners, connections, and what every call passes first.

pub(super) mod address;
mod connections;
mod front;
pub(super) mod server;
