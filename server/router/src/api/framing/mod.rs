//! Messages as bytes, and what they are charged.

pub(super) mod answer;
mod apart;
pub(super) mod body;
pub(super) mod budget;
pub(super) mod charges;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod chunks;
pub(super) mod connection;
