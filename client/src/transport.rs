//! The one place that builds channels, with the settings of [`expertd_proto::transport`].

use expertd_proto::transport::{
    CONNECT_TIMEOUT, CONNECTION_WINDOW_BYTES, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_FRAME_BYTES,
    STREAM_WINDOW_BYTES,
};
use tonic::transport::{Endpoint, Uri};

mod apart;
mod channel;
mod credentials;

pub(crate) use apart::RowsApart;
pub use channel::Channel;
pub use credentials::Credentials;
#[cfg(feature = "network")]
pub(crate) use credentials::is_beyond_loopback;

/// An error that prevents a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address does not parse.
    #[error("{address:?} is not an address ({reason}); use HOST:PORT, http://HOST:PORT or unix:/PATH")]
    Address {
        /// The given address.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file with credentials cannot be used.
    #[error("{file}: {reason}")]
    Credentials {
        /// The file.
        file: String,
        /// What was found and what is expected.
        reason: String,
    },
    /// The address cannot be reached.
    #[error("cannot connect to {address}: {reason}; {}", advice(reason))]
    Unreachable {
        /// The given address.
        address: String,
        /// The chain of causes.
        reason: String,
    },
}

/// The endpoint for `HOST:PORT`, `http://HOST:PORT` or `unix:/PATH` with the transport settings of both ends.
///
/// # Errors
/// [`ConnectError::Address`] if the address has none of these forms.
pub fn endpoint(address: &str) -> Result<Endpoint, ConnectError> {
    let bad = |reason: String| ConnectError::Address { address: address.to_owned(), reason };
    let uri = if address.starts_with("unix:") || address.contains("://") {
        address.to_owned()
    } else {
        format!("http://{address}")
    };
    if uri == "unix:" || uri == "unix://" {
        return Err(bad("the path is missing".to_owned()));
    }
    require_port(address)?;
    let endpoint = Endpoint::from_shared(uri).map_err(|error| bad(chain(&error)))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_adaptive_window(false)
        .max_frame_size(MAX_FRAME_BYTES)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// Refuses a host without a port, which would mean port 80. An address with a scheme may leave the scheme's own port out.
fn require_port(address: &str) -> Result<(), ConnectError> {
    let lacks_port = |uri: &Uri| uri.host().is_some() && uri.port().is_none();
    if address.starts_with("unix:")
        || address.contains("://")
        || !address.parse().is_ok_and(|uri| lacks_port(&uri))
    {
        return Ok(());
    }
    Err(ConnectError::Address { address: address.to_owned(), reason: "the port is missing".to_owned() })
}

/// Connects to `HOST:PORT`, `http://HOST:PORT` or `unix:/PATH`, in plaintext and without credentials.
///
/// # Errors
/// [`ConnectError`] if the address does not parse or cannot be reached.
pub async fn connect(address: &str) -> Result<Channel, ConnectError> {
    connect_with(address, &Credentials::default()).await
}

/// Connects with TLS and credentials as `credentials` say; Unix-domain sockets are never encrypted.
///
/// # Errors
/// [`ConnectError`] if the address does not parse, a file cannot be used or nothing answers there.
pub async fn connect_with(address: &str, credentials: &Credentials) -> Result<Channel, ConnectError> {
    let endpoint = credentials.apply(address)?;
    let authorization = credentials.authorization(address)?;
    let channel = endpoint
        .connect()
        .await
        .map_err(|error| ConnectError::Unreachable { address: address.to_owned(), reason: chain(&error) })?;
    Ok(Channel::new(channel, authorization))
}

/// What to do about a connection that failed for this reason.
fn advice(reason: &str) -> &'static str {
    if reason.contains("not valid for name") {
        return "the service answers, and its certificate has other names: pass one of them (--tls-server-name NAME; in Python \
                Credentials(server_name=…))";
    }
    if reason.contains("UnknownIssuer") || reason.contains("BadSignature") {
        return "the service answers, but another authority has signed its certificate: pass the file of that one (--tls-ca; in Python \
                Credentials(ca=…))";
    }
    "is `expertd serve` running there?"
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
