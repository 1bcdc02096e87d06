//! Routing functions, driven by data.
//!
//! A [`GateSpec`](expertd_model::GateSpec) says how a layer routes; [`CpuGate`] does it. Logits, scores and weights are
//! computed in f32 from weights at their stored precision (bf16 and f16 widen exactly). The reference implementation
//! does the same when it runs in f32; when it runs in bf16 it rounds logits, so that its choices differ where scores
//! are close.

mod choose;
mod cpu;
#[cfg(test)]
mod tests;

pub use cpu::{CpuGate, GateError, GateScratch};
