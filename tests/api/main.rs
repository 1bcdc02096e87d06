//! Tests of the gRPC services over real sockets, with a backend that echoes.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod admin;
mod backend;
mod harness;
mod status_page;
mod statuses;
mod streams;
mod transport;
