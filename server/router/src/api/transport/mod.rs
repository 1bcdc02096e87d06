//! Listeners, connections, and what every call passes first.

pub(super) mod address;
mod connections;
mod frames;
mod front;
pub(super) mod places;
pub(super) mod server;
