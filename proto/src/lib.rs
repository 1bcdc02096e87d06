//! The expertd gRPC protocol: generated code, the encoded descriptors, the transport settings of both ends and a thin
//! client.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use expertd_proto::v1::{DType, ForwardRequest};
//!
//! let client = expertd_proto::Client::connect("127.0.0.1:50051").await?;
//! let model = client.model("").await?;
//! let rows = bytes::Bytes::from(vec![0u8; model.hidden as usize * 4]);
//! let request = ForwardRequest::inline(model.moe_layers[0].layer, 1, DType::DtypeF32, rows);
//! let answer = client.forward(request, None).await?;
//! # Ok(()) }
//! ```

mod client;
mod duration;
pub mod fleet;
mod loss;
mod retry;
#[cfg(feature = "session")]
pub mod session;
#[cfg(feature = "trace")]
mod trace;
pub mod transport;

pub use client::{AnswerReceiver, Client, ClientError, LAYER_METADATA, RequestSender};
pub use duration::received_duration;
pub use loss::{address_hint, connection_loss, with_address_hint};
pub use retry::{RetryPolicy, retry_delay};

/// Package `expertd.v1`.
pub mod v1 {
    #![allow(missing_docs, clippy::all, unreachable_pub)]
    tonic::include_proto!("expertd.v1");
}

/// Encoded `FileDescriptorSet` of the package, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/expertd_descriptor.bin"));

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
