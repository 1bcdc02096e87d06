//! Bytes of requests and answers: what they are charged, and the progress of the connection that carries them.

pub(crate) mod activity;
pub(crate) mod body;
pub(crate) mod budget;
pub(crate) mod windows;
