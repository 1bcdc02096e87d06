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
mod cores;
mod frames;
mod limits;
mod load;
mod ptrace;
mod services;
mod surroundings;
mod unreaped;
