//! The core of the router rank: it checks requests, forms steps and supervises the expert ranks. It touches no device, and knows neither
//! gRPC nor sessions: everything that wants rows computed is a [`steps::Caller`].
//!
//! * [`backend`]: requests, answers and states as plain data, and the trait that the service offers.
//! * [`validate`]: what a call asks for becomes a request, or a [`failure`].
//! * [`steps`]: the step loop's thread and the service in front of it.
//! * [`cluster`]: one generation of the EP group; child processes.
//! * [`listen`]: addresses, and Unix-domain sockets with their files.

#![forbid(unsafe_code)]

pub mod backend;
pub mod cluster;
mod expert_rows;
pub mod failure;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod listen;
pub mod steps;
mod tier_rows;
pub mod validate;
