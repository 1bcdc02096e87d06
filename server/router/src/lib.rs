//! The router rank: it takes token batches over gRPC, forms steps, and supervises the expert ranks. It touches no device.
//!
//! * [`api`]: the gRPC services, their transport, the framing of messages, limits.
//! * [`backend`]: the interface between the API and the step loop.
//! * [`sessions`]: clients on the same host that share memory with the service.
//! * [`steps`]: the step loop.
//! * [`cluster`]: one generation of the EP group; child processes.
//! * [`telemetry`]: metric names, the metrics endpoint, logs.
//! * [`progress`]: threads and tasks without which the process is useless.

#![forbid(unsafe_code)]

#[cfg(feature = "fuzzing")]
pub use api::fuzzing;
#[cfg(feature = "fuzzing")]
pub use sessions::{cuda_fuzzing as cuda_sessions_fuzzing, fuzzing as sessions_fuzzing};

mod apart;
pub mod api;
pub mod backend;
pub mod cluster;
mod expert_rows;
pub mod progress;
pub mod sessions;
pub mod steps;
pub mod telemetry;
