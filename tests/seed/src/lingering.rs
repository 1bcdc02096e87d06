//! A socket whose close blocks, which clients can pass to a service.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// A socket that lingers over bytes that its peer, which is returned with it, does not read.
///
/// # Panics
/// If the system refuses one.
#[must_use]
pub fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(5))).unwrap();
    socket.set_nonblocking(true).unwrap();
    while (&socket).write(&[0; 1 << 16]).is_ok() {}
    socket.set_nonblocking(false).unwrap();
    (socket.into(), peer)
}
