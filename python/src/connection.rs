//! gRPC connections: to one service, or to several that are used as one.

use std::time::{Duration, Instant};

use expertd_client::fleet::{FleetClient, FleetConfig};
use expertd_client::network::NetworkOptions;
use expertd_client::transport::Credentials;
use expertd_client::{Client, RetryPolicy};
use expertd_proto::v1::{ForwardRequest, GetModelResponse};
use tokio::sync::OnceCell;
use tonic::Status;
use tonic_types::StatusExt as _;

use crate::errors::CallError;
use crate::model::{Model, ModelSummary};
use crate::receipt::Received;
use crate::request::Call;

/// Time for which a question about the model waits until every service has said what it holds.
const COMPLETE_MODEL: Duration = Duration::from_secs(5);

/// Whether a call that expects a fingerprint may have failed only because the weights got a new version while it waited, which
/// another placement of the same weights also gets. A second attempt shows it.
pub(crate) fn may_be_other_placement(message: &ForwardRequest, status: &Status) -> bool {
    let is_other =
        || status.get_details_error_info().is_some_and(|info| info.reason == "WEIGHT_VERSION_MISMATCH");
    !message.expected_weight_fingerprint.is_empty() && message.expected_weight_version.is_none() && is_other()
}

/// The result of `future`, DEADLINE_EXCEEDED if it has none within `timeout`.
pub(crate) async fn within<T>(
    timeout: Option<Duration>,
    future: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    let Some(timeout) = timeout else { return future.await };
    let over = |_| Err(Status::deadline_exceeded(format!("no answer within {timeout:?}")).into());
    tokio::time::timeout(timeout, future).await.unwrap_or_else(over)
}

/// Addresses, and the connection to them after the first call.
#[derive(Debug)]
pub(crate) struct Connection {
    addresses: Vec<String>,
    several: bool,
    /// Rows travel through network sessions with each of several services.
    is_network: bool,
    credentials: Credentials,
    retry: Option<RetryPolicy>,
    link: OnceCell<Link>,
}

/// An open connection.
#[derive(Debug)]
pub(crate) enum Link {
    One(Box<Client>),
    Several(FleetClient),
}

impl Connection {
    /// `several` makes one client of all addresses. Otherwise that happens if the only address is a name with several
    /// addresses.
    pub(crate) fn new(
        addresses: Vec<String>,
        several: bool,
        credentials: Credentials,
        retry: Option<RetryPolicy>,
    ) -> Connection {
        Connection { addresses, several, is_network: false, credentials, retry, link: OnceCell::new() }
    }

    /// The same with a network session with each of several services.
    pub(crate) fn over_network(self, is_network: bool) -> Connection {
        Connection { is_network, ..self }
    }

    /// Connects, if that has not happened yet.
    pub(crate) async fn connect(&self) -> Result<(), CallError> {
        self.link().await.map(drop)
    }

    /// The open connection; the first call connects.
    pub(crate) async fn link(&self) -> Result<&Link, CallError> {
        self.link.get_or_try_init(|| self.open()).await
    }

    async fn open(&self) -> Result<Link, CallError> {
        if self.several || self.names_several().await {
            let mut config = FleetConfig { credentials: self.credentials.clone(), ..FleetConfig::default() };
            if self.is_network {
                let credentials = self.credentials.clone();
                config.network = Some(NetworkOptions { credentials, ..NetworkOptions::default() });
            }
            if let Some(policy) = self.retry {
                config.patience = policy.max_elapsed;
                config.connect_patience = config.connect_patience.min(policy.max_elapsed);
            }
            let client = FleetClient::connect(&self.addresses.join(","), config).await;
            return client.map(Link::Several).map_err(|error| CallError::Connect(error.to_string()));
        }
        let client = Client::connect_with(&self.addresses.concat(), &self.credentials).await?;
        Ok(Link::One(Box::new(match self.retry {
            Some(policy) => client.with_retry(policy),
            None => client,
        })))
    }

    /// Whether the only address is a name of several hosts. The two loopback addresses are one host.
    async fn names_several(&self) -> bool {
        let [address] = self.addresses.as_slice() else { return true };
        if address.starts_with("unix:") {
            return false;
        }
        let host = address.split_once("://").map_or(address.as_str(), |(_, host)| host);
        // An address that cannot be looked up fails when it is connected to, with an error that names it.
        let Ok(found) = tokio::net::lookup_host(host).await else { return false };
        let mut hosts: Vec<_> = found.map(|at| at.ip()).filter(|ip| !ip.is_loopback()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts.len() > 1
    }

    /// Makes a call. Its timeout bounds connecting as well.
    pub(crate) async fn forward(&self, call: Call) -> Result<Received, CallError> {
        let start = Instant::now();
        let link = within(call.timeout, self.link()).await?;
        let send = |message| async move {
            let left = call.timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            match link {
                Link::One(client) => client.forward(message, left).await,
                Link::Several(fleet) => fleet.forward(message, left).await,
            }
        };
        let mut result = send(call.message.clone()).await;
        if let Err(status) = &result
            && may_be_other_placement(&call.message, status)
        {
            result = send(call.message).await;
        }
        call.shape.read_answer(result?)
    }

    /// Dimensions, layers, limits and versions; several services' layers together.
    pub(crate) async fn model(&self, name: &str) -> Result<GetModelResponse, CallError> {
        match self.link().await? {
            Link::One(client) => Ok(client.model(name).await?),
            Link::Several(fleet) => {
                let model = fleet.complete_model(COMPLETE_MODEL).await?;
                if !name.is_empty() && name != model.name {
                    let text = format!("the services have no model {name:?}; they serve {:?}", model.name);
                    return Err(Status::not_found(text).into());
                }
                Ok(model)
            }
        }
    }

    pub(crate) async fn models(&self) -> Result<Vec<ModelSummary>, CallError> {
        match self.link().await? {
            Link::One(client) => Ok(client.models().await?.into_iter().map(ModelSummary::from).collect()),
            Link::Several(_) => Ok(vec![Model::from(self.model("").await?).into()]),
        }
    }

    pub(crate) const fn retry(&self) -> Option<&RetryPolicy> {
        self.retry.as_ref()
    }
}
