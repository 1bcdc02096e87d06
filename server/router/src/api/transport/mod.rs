//! Listeners, connections, and the layers in front of every call.

pub(super) mod address;
mod connections;
pub(super) mod layers;
mod passed;
pub(super) mod places;
pub(super) mod server;
mod unix;
