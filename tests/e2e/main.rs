//! Tests of `expertd serve` as a process with its ranks, over gRPC.

#![allow(clippy::unwrap_used, reason = "tests")]

use expertd_test_support::service;

mod balance;
mod faults;
mod fleet;
mod fp8;
mod golden;
mod gpu;
mod gpu_placement;
mod held;
mod layers;
mod network;
mod reload;
mod reload_checks;
mod replacing;
mod sessions;
mod soak_gpu;
mod startup;
mod steps;
mod tiers;
mod tiers_copies;
mod tiers_gpu;
mod traces;
mod weights;
