//! The socket of a session until the session is open: every answer of the service has come by one deadline.

use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bytemuck::Pod;
use expertd_shm::descriptors::send_fds;
use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::SessionError;
use crate::socket::{self, receive_region};
use crate::wire::{MAX_SERVICE_FRAME, frame};

/// How long after its deadline a client waits for the reason why its session is not open.
const WHY_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest time that opening may take; longer ones exceed the range of clocks.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// A connection to the session socket.
#[derive(Debug)]
pub(crate) struct Opening<'a> {
    socket: UnixStream,
    address: &'a str,
    timeout: Duration,
    deadline: Instant,
    /// Why a frame could not be sent. A service that refuses the client may close the socket before it has read the client's frames; its
    /// sentence can still be read.
    unsent: Option<io::Error>,
}

impl<'a> Opening<'a> {
    /// Connects to `unix:PATH`.
    pub(crate) fn connect(address: &'a str, timeout: Duration) -> Result<Self, SessionError> {
        let path = address.strip_prefix("unix:").ok_or_else(|| SessionError::Address(address.to_owned()))?;
        let path = path.strip_prefix("//").unwrap_or(path);
        let timeout = timeout.min(LONGEST);
        let deadline = Instant::now() + timeout;
        let failed = |source| error_of(address, timeout, source);
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = socket.map_err(|error| failed(error.into()))?;
        // Connecting waits while a stopped service has not accepted earlier clients; the time limit for writes ends it.
        set_socket_timeout(&socket, Timeout::Send, Some(timeout.max(Duration::from_micros(1))))
            .and_then(|()| SocketAddrUnix::new(path))
            .and_then(|path| retry_on_intr(|| connect(&socket, &path)))
            .map_err(|error| failed(error.into()))?;
        Ok(Opening { socket: socket.into(), address, timeout, deadline, unsent: None })
    }

    /// A connection that exists.
    pub(crate) fn over(socket: UnixStream, address: &'a str, timeout: Duration) -> Self {
        Opening { socket, address, timeout, deadline: Instant::now() + timeout, unsent: None }
    }

    pub(crate) fn failed(&self, source: io::Error) -> SessionError {
        error_of(self.address, self.timeout, source)
    }

    /// Sends a frame. An error is returned by the next [`expect`](Self::expect), unless the service has sent why it refuses.
    pub(crate) fn send(&mut self, kind: u32, payload: &[u8]) {
        if self.unsent.is_none() {
            self.unsent = socket::send(&self.socket, kind, payload).err();
        }
    }

    /// Sends a descriptor. Errors are kept as those of [`send`](Self::send).
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "host sessions send no descriptor"))]
    pub(crate) fn send_descriptor(&mut self, fd: impl AsFd) {
        if self.unsent.is_none() {
            self.unsent = send_fds(&self.socket, &[fd.as_fd()]).err();
        }
    }

    /// The payload of the next frame, which must be of this kind.
    pub(crate) fn expect(&mut self, kind: u32, name: &str) -> Result<Vec<u8>, SessionError> {
        let mut received = socket::receive_until(&self.socket, MAX_SERVICE_FRAME, self.deadline);
        if received.as_ref().is_err_and(is_timeout) {
            received = received.or_else(|error| self.ask_why(error));
        }
        match (received, self.unsent.take()) {
            (Ok(Some((found, payload))), _) if found == kind => Ok(payload),
            (Ok(Some((frame::REFUSED | frame::ENDED, text))), _) => {
                Err(SessionError::Refused { reason: String::from_utf8_lossy(&text).into_owned() })
            }
            (Ok(Some((found, _))), _) => {
                Err(SessionError::Protocol(format!("a frame of kind {found}, expected {name} ({kind})")))
            }
            (Ok(None) | Err(_), Some(unsent)) => Err(self.failed(unsent)),
            (Ok(None), None) => {
                let text = format!("the service closed the socket before it sent {name}");
                Err(self.failed(io::Error::new(ErrorKind::UnexpectedEof, text)))
            }
            (Err(source), None) => Err(self.failed(source)),
        }
    }

    /// Asks, after the deadline, why the session is not open: a service that waits for its ranks answers with the reason once this end
    /// shuts its half of the socket down. Without an answer returns `error`, the timeout.
    fn ask_why(&self, error: io::Error) -> io::Result<Option<(u32, Vec<u8>)>> {
        let _ = self.socket.shutdown(Shutdown::Write);
        match socket::receive_until(&self.socket, MAX_SERVICE_FRAME, Instant::now() + WHY_TIMEOUT) {
            Ok(Some((frame::REFUSED, text))) => Ok(Some((frame::REFUSED, text))),
            _ => Err(error),
        }
    }

    /// The payload of the next frame as a record.
    pub(crate) fn expect_record<T: Pod>(&mut self, kind: u32, name: &str) -> Result<T, SessionError> {
        let payload = self.expect(kind, name)?;
        socket::record(&payload).map_err(|error| SessionError::Protocol(format!("as {name} {error}")))
    }

    /// The descriptor of the region that follows the last frame.
    pub(crate) fn receive_region(&self) -> Result<OwnedFd, SessionError> {
        let left = self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.socket
            .set_read_timeout(Some(left))
            .and_then(|()| receive_region(&self.socket))
            .map_err(|source| self.failed(source))
    }

    /// The socket of the open session, without a time limit for reads.
    pub(crate) fn finish(self) -> Result<UnixStream, SessionError> {
        self.socket.set_read_timeout(None).map_err(|source| self.failed(source))?;
        Ok(self.socket)
    }
}

/// The kernel reports a time limit as EAGAIN.
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// An error of the socket.
fn error_of(address: &str, timeout: Duration, source: io::Error) -> SessionError {
    let source = if is_timeout(&source) {
        let text = format!("the service did not answer within {timeout:?}; it may be stopped or busy");
        io::Error::new(ErrorKind::TimedOut, text)
    } else {
        source
    };
    SessionError::Socket { address: address.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use rustix::net::{bind, listen};

    use super::*;

    const SOON: Duration = Duration::from_millis(200);
    const LATE: Duration = Duration::from_secs(60);

    /// The service accepts no connection, and one client already fills its backlog, so that the next client cannot connect.
    #[test]
    fn connecting_to_a_service_that_accepts_nothing_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let service =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&service, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&service, 0).unwrap();
        let address = format!("unix:{}", path.display());
        let mut first = Opening::connect(&address, SOON).unwrap();
        let error = Opening::connect(&address, SOON).unwrap_err().to_string();
        assert!(error.contains("did not answer within 200ms; it may be stopped"), "{error}");
        first.send(frame::GET_MODEL, &[]);
        let error = first.expect(frame::MODEL, "MODEL").unwrap_err().to_string();
        assert!(error.contains(&address) && error.contains("did not answer within 200ms"), "{error}");
        let error = first.receive_region().unwrap_err().to_string();
        assert!(error.contains("did not answer"), "{error}");
        let nowhere = Opening::connect("unix:/nonexistent/socket", LATE).unwrap_err().to_string();
        assert!(nowhere.contains("/nonexistent/socket: No such file"), "{nowhere}");
    }

    /// The service has refused the client and closed the socket before the client writes.
    #[test]
    fn the_reason_of_a_refusal_is_read_although_nothing_can_be_sent() {
        let (client, service) = UnixStream::pair().unwrap();
        socket::send(&service, frame::REFUSED, b"user 7 may not open sessions").unwrap();
        drop(service);
        let mut opening = Opening::over(client, "unix:/test", LATE);
        opening.send(frame::GET_MODEL, &[]);
        opening.send(frame::OPEN, &[0; 40]);
        opening.send_descriptor(tempfile::tempfile().unwrap());
        assert!(opening.unsent.is_some());
        let error = opening.expect(frame::MODEL, "MODEL").unwrap_err();
        assert!(matches!(&error, SessionError::Refused { reason } if reason.contains("user 7")), "{error}");
        let error = opening.expect(frame::MODEL, "MODEL").unwrap_err().to_string();
        assert!(error.contains("closed the socket before it sent MODEL"), "{error}");
    }

    #[test]
    fn a_service_that_waits_for_its_ranks_says_so_at_the_deadline() {
        let (client, service) = UnixStream::pair().unwrap();
        let mut opening = Opening::over(client, "unix:/test", SOON);
        let waiting = std::thread::spawn(move || {
            assert!(socket::receive(&service, 64).unwrap().is_none(), "the client's half has ended");
            socket::send(&service, frame::REFUSED, b"the weights are being loaded").unwrap();
        });
        let error = opening.expect(frame::OPENED, "OPENED").unwrap_err();
        assert!(matches!(&error, SessionError::Refused { reason } if reason.contains("loaded")), "{error}");
        waiting.join().unwrap();
    }

    #[test]
    fn an_answer_that_comes_byte_by_byte_ends_at_the_deadline() {
        let (client, mut service) = UnixStream::pair().unwrap();
        let mut opening = Opening::over(client, "unix:/test", SOON);
        let slow = std::thread::spawn(move || {
            while io::Write::write_all(&mut service, &[1]).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let error = opening.expect(frame::MODEL, "MODEL").unwrap_err().to_string();
        assert!(error.contains("did not answer within 200ms"), "{error}");
        drop(opening);
        slow.join().unwrap();
    }
}
