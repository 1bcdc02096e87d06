//! Connections, and the HTTP/2 settings that the service, the echo and both clients have in common.

use std::time::Duration;

use expertd_proto::v1::moe_client::MoeClient;
use tonic::transport::{Channel, Endpoint};

use crate::Error;

/// A client on its own connection.
pub type Client = MoeClient<Channel>;

/// HTTP/2 flow-control window of a stream.
pub const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// HTTP/2 flow-control window of a connection.
pub const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Largest HTTP/2 frame.
pub const FRAME_BYTES: u32 = 256 << 10;

/// Connects to `HOST:PORT` or `unix:PATH`; messages of up to `message_bytes` pass.
///
/// # Errors
/// If the address is malformed or nothing answers.
pub async fn connect(address: &str, message_bytes: usize) -> Result<Client, Error> {
    let failed = |error: tonic::transport::Error| Error::Connect {
        address: address.to_owned(),
        reason: std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
    };
    let uri = if address.starts_with("unix:") || address.contains("://") {
        address.to_owned()
    } else {
        format!("http://{address}")
    };
    let channel = Endpoint::from_shared(uri)
        .map_err(failed)?
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .connect()
        .await
        .map_err(failed)?;
    Ok(MoeClient::new(channel)
        .max_decoding_message_size(message_bytes)
        .max_encoding_message_size(message_bytes))
}
