//! Connections to one service, or to several used as one.

use std::sync::Arc;
use std::time::Duration;

use expertd_client::fleet::{FleetClient, FleetConfig};
use expertd_client::session::{self, SessionClient};
use expertd_client::transport::{self, Channel, Credentials};
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::{ForwardRequest, ForwardResponse, GetModelRequest, GetModelResponse};
use tonic::{Request, Status};

use crate::Error;

/// A client on its own connections.
#[derive(Clone, Debug)]
pub enum Client {
    /// Of one service.
    One(MoeClient<Channel>),
    /// Of several services.
    Several(FleetClient),
    /// Of a service on this host, through a session.
    Session(Arc<SessionClient>),
}

/// How long a call through a session may take that has no deadline.
const SESSION_TIMEOUT: Duration = Duration::from_secs(60);

/// Connects to `HOST:PORT` or `unix:/PATH` for messages of up to `message_bytes` bytes, or to several services whose
/// addresses are separated by commas.
///
/// # Errors
/// If an address is malformed, a file with credentials cannot be used, or no service can be reached.
pub async fn connect(
    address: &str,
    credentials: &Credentials,
    message_bytes: usize,
) -> Result<Client, Error> {
    if is_several(address) {
        let config = FleetConfig { credentials: credentials.clone(), ..FleetConfig::default() };
        return Ok(Client::Several(FleetClient::connect(address, config).await?));
    }
    let moe = MoeClient::new(transport::connect_with(address, credentials).await?);
    Ok(Client::One(moe.max_decoding_message_size(message_bytes).max_encoding_message_size(message_bytes)))
}

/// Whether an address is a list.
#[must_use]
pub fn is_several(address: &str) -> bool {
    address.contains(',')
}

impl Client {
    /// Sends one token batch.
    ///
    /// # Errors
    /// The status that the call ended with.
    pub async fn forward(
        &mut self,
        request: ForwardRequest,
        deadline: Option<Duration>,
    ) -> Result<ForwardResponse, Status> {
        match self {
            Client::One(moe) => {
                let mut request = Request::new(request);
                if let Some(deadline) = deadline {
                    request.set_timeout(deadline);
                }
                Ok(moe.forward(request).await?.into_inner())
            }
            Client::Several(fleet) => fleet.forward(request, deadline).await,
            Client::Session(client) => {
                let client = Arc::clone(client);
                let timeout = deadline.unwrap_or(SESSION_TIMEOUT);
                let call = tokio::task::spawn_blocking(move || client.forward(&request, timeout));
                let answer = call.await.map_err(|error| Status::internal(error.to_string()))?;
                answer.map_err(session::status)
            }
        }
    }

    /// The served model.
    ///
    /// # Errors
    /// The status of `GetModel`.
    pub async fn model(&mut self, name: &str) -> Result<GetModelResponse, Status> {
        match self {
            Client::One(moe) => {
                let request = GetModelRequest { name: name.to_owned() };
                Ok(moe.get_model(request).await?.into_inner())
            }
            Client::Several(fleet) => fleet.complete_model(Duration::from_secs(5)).await,
            Client::Session(client) => Ok(client.model().clone()),
        }
    }
}
