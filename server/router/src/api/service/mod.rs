//! The services.

pub(super) mod admin;
pub(super) mod call;
pub(super) mod convert;
pub(super) mod description;
pub(super) mod health;
pub(super) mod moe;
mod stream;
mod unowned;
pub(super) mod validate;
