//! The public gRPC services: decoding and validation, status mapping, health, reflection.
//!
//! * `access`: who may call: TLS, client certificates, tokens, users of this host.
//! * `transport`: addresses, connections (limits, keep-alive), and `layers`, which every call passes (credentials, deadline,
//!   charges).
//! * `bytes`: what messages are charged, and the progress of connections.
//! * `failure`: statuses of requests without an answer.
//! * `service`: the services themselves; `validate` turns a message into a request for the step loop.
//!
//! `docs/api.md` is the page for callers.

mod access;
mod bytes;
mod failure;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod service;
mod transport;

pub use access::{Access, AccessConfig, AccessError};
pub(crate) use access::{Protocol, ServerTls};
pub use bytes::activity::ConnectionTimeouts;
pub use failure::{ERROR_DOMAIN, code_name};
pub(crate) use failure::{Failure, public_text};
pub(crate) use service::call::next_request_id;
pub(crate) use service::description::ModelDescription;
pub use service::health::ready_probe;
pub(crate) use service::validate::{Asked, AskedRouting, Envelope, check};
pub use transport::address::{Address, AddressError, BindError};
pub(crate) use transport::address::{Listener, PlainSocket};
pub(crate) use transport::layers::client_key;
pub use transport::places::ConnectionLimits;
pub(crate) use transport::places::Origin;
pub use transport::server::{Server, ServerConfig, ServerError};
