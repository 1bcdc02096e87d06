//! Routing functions, driven by data.
//!
//! A [`GateSpec`](expertd_model::GateSpec) describes how a layer routes; [`CpuGate`] computes it. Logits, scores and
//! weights are computed in f32 from weights at their stored precision (bf16 and f16 widen exactly), as the reference
//! implementation does when it runs in f32. In bf16 the reference rounds its logits and may choose other experts where
//! scores are close.

mod choose;
mod cpu;
#[cfg(test)]
mod tests;

pub use cpu::{CpuGate, GateError, GateParts, GateScratch};
