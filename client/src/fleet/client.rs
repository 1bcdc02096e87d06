//! Calls to several services used as one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tonic::Status;

use super::attempt::{Attempt, attempt};
use super::config::{FleetConfig, FleetError};
use super::shared::{Shared, TicketGuard};
use super::{Choice, Ended, State, watch};
use crate::MAX_TIMEOUT;
use expertd_proto::v1::{ForwardRequest, ForwardResponse, GetModelResponse};

/// Attempts count as this much of the time in which a call looks for a service, so that a service that always fails is not tried for ever.
const SHORT_ATTEMPT: Duration = Duration::from_secs(1);

/// A client of several services. Clones share its connections; the last one to be dropped ends them.
#[derive(Clone, Debug)]
pub struct FleetClient {
    shared: Arc<Shared>,
    _addresses: Arc<AbortOnDrop>,
}

#[derive(Debug)]
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl FleetClient {
    /// Looks up and connects to `addresses`, a list separated by commas, and waits up to `config.connect_patience` until one
    /// service serves. It must be called within a Tokio runtime.
    ///
    /// # Errors
    /// [`FleetError`] if there is no address, or no service serves in time.
    pub async fn connect(addresses: &str, config: FleetConfig) -> Result<FleetClient, FleetError> {
        let given: Vec<String> =
            addresses.split(',').map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned).collect();
        if given.is_empty() {
            return Err(FleetError::NoAddress);
        }
        #[cfg(feature = "network")]
        if let Some(network) = &config.network {
            crate::network::check(&given, network).map_err(|error| FleetError::Network(error.to_string()))?;
        }
        let shared = Arc::new(Shared::new(config));
        let task = tokio::spawn(watch::follow_addresses(Arc::downgrade(&shared), given));
        let client = FleetClient { shared, _addresses: Arc::new(AbortOnDrop(task)) };
        client.until_one_serves().await?;
        Ok(client)
    }

    async fn until_one_serves(&self) -> Result<(), FleetError> {
        let patience = self.shared.config.connect_patience;
        if self.shared.wait_until(patience, |fleet| fleet.content().is_some()).await {
            Ok(())
        } else {
            Err(FleetError::NoneServes(self.shared.troubles()))
        }
    }

    /// The model, with the layers of all known services that hold the present weights. Each limit is the smallest of all
    /// services; the placement is taken from one service.
    ///
    /// # Errors
    /// UNAVAILABLE if no service has said yet what it holds.
    pub fn model(&self) -> Result<GetModelResponse, Status> {
        let merged = self.shared.merged_model();
        merged.ok_or_else(|| Status::unavailable("no service has said yet what it holds"))
    }

    /// The model once every service that is known has said what it holds, or `patience` is over.
    ///
    /// # Errors
    /// UNAVAILABLE if no service has said it by then.
    pub async fn complete_model(&self, patience: Duration) -> Result<GetModelResponse, Status> {
        // If some services never answer, the model has the layers of the others.
        let _ = self.shared.wait_until(patience, |fleet| !fleet.any_unknown()).await;
        self.model()
    }

    /// Addresses of the known services, with the state of each and its rows in flight.
    #[must_use]
    pub fn services(&self) -> Vec<(String, State, u64)> {
        self.shared.services()
    }

    /// Sends one token batch through one layer, on a service that holds the layer. `timeout` bounds the whole call; without
    /// one, the call looks for a service for [`FleetConfig::patience`].
    ///
    /// # Errors
    /// The status of the last attempt that no other service could make up for; UNAVAILABLE if no service could take the
    /// request in time; NOT_FOUND if none has the layer.
    pub async fn forward(
        &self,
        request: ForwardRequest,
        timeout: Option<Duration>,
    ) -> Result<ForwardResponse, Status> {
        let start = Instant::now();
        let timeout = timeout.map(|timeout| timeout.min(MAX_TIMEOUT));
        let mut give_up = start + timeout.unwrap_or(self.shared.config.patience.min(MAX_TIMEOUT));
        let mut last = None;
        loop {
            let mut events = self.shared.subscribe();
            let (choice, link) = self.shared.choose(request.layer, u64::from(request.tokens));
            match (choice, link) {
                (Choice::NoSuchLayer, _) => {
                    let text = format!("no service holds layer {} with an MoE block", request.layer);
                    return Err(Status::not_found(text));
                }
                (Choice::Take(ticket), Some(link)) => {
                    let guard = TicketGuard::new(&self.shared, ticket);
                    let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
                    let begun = Instant::now();
                    match attempt(guard, link, request.clone(), left).await {
                        Attempt::Done(result) => return result.map(|response| *response),
                        Attempt::Elsewhere(status) => last = Some(status),
                    }
                    if timeout.is_none() {
                        // A call that was under way for long did not look for a service meanwhile.
                        give_up += begun.elapsed().saturating_sub(SHORT_ATTEMPT);
                    }
                    if Instant::now() >= give_up {
                        return Err(self.out_of_time(request.layer, last));
                    }
                }
                (Choice::Take(ticket), None) => self.shared.ended(ticket, Ended::Lost),
                (Choice::Wait { until }, _) => {
                    let until = until.map_or(give_up, |until| give_up.min(self.shared.instant(until)));
                    let woken = tokio::time::timeout_at(until.into(), events.changed()).await.is_ok();
                    if !woken && Instant::now() >= give_up {
                        return Err(self.out_of_time(request.layer, last));
                    }
                }
            }
        }
    }

    fn out_of_time(&self, layer: u32, last: Option<Status>) -> Status {
        last.unwrap_or_else(|| {
            let troubles = self.shared.troubles();
            Status::unavailable(format!(
                "no service that holds layer {layer} could take the request in time: {troubles}"
            ))
        })
    }
}
