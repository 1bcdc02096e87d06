//! The socket of an open session.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::SessionError;

/// The process that opened a session. A fork has the session's memory but neither its threads nor its own copy of the rings' counters: a
/// call from there would take a number and places of the parent's calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnProcess(u32);

impl OwnProcess {
    pub(crate) fn current() -> Self {
        OwnProcess(std::process::id())
    }

    pub(crate) fn is_current(self) -> bool {
        self.0 == std::process::id()
    }

    /// # Errors
    /// [`SessionError::OtherProcess`] in a fork.
    pub(crate) fn check(self) -> Result<(), SessionError> {
        let (opened, found) = (self.0, std::process::id());
        if opened == found { Ok(()) } else { Err(SessionError::OtherProcess { opened, found }) }
    }
}

/// The socket, which the session and its buffers hold. The service frees the session's memory when it is closed, so that a buffer
/// keeps its bytes after the end of the session.
#[derive(Debug)]
pub(crate) struct Link {
    socket: UnixStream,
    /// The process that opened the session. A fork has no right to end it.
    process: OwnProcess,
}

impl Link {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Link { socket, process: OwnProcess::current() }
    }

    /// Whether this process opened the session.
    pub(crate) fn is_own(&self) -> bool {
        self.process.is_current()
    }

    /// # Errors
    /// [`SessionError::OtherProcess`] in a fork.
    pub(crate) fn check_process(&self) -> Result<(), SessionError> {
        self.process.check()
    }

    /// The socket.
    #[cfg(feature = "cuda")]
    pub(crate) fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Ends the session, unless this process is a fork. Its memory stays as it is until [`close`](Self::close).
    pub(crate) fn end_session(&self) {
        self.shutdown(Shutdown::Write);
    }

    /// Lets the service free the session's memory, also while a fork of this process has the socket. A thread that reads the socket
    /// finds its end. A fork changes nothing.
    pub(crate) fn close(&self) {
        self.shutdown(Shutdown::Both);
    }

    /// Ends the reading half, so that a thread that reads the socket finds its end.
    #[cfg(feature = "cuda")]
    pub(crate) fn stop_reading(&self) {
        self.shutdown(Shutdown::Read);
    }

    fn shutdown(&self, how: Shutdown) {
        if self.is_own() {
            let _ = self.socket.shutdown(how);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{ErrorKind, Read as _};

    use super::*;

    #[test]
    fn a_fork_does_not_end_the_session() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let link = Link::new(ours.try_clone().unwrap());
        let inherited = Link { socket: ours, process: OwnProcess(link.process.0 + 1) };
        inherited.end_session();
        inherited.close();
        drop(inherited);
        assert_eq!(theirs.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(link);
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
    }
}
