//! Parts that integration tests share: golden data, and an MoE block computed in this process.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test uses a part of this")]

pub mod golden;
pub mod kernels;
