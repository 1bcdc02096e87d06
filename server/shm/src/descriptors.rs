//! Descriptors that travel over a Unix socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Largest number of descriptors in one message.
const MAX_FDS: usize = 8;

/// Sends `fds` with the first of some bytes. Returns how many bytes were sent.
///
/// # Errors
/// If the peer is gone, or there are too many descriptors.
pub fn send_with(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        let problem =
            format!("cannot send {} file descriptors in one message; at most {MAX_FDS} fit", fds.len());
        return Err(io::Error::other(problem));
    }
    Ok(rustix::net::sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Reads bytes, and adds the descriptors that come with them to `fds`. Returns the number of bytes.
pub fn receive_with(socket: &UnixStream, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(bytes)];
    let received = rustix::net::recvmsg(socket.as_fd(), into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok(received.bytes)
}

/// Sends `fds` with one byte.
pub fn send_fds(socket: &UnixStream, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, b"F", fds).map(|_| ())
}

/// Receives the descriptors that [`send_fds`] sent.
///
/// # Errors
/// If the peer is gone or sent anything else.
pub fn receive_fds(socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let (mut byte, mut fds) = ([0], Vec::new());
    if receive_with(socket, &mut byte, &mut fds)? != 1 || byte != *b"F" {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the control socket did not begin with file descriptors; was this process started by `expertd serve`?",
        ));
    }
    Ok(fds)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn another_protocol_on_the_socket_is_an_error() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        let error = receive_fds(&b).unwrap_err();
        assert!(error.to_string().contains("expertd serve"), "{error}");
    }
}
