//! Tests of hostile clients and broken surroundings: bytes that a peer sends or withholds harm that peer and no other.
//!
//! `cargo test --test hostile` runs everything in small sizes; `scripts/hostile.sh` runs the attacks in full size and
//! prints what they cost an honest client.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

use expertd_test_support::{backend, harness, service};

mod access;
mod attack;
mod attacks;
mod certificates;
#[cfg(target_arch = "x86_64")]
mod chaos;
mod cores;
#[cfg(target_arch = "x86_64")]
mod faults;
mod frames;
mod limits;
mod load;
#[cfg(target_arch = "x86_64")]
mod ptrace;
#[cfg(target_arch = "x86_64")]
mod readers;
mod services;
mod surroundings;
#[cfg(target_arch = "x86_64")]
mod unreaped;
