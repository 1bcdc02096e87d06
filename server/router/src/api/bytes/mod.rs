//! Bytes of requests and answers: what they are charged, and the progress of the connection that carries them.

pub(in crate::api) mod activity;
pub(in crate::api) mod answer;
pub(in crate::api) mod body;
pub(in crate::api) mod budget;
pub(in crate::api) mod charges;
pub(in crate::api) mod windows;
