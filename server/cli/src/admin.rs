//! Connection of `status` and `drain` to the Admin service.

use clap::Args;
use expertd_proto::transport;
use expertd_proto::v1::admin_client::AdminClient;
use tonic::transport::Channel;

use super::client::ClientError;

/// Default address of Admin.
pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:50052";

/// Address of a service's Admin.
#[derive(Args, Clone, Debug)]
pub struct AdminAddress {
    /// The service's admin address: HOST:PORT or unix:PATH (`serve --admin-listen`)
    #[arg(long = "admin", value_name = "ADDR", default_value = DEFAULT_ADMIN_ADDRESS, env = "EXPERTD_ADMIN_LISTEN")]
    pub address: String,
}

impl AdminAddress {
    /// Connects to Admin.
    ///
    /// # Errors
    /// If the address is malformed or the connection fails.
    pub async fn connect(&self) -> Result<AdminClient<Channel>, ClientError> {
        Ok(AdminClient::new(transport::connect(&self.address).await?))
    }
}

/// Wraps the status of an Admin call, with a hint if the address does not serve Admin.
pub(super) fn call_error(call: &str, address: &str, status: tonic::Status) -> ClientError {
    if status.code() == tonic::Code::Unimplemented {
        let text = format!(
            "{address} does not serve Admin; use the service's admin address (`serve --admin-listen`, default {DEFAULT_ADMIN_ADDRESS})"
        );
        return ClientError::call(call, tonic::Status::unimplemented(text));
    }
    ClientError::call(call, status)
}
