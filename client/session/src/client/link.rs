//! The socket of an open session.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;

/// The socket, which the session and its buffers hold. The service frees the session's memory when it is closed, so that a buffer
/// keeps its bytes after the end of the session.
#[derive(Debug)]
pub(super) struct Link {
    socket: UnixStream,
    /// The process that opened the session. A fork has no right to end it.
    process: u32,
}

impl Link {
    pub(super) fn new(socket: UnixStream) -> Self {
        Link { socket, process: std::process::id() }
    }

    /// Whether this process opened the session.
    pub(super) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Ends the session. Its memory stays as it is until [`close`](Self::close).
    pub(super) fn end_session(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Lets the service free the session's memory, also while a fork of this process has the socket. A thread that reads the socket
    /// finds its end.
    pub(super) fn close(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.is_own() {
            self.close();
        }
    }
}
