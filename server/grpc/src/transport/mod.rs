//! Listeners, connections, and the layers in front of every call.

mod connections;
mod layers;
mod listener;
mod passed;
pub(crate) mod places;
pub(crate) mod server;
