//! Addresses to listen on, and Unix-domain sockets with their files.

mod address;
mod unix;

pub use address::{Address, AddressError, BindError};
pub use unix::UnixSocket;
