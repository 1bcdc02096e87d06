//! The client of expertd: calls, streams, retries, TLS and tokens, several services as one ([`fleet`]), and, with
//! features `session` and `network`, clients that share memory with a service on their host or write into its memory from another one.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use expertd_client::v1::{DType, ForwardRequest};
//!
//! let client = expertd_client::Client::connect("127.0.0.1:50051").await?;
//! let model = client.model("").await?;
//! let rows = bytes::Bytes::from(vec![0u8; model.hidden as usize * 4]);
//! let request = ForwardRequest::inline(model.moe_layers[0].layer, 1, DType::DtypeF32, rows);
//! let answer = client.forward(request, None).await?;
//! # Ok(()) }
//! ```

use std::time::Duration;

mod client;
pub mod fleet;
mod loss;
#[cfg(feature = "network")]
pub mod network;
mod retry;
#[cfg(feature = "session")]
pub mod session;
#[cfg(feature = "trace")]
mod trace;
pub mod transport;

/// The messages of the protocol.
pub use expertd_proto::v1;

pub use client::{AnswerReceiver, Client, ClientError, LAYER_METADATA, RequestSender};
pub use loss::{address_hint, connection_loss, with_address_hint};
pub use retry::RetryPolicy;

/// Longest timeout of a call. Longer ones exceed what clocks and gRPC's header represent, and are shortened to it.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Compiles the Rust examples of the README and of pages in docs/ as doctests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../README.md")]
    struct Readme;
    #[doc = include_str!("../../docs/api.md")]
    struct Api;
    #[doc = include_str!("../../docs/services.md")]
    struct Services;
}
