//! Listeners of gRPC: TCP and Unix-domain sockets.

use std::io;

use expertd_core::listen::{Address, BindError, UnixSocket};
use expertd_ipc::passing::allow_passed_descriptors;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use super::passed::Receiving;
use super::places::Origin;

/// A bound listener. Dropping it removes a Unix-domain socket's file.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixSocket),
}

impl Listener {
    /// Binds an address. A Unix-domain socket gets `mode`.
    pub(crate) async fn bind(address: &Address, mode: u32) -> Result<Listener, BindError> {
        let failed = |source| BindError::System { address: address.clone(), source };
        match address {
            Address::Tcp(socket) => TcpListener::bind(socket).await.map(Listener::Tcp).map_err(failed),
            Address::Unix(path) => UnixSocket::bind(path, mode).map(Listener::Unix),
        }
    }

    /// The bound address, with the port that the system chose.
    pub(crate) fn address(&self) -> io::Result<Address> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Address::Tcp),
            Listener::Unix(socket) => Ok(Address::Unix(socket.path().to_owned())),
        }
    }

    /// Makes the kernel refuse descriptors that peers pass over a Unix-domain socket.
    pub(crate) fn deny_passed_descriptors(&self) {
        if let Listener::Unix(socket) = self
            && let Err(error) = allow_passed_descriptors(socket.listener(), false)
        {
            tracing::debug!(%error, "this kernel lets clients of a socket pass descriptors");
        }
    }

    /// Accepts the next connection and determines its origin.
    pub(crate) async fn accept(&mut self) -> io::Result<(PlainSocket, Origin)> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                // Fails if the peer is already gone, which the first read reports.
                let _ = stream.set_nodelay(true);
                Ok((Either::Left(stream), Origin::address(peer.ip())))
            }
            Listener::Unix(socket) => {
                let (stream, user) = socket.accept().await?;
                Ok((Either::Right(stream), Origin::User(user)))
            }
        }
    }
}

/// An accepted connection.
pub(crate) type PlainSocket = Either<TcpStream, UnixStream>;

/// An accepted connection after the TLS handshake, if TLS is configured.
pub(crate) type Socket = Either<Either<TcpStream, Receiving>, Box<TlsStream<TcpStream>>>;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn a_taken_port_says_the_way_out() {
        let first = Listener::bind(&"127.0.0.1:0".parse().unwrap(), 0).await.unwrap();
        let error = Listener::bind(&first.address().unwrap(), 0).await.err().unwrap().to_string();
        assert!(error.contains("choose another port"), "{error}");
    }
}
