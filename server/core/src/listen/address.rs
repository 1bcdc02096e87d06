//! Addresses: TCP and Unix-domain sockets.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

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
    pub fn is_beyond_loopback(&self) -> bool {
        matches!(self, Address::Tcp(address) if !address.ip().is_loopback())
    }
}

/// Why an address could not be bound.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum BindError {
    #[error("cannot listen on {address}: {source}{}", hint(address, source))]
    System { address: Address, source: io::Error },
    #[error("cannot listen on unix:{}: another process listens on it: stop that process, or choose another path", path.display())]
    InUse { path: PathBuf },
    #[error("cannot listen on unix:{}: the path exists and is not a socket; move it or choose another path", path.display())]
    NotASocket { path: PathBuf },
}

impl BindError {
    /// Whether another process listens on the address.
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
        (io::ErrorKind::AddrNotAvailable, _) => "; this host has no such address",
        (io::ErrorKind::PermissionDenied, Address::Tcp(_)) => "; ports below 1024 need privileges",
        (io::ErrorKind::NotFound, Address::Unix(_)) => "; its directory does not exist",
        _ => "",
    }
}

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
}
