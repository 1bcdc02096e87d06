//! Addresses and listeners: TCP and Unix-domain sockets.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use expertd_ipc::passing::allow_passed_descriptors;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use super::passed::Receiving;
use super::places::Origin;
use super::unix::UnixSocket;

/// An address to listen on: `HOST:PORT` (numeric host, port 0 picks a free one) or `unix:/PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix-domain socket.
    Unix(PathBuf),
}

/// An address that does not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given:?} is not an address to listen on: {reason}; use 127.0.0.1:50051, [::1]:50051 or unix:/run/expertd.sock"
)]
pub struct AddressError {
    given: String,
    reason: String,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        let bad = |reason: String| AddressError { given: text.to_owned(), reason };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(bad("the path is missing".to_owned()));
            }
            // sun_path holds 108 bytes with the terminating zero.
            if path.len() > 107 {
                return Err(bad(format!(
                    "the path has {} bytes; the path of a socket has at most 107",
                    path.len()
                )));
            }
            // Several leading slashes are one, so that no path looks like the host of a URL.
            let relative = path.trim_start_matches('/');
            let path = if relative.len() == path.len() { path.to_owned() } else { format!("/{relative}") };
            return Ok(Address::Unix(PathBuf::from(path)));
        }
        let numeric = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
        numeric.as_deref().unwrap_or(text).parse().map(Address::Tcp).map_err(|error| bad(format!("{error}")))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Whether hosts other than this one can reach it.
    #[must_use]
    pub fn is_beyond_loopback(&self) -> bool {
        matches!(self, Address::Tcp(address) if !address.ip().is_loopback())
    }
}

/// Why an address could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The system call failed.
    #[error("cannot listen on {address}: {source}{}", hint(address, source))]
    System {
        /// The address.
        address: Address,
        /// Error of the system call.
        source: io::Error,
    },
    /// Another process listens on the socket.
    #[error("cannot listen on unix:{}: another process listens on it: stop that process, or choose another path", path.display())]
    InUse {
        /// The socket's path.
        path: PathBuf,
    },
    /// The path is not a socket.
    #[error("cannot listen on unix:{}: the path is a file and not a socket; move it or choose another path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
}

impl BindError {
    /// Whether another process listens on the address.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        match self {
            BindError::System { source, .. } => source.kind() == io::ErrorKind::AddrInUse,
            BindError::InUse { .. } => true,
            BindError::NotASocket { .. } => false,
        }
    }
}

fn hint(address: &Address, error: &io::Error) -> &'static str {
    match (error.kind(), address) {
        (io::ErrorKind::AddrInUse, _) => {
            "; stop the process that uses it, or choose another port (0 picks a free one)"
        }
        (io::ErrorKind::PermissionDenied, Address::Tcp(_)) => "; ports below 1024 need privileges",
        (io::ErrorKind::NotFound, Address::Unix(_)) => "; its directory does not exist",
        _ => "",
    }
}

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
    pub(in crate::api) fn address(&self) -> io::Result<Address> {
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
pub(in crate::api) type Socket = Either<Either<TcpStream, Receiving>, Box<TlsStream<TcpStream>>>;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn addresses_parse_and_print() {
        for text in ["127.0.0.1:50051", "[::1]:0", "unix:/tmp/x.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("localhost:7".parse::<Address>().unwrap().to_string(), "127.0.0.1:7");
        assert_eq!("unix:///tmp/x".parse::<Address>().unwrap(), Address::Unix("/tmp/x".into()));
        let long = format!("unix:/{}", "x".repeat(200));
        for text in ["", "50051", "example.org:1", "unix:", &long] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("use 127.0.0.1:50051"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_taken_port_says_the_way_out() {
        let first = Listener::bind(&"127.0.0.1:0".parse().unwrap(), 0).await.unwrap();
        let error = Listener::bind(&first.address().unwrap(), 0).await.err().unwrap().to_string();
        assert!(error.contains("choose another port"), "{error}");
    }
}
