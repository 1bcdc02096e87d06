//! What tests of the whole service share: [`service`] runs the program with its ranks, [`harness`] serves the API over a
//! [fake backend](backend) in this process.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

pub mod backend;
pub mod harness;
pub mod service;
