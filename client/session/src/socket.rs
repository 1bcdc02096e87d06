//! Frames over the session socket.

use std::io::{self, Read, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use bytemuck::{Pod, Zeroable as _};
use expertd_shm::SharedRegion;
use expertd_shm::descriptors::{receive_fds, send_fds};
use rustix::net::{RecvFlags, recv};

use crate::wire::FrameHeader;

/// Sends a frame.
///
/// # Errors
/// If the peer is gone, or the payload exceeds 4 GiB.
pub fn send(mut socket: &UnixStream, kind: u32, payload: &[u8]) -> io::Result<()> {
    let bytes = u32::try_from(payload.len()).map_err(io::Error::other)?;
    let mut frame = bytemuck::bytes_of(&FrameHeader { kind, bytes }).to_vec();
    frame.extend_from_slice(payload);
    socket.write_all(&frame)
}

/// Receives a frame: its kind and payload; `None` at the end of the stream.
///
/// # Errors
/// If the payload exceeds `limit` bytes, or the stream broke within a frame.
pub fn receive(socket: &UnixStream, limit: usize) -> io::Result<Option<(u32, Vec<u8>)>> {
    receive_from(socket, limit)
}

/// [`receive`] with a time limit for the whole frame, however slowly its bytes arrive. It replaces the socket's read timeout.
///
/// # Errors
/// As [`receive`], and if not all of the frame has arrived at `deadline`.
pub fn receive_until(
    socket: &UnixStream,
    limit: usize,
    deadline: Instant,
) -> io::Result<Option<(u32, Vec<u8>)>> {
    receive_from(Until { socket, deadline }, limit)
}

/// Reads of a socket that end at a deadline.
struct Until<'a> {
    socket: &'a UnixStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // What came while this process was stopped is in the socket.
            let (_, bytes) = recv(self.socket, buf, RecvFlags::DONTWAIT)?;
            return Ok(bytes);
        }
        self.socket.set_read_timeout(Some(left))?;
        self.socket.read(buf)
    }
}

/// The first bytes of an HTTP/2 connection, where a frame has its kind.
const HTTP2: u32 = u32::from_le_bytes(*b"PRI ");

fn receive_from(mut socket: impl Read, limit: usize) -> io::Result<Option<(u32, Vec<u8>)>> {
    let mut header = FrameHeader::zeroed();
    let bytes = bytemuck::bytes_of_mut(&mut header);
    // A read with a time limit is interrupted when its process is stopped and continued.
    let first = loop {
        match socket.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            first => break first?,
        }
    };
    if first == 0 {
        return Ok(None);
    }
    socket.read_exact(&mut bytes[first..])?;
    let length = header.bytes as usize;
    if length > limit {
        let problem = if header.kind == HTTP2 {
            "an HTTP/2 (gRPC) client connected to the session socket; the public API has another address"
                .to_owned()
        } else {
            format!("a frame of kind {} announces {length} bytes; at most {limit} fit", header.kind)
        };
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let mut payload = vec![0; length];
    socket.read_exact(&mut payload)?;
    Ok(Some((header.kind, payload)))
}

/// The payload of a frame as a record.
///
/// # Errors
/// If it has another length.
pub fn record<T: Pod>(payload: &[u8]) -> io::Result<T> {
    bytemuck::try_pod_read_unaligned(payload).map_err(|_| {
        let problem = format!("a frame has {} bytes, expected {}", payload.len(), size_of::<T>());
        io::Error::new(io::ErrorKind::InvalidData, problem)
    })
}

/// Sends the descriptor of a region.
///
/// # Errors
/// If the peer is gone.
pub fn send_region(socket: &UnixStream, region: &SharedRegion) -> io::Result<()> {
    send_fds(socket, &[region.as_fd()])
}

/// Receives the descriptor of a region.
///
/// # Errors
/// If the peer sent anything but one descriptor.
pub fn receive_region(socket: &UnixStream) -> io::Result<OwnedFd> {
    receive_one(socket, "the service", "the session's memory")
}

/// Receives the one descriptor that `sender` sends, which is that of `what`.
///
/// # Errors
/// If it sent none or several.
pub fn receive_one(socket: &UnixStream, sender: &str, what: &str) -> io::Result<OwnedFd> {
    let mut fds = loop {
        match receive_fds(socket) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let problem = format!("{sender} sent no byte `F` with the descriptor of {what}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
            received => break received?,
        }
    };
    match (fds.pop(), fds.len()) {
        (Some(fd), 0) => Ok(fd),
        (fd, others) => {
            let found = others + usize::from(fd.is_some());
            let problem = format!("{sender} sent {found} descriptors, expected one, of {what}");
            Err(io::Error::new(io::ErrorKind::InvalidData, problem))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wire::Open;

    #[test]
    fn frames_arrive_whole_and_long_ones_are_refused() {
        let (a, b) = UnixStream::pair().unwrap();
        let open = Open { version: crate::wire::VERSION, kind: 1, rows_bytes: 4096, calls: 4, reserved: 0 };
        send(&a, 1, bytemuck::bytes_of(&open)).unwrap();
        send(&a, 3, b"sentence").unwrap();
        let (kind, payload) = receive(&b, 100).unwrap().unwrap();
        assert_eq!((kind, record::<Open>(&payload).unwrap()), (1, open));
        assert!(record::<Open>(&payload[1..]).is_err());
        let error = receive(&b, 7).unwrap_err().to_string();
        assert!(error.contains("announces 8 bytes"), "{error}");
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        let error = receive(&b, 100).unwrap_err().to_string();
        assert!(error.contains("gRPC"), "{error}");
        let (a, b) = UnixStream::pair().unwrap();
        drop(a);
        assert!(receive(&b, 7).unwrap().is_none());
    }

    #[test]
    fn a_frame_that_arrives_too_slowly_is_refused() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let deadline = Instant::now() + Duration::from_millis(300);
        let slow = std::thread::spawn(move || {
            // A byte at a time, each well within the time limit: the frame would take ten times as long.
            let mut frame = bytemuck::bytes_of(&FrameHeader { kind: 1, bytes: 64 }).to_vec();
            frame.resize(frame.len() + 64, 0);
            for byte in frame {
                if a.write_all(&[byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let error = receive_until(&b, 100, deadline).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        assert!(Instant::now() >= deadline);
        drop(b);
        slow.join().unwrap();
    }

    #[test]
    fn what_has_arrived_is_read_after_the_deadline() {
        let (mut a, b) = UnixStream::pair().unwrap();
        send(&a, 3, b"sentence").unwrap();
        let over = Instant::now();
        assert_eq!(receive_until(&b, 100, over).unwrap(), Some((3, b"sentence".to_vec())));
        a.write_all(&[1]).unwrap();
        let error = receive_until(&b, 100, over).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        drop(a);
        assert!(receive_until(&b, 100, over).unwrap().is_none());
    }

    /// Every other read is interrupted.
    struct Interrupted<'a>(&'a UnixStream, bool);

    impl Read for Interrupted<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 { Err(io::ErrorKind::Interrupted.into()) } else { self.0.read(buf) }
        }
    }

    #[test]
    fn interrupted_reads_go_on() {
        let (a, b) = UnixStream::pair().unwrap();
        send(&a, 3, b"sentence").unwrap();
        drop(a);
        let mut interrupted = Interrupted(&b, false);
        assert_eq!(receive_from(&mut interrupted, 100).unwrap(), Some((3, b"sentence".to_vec())));
        assert!(receive_from(&mut interrupted, 100).unwrap().is_none());
    }

    #[test]
    fn a_byte_without_a_descriptor_is_refused() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"FG").unwrap();
        assert!(receive_region(&b).unwrap_err().to_string().contains("0 descriptors"));
        assert!(receive_region(&b).unwrap_err().to_string().contains("no byte `F`"));
        drop(a);
        assert!(receive_region(&b).unwrap_err().to_string().contains("no byte `F`"));
    }
}
