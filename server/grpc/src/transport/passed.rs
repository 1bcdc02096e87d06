//! Unix-domain sockets whose reads keep the descriptors that peers pass.
//!
//! Where the kernel lets peers pass descriptors (before Linux 6.16), a plain read closes them, which takes as long as their sender
//! likes. Here the connection ends, and the thread that closes its socket closes them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// Descriptors in one message, at most (the kernel's SCM_MAX_FD): those without room in the buffer would be closed by the read.
const MAX_PASSED: usize = 253;

/// The descriptors that a peer has passed.
#[derive(Clone, Debug, Default)]
pub(super) struct PassedDescriptors(Arc<Mutex<Vec<OwnedFd>>>);

/// An accepted socket that ends when its peer passes a descriptor.
#[derive(Debug)]
pub(crate) struct Receiving {
    stream: UnixStream,
    passed: PassedDescriptors,
}

impl Receiving {
    pub(super) fn new(stream: UnixStream, passed: &PassedDescriptors) -> Receiving {
        Receiving { stream, passed: passed.clone() }
    }

    /// Reads into `bytes` without blocking.
    fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(bytes)];
        let received = recvmsg(&self.stream, into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let mut passed = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                passed.extend(descriptors);
            }
        }
        if passed.is_empty() {
            return Ok(received.bytes);
        }
        let count = passed.len();
        self.passed.0.lock().unwrap_or_else(PoisonError::into_inner).extend(passed);
        Err(io::Error::other(format!("the peer has passed {count} descriptors, expected none")))
    }
}

impl AsyncRead for Receiving {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            let into = buffer.initialize_unfilled();
            match self.stream.try_io(Interest::READABLE, || self.receive(into)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(read) => {
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Receiving {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream as StdStream;

    use expertd_ipc::passing::send_with_fds;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn bytes_pass_and_descriptors_end_the_connection_unclosed() {
        let (peer, own) = StdStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let passed = PassedDescriptors::default();
        let mut receiving = Receiving::new(UnixStream::from_std(own).unwrap(), &passed);
        receiving.write_all(b"there").await.unwrap();
        send_with_fds(&peer, &"here", &[]).unwrap();
        let mut bytes = [0; 7];
        receiving.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"\"here\"\n");
        let (kept, other) = StdStream::pair().unwrap();
        send_with_fds(&peer, &"with", &[other.as_fd()]).unwrap();
        drop(other);
        let error = receiving.read_exact(&mut bytes).await.unwrap_err();
        assert!(error.to_string().contains("1 descriptors"), "{error}");
        drop(receiving);
        kept.set_nonblocking(true).unwrap();
        let read = || io::Read::read(&mut &kept, &mut [0; 1]);
        assert_eq!(read().unwrap_err().kind(), io::ErrorKind::WouldBlock, "the passed socket is open");
        drop(passed);
        assert_eq!(read().unwrap(), 0, "it is closed with what keeps it");
    }
}
