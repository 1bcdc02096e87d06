//! Listeners, connections, and the layer in front of every call.

pub(super) mod address;
mod connections;
mod frames;
mod front;
pub(super) mod server;
pub(super) mod table;
