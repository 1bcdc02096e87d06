//! Listeners, connections, and the layer in front of every call.

pub(super) mod address;
mod connections;
pub(super) mod frames;
mod front;
pub(super) mod server;
pub(super) mod table;
