//! Addresses to listen on, and Unix-domain sockets with their files.

mod address;
mod unix;

pub use address::{Address, AddressError, BindError};
pub use unix::UnixSocket;

/// Largest number of clients of a Unix-domain socket that are turned away at the same time, each by a thread that closes the client's
/// socket. While there are as many, the listener accepts no client.
pub const MAX_TURNED_AWAY: usize = 64;
