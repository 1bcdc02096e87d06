//! Tests of `expertd serve` as a process with its ranks, over gRPC.

#![allow(clippy::unwrap_used, reason = "tests")]

mod balance;
mod faults;
mod fleet;
mod golden;
mod gpu;
mod gpu_placement;
mod layers;
mod reload;
mod replacing;
mod service;
mod sessions;
mod soak_gpu;
mod startup;
mod steps;
mod traces;
mod weights;
