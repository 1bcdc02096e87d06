//! Listeners, connections, and the layers in front of every call.

mod connections;
mod layers;
mod listener;
pub(crate) mod places;
pub(crate) mod server;
