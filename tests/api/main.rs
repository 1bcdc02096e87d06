//! Tests of the gRPC services over real sockets, with a backend that echoes.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

use expertd_test_support::{backend, harness};

mod admin;
mod status_page;
mod statuses;
mod streams;
mod transport;
