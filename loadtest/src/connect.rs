//! Connections.

use expertd_proto::transport::{self, Channel, Credentials};
use expertd_proto::v1::moe_client::MoeClient;

use crate::Error;

/// A client on its own connection.
pub type Client = MoeClient<Channel>;

/// Connects to `HOST:PORT` or `unix:/PATH`, for messages of up to `message_bytes` bytes.
///
/// # Errors
/// If the address is malformed, a file with credentials cannot be used, or cannot be reached.
pub async fn connect(
    address: &str,
    credentials: &Credentials,
    message_bytes: usize,
) -> Result<Client, Error> {
    Ok(MoeClient::new(transport::connect_with(address, credentials).await?)
        .max_decoding_message_size(message_bytes)
        .max_encoding_message_size(message_bytes))
}
