//! Listeners, connections, and the layer in front of every call.

pub(super) mod address;
mod connections;
pub(super) mod frames;
pub(in crate::api) mod front;
pub(super) mod limits;
pub(super) mod server;
pub(super) mod table;
mod tarpit;
mod unix;
mod watched;
