//! The public gRPC services: decoding and validation, status mapping, health, reflection.
//!
//! A call passes `connections` (limits, keep-alive) and `front` (deadline, charges) before its message is decoded, and
//! `validate` before it reaches the scheduler. `docs/api.md` is the page for callers.

mod address;
mod admin;
mod answer;
mod apart;
mod body;
mod budget;
mod call;
mod connections;
mod convert;
mod failure;
mod front;
mod health;
mod moe;
mod server;
mod stream;
mod validate;

pub use address::{Address, AddressError, BindError};
pub use budget::Patience;
pub use failure::{ERROR_DOMAIN, code_name};
pub use health::ready_probe;
pub use server::{Server, ServerConfig, ServerError};
