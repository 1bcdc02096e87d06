//! The public gRPC services: decoding and validation, status mapping, health, reflection.
//!
//! * `access`: who may call: TLS, client certificates, tokens, users of this host.
//! * `transport`: addresses, connections (limits, keep-alive), and `front`, which every call passes (credentials, deadline,
//!   charges).
//! * `framing`: messages as bytes: what they are charged, rows that stay in the frames in which they arrived, answers.
//! * `service`: the services themselves; `validate` turns a message into a request for the step loop.
//!
//! `docs/api.md` is the page for callers.

mod access;
mod framing;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod memory;
mod service;
mod transport;

pub use access::{Access, AccessConfig, AccessError};
pub(crate) use access::{Protocol, ServerTls};
pub use framing::connection::ConnectionTimeouts;
pub use memory::transport_bytes;
pub(crate) use service::call::next_request_id;
pub(crate) use service::description::ModelDescription;
pub use service::failure::{ERROR_DOMAIN, code_name};
pub(crate) use service::failure::{Failure, public_text};
pub use service::health::ready_probe;
pub(crate) use service::validate::{Asked, AskedRouting, Envelope, check};
pub use transport::address::{Address, AddressError, BindError};
pub(crate) use transport::address::{Listener, PlainSocket};
pub(crate) use transport::front::client_key;
pub use transport::limits::ConnectionLimits;
pub use transport::server::{Server, ServerConfig, ServerError};
pub(crate) use transport::table::Origin;
