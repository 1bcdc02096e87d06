//! A connection's socket as the HTTP/2 layer uses it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::address::Socket;
use super::connections::end;
use super::frames::FrameMeter;
use super::tarpit::Tarpit;
use crate::api::framing::budget::Budget;
use crate::api::framing::connection::Connection;

/// Time for which a connection with unread messages is not read while the transport holds too many unread bytes.
const UNREAD_PAUSE: Duration = Duration::from_millis(5);

/// A socket that records its traffic in the connection's state.
pub(super) struct Watched {
    socket: Socket,
    connection: Arc<Connection>,
    budget: Arc<Budget>,
    tarpit: Arc<Tarpit>,
    meter: FrameMeter,
    /// The current pause between reads, if there is one.
    pause: Option<Pin<Box<Sleep>>>,
    /// Whether the peer has closed its direction.
    peer_ended: bool,
}

impl Watched {
    pub(super) fn new(
        socket: Socket,
        connection: Arc<Connection>,
        budget: Arc<Budget>,
        tarpit: Arc<Tarpit>,
    ) -> Watched {
        let meter = FrameMeter::new();
        Watched { socket, connection, budget, tarpit, meter, pause: None, peer_ended: false }
    }

    /// Resolves when the connection may be read: its calls have read what the transport holds of it, or the transport holds few
    /// enough unread bytes of all connections.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.connection.unread() > 0 && self.budget.too_much_unread() {
            let pause = self.pause.get_or_insert_with(|| Box::pin(tokio::time::sleep(UNREAD_PAUSE)));
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        Poll::Ready(())
    }

    fn note(&mut self, result: &Poll<io::Result<usize>>) {
        self.connection.note_write(result.is_pending());
        if let Poll::Ready(Ok(sent)) = result {
            self.meter.sent(*sent);
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.connection.misbehaved() {
            self.tarpit.keep(&self.socket);
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let this = &mut *self;
        ready!(this.poll_room(cx));
        let result = Pin::new(&mut this.socket).poll_read(cx, buf);
        let read = &buf.filled()[before..];
        this.peer_ended |= read.is_empty() && matches!(result, Poll::Ready(Ok(())));
        if !read.is_empty() {
            this.connection.note_read(read.len());
            let seen = this.meter.read(read);
            if seen.data_bytes > 0 {
                this.connection.note_data(seen.data_bytes, &this.budget);
            }
            if seen.flood {
                end(&this.connection, "flood");
                this.connection.misbehave();
                // The HTTP/2 layer keeps processing input while more arrives, so it must not get these bytes.
                buf.set_filled(before);
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
        }
        result
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.note(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.note(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    /// The HTTP/2 layer shuts a connection down when either side wanted its end, or when the peer broke the protocol. In the
    /// last case the peer has been told (GOAWAY), and the socket goes to the tarpit.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.peer_ended || self.connection.close.is_cancelled() {
            return Pin::new(&mut self.socket).poll_shutdown(cx);
        }
        self.connection.misbehave();
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;
    use tokio_util::either::Either;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::backend::ClientKey;

    /// Whether a read of a socket that has bytes would wait.
    async fn waits(watched: &mut Watched) -> bool {
        let mut bytes = [0];
        let mut buffer = ReadBuf::new(&mut bytes);
        poll_fn(|cx| Poll::Ready(Pin::new(&mut *watched).poll_read(cx, &mut buffer).is_pending())).await
    }

    #[tokio::test]
    async fn a_connection_with_unread_messages_is_not_read_while_the_transport_is_full() {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(&[0; 100]).await.unwrap();
        far.readable().await.unwrap();
        let budget = Budget::new(1 << 20, 1 << 10);
        let connection = Connection::new(ClientKey(0), Arc::default(), CancellationToken::new());
        let socket = Either::Left(Either::Right(far));
        let tarpit = Arc::new(Tarpit::new(0));
        let mut watched = Watched::new(socket, Arc::clone(&connection), Arc::clone(&budget), tarpit);
        let full = budget.unread_limit() as i64 + 1;
        budget.add_unread(full);
        assert!(!waits(&mut watched).await, "it has no unread messages");
        connection.body_begins();
        connection.note_data(1, &budget);
        assert!(waits(&mut watched).await);
        budget.add_unread(-full);
        assert_eq!(watched.read(&mut [0; 8]).await.unwrap(), 8, "it is read again once there is room");
        budget.add_unread(full);
        assert!(waits(&mut watched).await);
        connection.note_taken(1, &budget);
        assert_eq!(watched.read(&mut [0; 8]).await.unwrap(), 8, "and once its calls have read its messages");
    }
}
