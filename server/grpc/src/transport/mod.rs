//! Listeners, connections, and what happens to every call before its service.

mod calls;
mod connections;
mod listener;
mod passed;
pub(crate) mod places;
pub(crate) mod server;
