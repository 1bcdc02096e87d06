//! Addresses and listeners: TCP and Unix-domain sockets.

use std::fmt;
use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use super::table::Origin;
use crate::telemetry::Rarely;

/// Interval of the checks whether the file of a Unix-domain socket still exists.
const FILE_ROUND: Duration = Duration::from_secs(1);

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
            Listener::Unix(socket) => Ok(Address::Unix(socket.file.path.clone())),
        }
    }

    /// Accepts the next connection and determines its origin. Call it at least once a second, so that a Unix-domain socket whose file
    /// was removed is bound again.
    pub(crate) async fn accept(&mut self) -> io::Result<(PlainSocket, Origin)> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                // Fails if the peer is already gone, which the first read reports.
                let _ = stream.set_nodelay(true);
                Ok((Either::Left(stream), Origin::address(peer.ip())))
            }
            Listener::Unix(socket) => {
                socket.check_file();
                let (stream, _) = socket.listener.accept().await?;
                let user = stream.peer_cred()?.uid();
                Ok((Either::Right(stream), Origin::User(user)))
            }
        }
    }
}

/// A bound Unix-domain socket and its file.
pub(crate) struct UnixSocket {
    /// Dropped before the listener, which keeps the file's number from being used again.
    file: SocketFile,
    listener: UnixListener,
    mode: u32,
    next_check: Instant,
    unreachable: Rarely,
}

impl UnixSocket {
    fn bind(path: &Path, mode: u32) -> Result<UnixSocket, BindError> {
        let failed = |source| BindError::System { address: Address::Unix(path.to_owned()), source };
        let listener = match UnixListener::bind(path) {
            Ok(listener) => listener,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                UnixListener::bind(path).map_err(failed)?
            }
            Err(error) => return Err(failed(error)),
        };
        let id = FileId::of(path).map_err(failed)?;
        let file = SocketFile { path: path.to_owned(), id };
        // Before this call the umask decided who may connect; the peer's user is checked in any case.
        std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
        let next_check = Instant::now() + FILE_ROUND;
        Ok(UnixSocket { file, listener, mode, next_check, unreachable: Rarely::default() })
    }

    /// Binds the socket again if its file was removed: without the file no client can connect. A file that something else has put in
    /// its place stays.
    fn check_file(&mut self) {
        if Instant::now() < self.next_check {
            return;
        }
        self.next_check = Instant::now() + FILE_ROUND;
        let path = self.file.path.display().to_string();
        let problem = match FileId::of(&self.file.path) {
            Ok(found) if found == self.file.id => return,
            Ok(_) => {
                "another file is in its place; remove that file, and the socket is bound again".to_owned()
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match UnixSocket::bind(&self.file.path, self.mode) {
                    Ok(again) => {
                        tracing::warn!(path, "the file of a socket was removed; the socket is bound again");
                        *self = again;
                        return;
                    }
                    Err(error) => error.to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        if let Some(times) = self.unreachable.now() {
            tracing::error!(
                path,
                problem,
                times,
                "clients cannot connect to a socket whose file was removed"
            );
        }
    }
}

/// Removes a socket file that an ended process left behind, and nothing else: a refused connection proves that no process
/// listens.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |source| BindError::System { address: Address::Unix(path.to_owned()), source };
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.to_owned() });
    }
    match connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing the socket of an ended process");
            std::fs::remove_file(path).map_err(failed)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(failed(error)),
        _ => Err(BindError::InUse { path: path.to_owned() }),
    }
}

/// Connects without waiting: a stopped process that listens may have no room for another connection, which is an error then.
fn connect(path: &Path) -> io::Result<()> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?)
}

/// Device and inode of a file. While a socket is open, no other file gets those of its file.
#[derive(PartialEq, Eq)]
struct FileId(u64, u64);

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        let metadata = std::fs::symlink_metadata(path)?;
        Ok(FileId(metadata.dev(), metadata.ino()))
    }
}

/// Removes the socket's file on drop if it is still the file that was bound.
struct SocketFile {
    path: PathBuf,
    id: FileId,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = FileId::of(&self.path).is_ok_and(|found| found == self.id);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "the socket file could not be removed");
        }
    }
}

/// An accepted connection.
pub(crate) type PlainSocket = Either<TcpStream, UnixStream>;

/// An accepted connection after the TLS handshake, if TLS is configured.
pub(in crate::api) type Socket = Either<PlainSocket, Box<TlsStream<TcpStream>>>;

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
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.sock");
        let address = Address::Unix(path.clone());

        // A killed process leaves its file behind.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let live = Listener::bind(&address, 0o600).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

        assert!(matches!(Listener::bind(&address, 0o600).await, Err(BindError::InUse { .. })));
        drop(live);
        assert!(!path.exists(), "dropping the listener removes its file");

        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&address, 0o600).await, Err(BindError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test]
    async fn a_socket_of_another_owner_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.sock");
        let ours = Listener::bind(&Address::Unix(path.clone()), 0o600).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let _theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(ours);
        assert!(path.exists());
    }

    /// Tries to connect until a connection is accepted, and returns whether that happened within the time of several checks.
    async fn is_reachable(listener: &mut Listener, path: &Path) -> bool {
        let deadline = Instant::now() + 8 * FILE_ROUND;
        while Instant::now() < deadline {
            let client = std::os::unix::net::UnixStream::connect(path);
            let accepted = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await;
            if client.is_ok() && matches!(accepted, Ok(Ok(_))) {
                return true;
            }
        }
        false
    }

    #[tokio::test]
    async fn a_socket_whose_file_was_removed_is_bound_again_and_one_of_another_owner_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.sock");
        let mut ours = Listener::bind(&Address::Unix(path.clone()), 0o600).await.unwrap();
        let before = FileId::of(&path).unwrap();
        tokio::time::sleep(2 * FILE_ROUND).await;
        assert!(is_reachable(&mut ours, &path).await);
        assert!(FileId::of(&path).unwrap() == before, "a file that is there stays");
        std::fs::remove_file(&path).unwrap();
        assert!(is_reachable(&mut ours, &path).await);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

        std::fs::remove_file(&path).unwrap();
        let theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(!is_reachable(&mut ours, &path).await, "another process has taken the path");
        drop(theirs);
        std::fs::remove_file(&path).unwrap();
        assert!(is_reachable(&mut ours, &path).await);
        drop(ours);
        assert!(!path.exists());
    }

    /// A stopped process accepts nothing: its socket has no room for further connections and is in use all the same.
    #[tokio::test]
    async fn a_full_socket_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.sock");
        let full = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let address = Address::Unix(path.clone());
        let bound = tokio::task::spawn(async move { Listener::bind(&address, 0o600).await.err() });
        let error = tokio::time::timeout(Duration::from_secs(20), bound).await.expect("no wait").unwrap();
        assert!(matches!(error, Some(BindError::InUse { .. })), "{error:?}");
    }

    #[tokio::test]
    async fn a_taken_port_says_the_way_out() {
        let first = Listener::bind(&"127.0.0.1:0".parse().unwrap(), 0).await.unwrap();
        let error = Listener::bind(&first.address().unwrap(), 0).await.err().unwrap().to_string();
        assert!(error.contains("choose another port"), "{error}");
    }
}
