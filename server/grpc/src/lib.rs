//! The gRPC services over a [`Backend`](expertd_core::backend::Backend): transport, credentials, bytes in flight, health, reflection; and
//! the metrics port.
//!
//! * `access`: who may call: TLS, client certificates, tokens, users of this host.
//! * `transport`: connections (limits, keep-alive), and `calls`: what happens to each call before its service (credentials, deadline, charges).
//! * `bytes`: what messages are charged, and the progress of connections.
//! * `status`: a failure as a gRPC status.
//! * `service`: the services themselves.
//! * `metrics_port`: metrics, probes and the status page over HTTP.
//!
//! `docs/api.md` is the page for callers.

#![forbid(unsafe_code)]

mod access;
mod bytes;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod metrics_port;
mod service;
mod status;
mod transport;

pub use access::{Access, AccessConfig, AccessError};
pub use bytes::activity::ConnectionTimeouts;
pub use metrics_port::MetricsPort;
pub use service::convert::encoded_model;
pub use service::network::{NetworkOpener, NetworkSession};
pub use status::ERROR_DOMAIN;
pub use transport::places::ConnectionLimits;
pub use transport::server::{Server, ServerConfig, ServerError};
