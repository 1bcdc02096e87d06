//! Parts shared by integration tests: golden data, and an MoE block computed the plain way.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test uses a part of this")]

pub mod golden;
pub mod kernels;
