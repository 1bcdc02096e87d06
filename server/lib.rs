//! expertd: runs the Mixture-of-Experts blocks of real checkpoints with expert parallelism, over gRPC.
//!
//! A *token* here is one row of hidden states: after a decoder layer's norm, before the residual. Clients send
//! token batches and get the MoE block's output rows back.
//!
//! The modules form layers; a lower one never imports a higher one (`tests/layers.rs` checks it). From the top:
//! [`commands`], [`api`], [`scheduler`], [`cluster`], [`engine`], [`ep`], [`experts`], [`gate`], [`model`], [`shm`],
//! [`linalg`], [`memory`], [`telemetry`], [`types`].

pub mod api;
pub mod cluster;
pub mod commands;
pub mod engine;
pub mod ep;
pub mod experts;
pub mod gate;
pub mod linalg;
pub mod memory;
pub mod model;
pub mod scheduler;
pub mod shm;
pub mod telemetry;
pub use expertd_types as types;
