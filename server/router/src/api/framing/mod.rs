//! Messages as bytes, and what they are charged.

pub(super) mod answer;
mod apart;
pub(super) mod body;
pub(super) mod budget;
pub(super) mod connection;
