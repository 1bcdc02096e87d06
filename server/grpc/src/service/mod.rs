//! The services.

pub(crate) mod admin;
pub(crate) mod call;
pub(crate) mod convert;
pub(crate) mod forward;
pub(crate) mod health;
pub(crate) mod moe;
pub(crate) mod network;
mod stream;
