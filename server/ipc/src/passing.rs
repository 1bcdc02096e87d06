//! Control messages that carry descriptors: a JSON line whose first byte brings them.

use std::io::{self, Read, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use expertd_shm::descriptors::{receive_with, send_with};
use serde::Serialize;

/// Writes one message with descriptors.
///
/// # Errors
/// If the peer is gone, or there are too many descriptors.
pub fn send_with_fds<M: Serialize>(
    mut socket: &UnixStream,
    message: &M,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let sent = send_with(socket, &line, fds)?;
    socket.write_all(&line[sent..])
}

/// Sets whether the peers of a Unix-domain socket may pass descriptors, which the kernel refuses otherwise; sockets that a listener accepts
/// inherit this. The process that reads or closes the socket closes what it did not receive, which can take as long as the sender likes.
///
/// # Errors
/// If the kernel lacks the option SO_PASSRIGHTS (before Linux 6.16).
#[allow(unsafe_code)]
pub fn allow_passed_descriptors(socket: &impl std::os::fd::AsFd, allow: bool) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;
    const SO_PASSRIGHTS: libc::c_int = 83;
    let value = libc::c_int::from(allow);
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: `value` outlives the call, which reads as many bytes as it is told, and `socket` is open.
    let result = unsafe {
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads a control socket and keeps the descriptors that come with its bytes.
#[derive(Debug)]
pub struct FdReader {
    socket: UnixStream,
    fds: Vec<OwnedFd>,
}

impl FdReader {
    /// A reader of `socket`, from which nothing has been read yet.
    #[must_use]
    pub const fn new(socket: UnixStream) -> Self {
        FdReader { socket, fds: Vec::new() }
    }

    /// The descriptors that came so far. One read can bring several messages, so take them only after the message that
    /// announces them.
    pub fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// The oldest descriptor that was not taken, for a message that brings one.
    pub fn take_fd(&mut self) -> Option<OwnedFd> {
        (!self.fds.is_empty()).then(|| self.fds.remove(0))
    }
}

impl Read for FdReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        receive_with(&self.socket, bytes, &mut self.fds)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::BufReader;
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::control::{receive, send};

    #[test]
    fn descriptors_come_with_their_message() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        send(&a, &"first").unwrap();
        send_with_fds(&a, &"second", &[file.as_fd(), file.as_fd()]).unwrap();
        send(&a, &"third").unwrap();
        drop(a);
        let mut reader = BufReader::new(FdReader::new(b));
        assert_eq!(receive::<String>(&mut reader).unwrap().unwrap(), "first");
        assert_eq!(receive::<String>(&mut reader).unwrap().unwrap(), "second");
        assert_eq!(reader.get_mut().take_fds().len(), 2);
        assert_eq!(receive::<String>(&mut reader).unwrap().unwrap(), "third");
        assert_eq!(receive::<String>(&mut reader).unwrap(), None);
        assert!(reader.get_mut().take_fds().is_empty());
    }
}
