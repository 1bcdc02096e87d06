//! The expertd gRPC protocol: generated code, the encoded descriptors, and what both ends must agree on beside them.

mod duration;
mod request;
mod status;
pub mod transport;

pub use duration::received_duration;
pub use status::retry_delay;

/// Package `expertd.v1`.
pub mod v1 {
    #![allow(missing_docs, clippy::all, unreachable_pub)]
    tonic::include_proto!("expertd.v1");
}

/// Encoded `FileDescriptorSet` of the package, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/expertd_descriptor.bin"));
