//! The services.

pub(crate) mod admin;
pub(crate) mod call;
mod convert;
pub(crate) mod description;
mod forward;
pub(crate) mod health;
pub(crate) mod moe;
mod stream;
pub(crate) mod validate;
