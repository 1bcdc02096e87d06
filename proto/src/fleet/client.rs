//! Calls to several services used as one.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::{
    Choice, Draws, Ended, Facts, Fleet, Limits, ServiceId, State, Ticket, receipt_has_content,
    watch as watching,
};
use crate::client::send_once;
use crate::loss::is_connection_loss;
use crate::transport::{Channel, Credentials};
use crate::v1::moe_client::MoeClient;
use crate::v1::{ForwardRequest, ForwardResponse, GetModelResponse};
use crate::{connection_loss, retry_delay};

/// How several services are found and watched.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// TLS and tokens, the same for all services.
    pub credentials: Credentials,
    /// Name of the model; may be empty if every service has only one.
    pub model: String,
    /// Interval between probes of a service's health.
    pub probe_interval: Duration,
    /// Time limit of a probe. A service that misses one is avoided, one that misses two in a row is lost. Connecting has
    /// twice this time.
    pub probe_timeout: Duration,
    /// Interval between look-ups of host names.
    pub lookup_interval: Duration,
    /// Time for which connecting waits until a service serves.
    pub connect_patience: Duration,
    /// Time for which a call without a deadline looks for a service.
    pub patience: Duration,
    /// Limits of the choice.
    pub limits: Limits,
}

impl Default for FleetConfig {
    fn default() -> FleetConfig {
        FleetConfig {
            credentials: Credentials::default(),
            model: String::new(),
            probe_interval: Duration::from_millis(500),
            probe_timeout: Duration::from_millis(750),
            lookup_interval: Duration::from_secs(5),
            connect_patience: Duration::from_secs(30),
            patience: Duration::from_secs(30),
            limits: Limits::default(),
        }
    }
}

/// An error that prevents a client of several services from being created.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// The list of addresses is empty.
    #[error(
        "no address was given; give HOST:PORT, several separated by commas, or a name with several addresses"
    )]
    NoAddress,
    /// No service answered in time.
    #[error("none of the services serves: {0}")]
    NoneServes(String),
}

/// A connection to one service.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) moe: MoeClient<Channel>,
    /// Becomes true when the service counts as lost.
    pub(super) lost: watch::Receiver<bool>,
    /// Wakes the task that probes it.
    pub(super) woken: Arc<Notify>,
    pub(super) address: String,
    /// What it said about its model, once it was asked.
    pub(super) model: Option<Arc<GetModelResponse>>,
}

/// What calls and background tasks share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: FleetConfig,
    start: Instant,
    inner: Mutex<Inner>,
    /// Counts events after which a waiting request may find a service.
    events: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    fleet: Fleet,
    links: BTreeMap<ServiceId, Link>,
    /// Last trouble with each address.
    troubles: BTreeMap<String, String>,
    draws: Draws,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every change to the data is complete before anything in it can panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn event(&self) {
        self.events.send_modify(|count| *count += 1);
    }

    pub(super) fn add(&self) -> ServiceId {
        self.lock().fleet.add()
    }

    pub(super) fn remove(&self, id: ServiceId) {
        let mut inner = self.lock();
        inner.links.remove(&id);
        inner.fleet.remove(id, self.now());
        drop(inner);
        self.event();
    }

    pub(super) fn note(&self, address: &str, trouble: &str) {
        if !trouble.is_empty() {
            self.lock().troubles.insert(address.to_owned(), trouble.to_owned());
        }
    }

    pub(super) fn state(&self, id: ServiceId) -> Option<State> {
        self.lock().fleet.state(id)
    }

    pub(super) fn has_content(&self, id: ServiceId) -> bool {
        self.lock().fleet.has_content(id)
    }

    pub(super) fn connected(&self, id: ServiceId, link: Link) {
        let mut inner = self.lock();
        inner.fleet.connected(id);
        inner.links.insert(id, link);
    }

    pub(super) fn learned(&self, id: ServiceId, facts: Facts, link: Link) {
        let mut inner = self.lock();
        inner.links.insert(id, link);
        inner.fleet.learned(id, facts, self.now());
        drop(inner);
        self.event();
    }

    pub(super) fn observed(&self, id: ServiceId, state: State) {
        let mut inner = self.lock();
        let before = (inner.fleet.state(id), inner.fleet.switches());
        inner.fleet.observed(id, state, self.now());
        let changed = before != (inner.fleet.state(id), inner.fleet.switches());
        drop(inner);
        if changed {
            self.event();
        }
    }

    fn choose(&self, layer: u32, rows: u64) -> (Choice, Option<Link>) {
        let mut inner = self.lock();
        let draw = inner.draws.next();
        let choice = inner.fleet.choose(layer, rows, draw, self.now());
        let link = match &choice {
            Choice::Take(ticket) => inner.links.get(&ticket.service).cloned(),
            Choice::Wait { .. } | Choice::NoSuchLayer => None,
        };
        (choice, link)
    }

    fn ended(&self, ticket: Ticket, how: Ended) {
        let mut inner = self.lock();
        if matches!(how, Ended::Lost | Ended::NotServing | Ended::Changed)
            && let Some(link) = inner.links.get(&ticket.service)
        {
            link.woken.notify_one();
        }
        inner.fleet.ended(ticket, how, self.now());
        drop(inner);
        if !matches!(how, Ended::Final) {
            self.event();
        }
    }

    /// The last trouble with each address, for messages.
    fn troubles(&self) -> String {
        let inner = self.lock();
        if inner.troubles.is_empty() {
            return "no service has answered yet".to_owned();
        }
        inner.troubles.iter().map(|(at, why)| format!("{at}: {why}")).collect::<Vec<_>>().join("; ")
    }
}

/// A ticket that comes back when its call is dropped.
struct Held<'a> {
    shared: &'a Shared,
    ticket: Option<Ticket>,
}

impl Held<'_> {
    fn end(&mut self, how: Ended) {
        if let Some(ticket) = self.ticket.take() {
            self.shared.ended(ticket, how);
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.end(Ended::Cancelled);
    }
}

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
        let inner = Inner {
            fleet: Fleet::new(config.limits),
            links: BTreeMap::new(),
            troubles: BTreeMap::new(),
            draws: Draws(RandomState::new().hash_one(std::process::id())),
        };
        let shared = Arc::new(Shared {
            config,
            start: Instant::now(),
            inner: Mutex::new(inner),
            events: watch::Sender::new(0),
        });
        let task = tokio::spawn(watching::follow_addresses(Arc::downgrade(&shared), given));
        let client = FleetClient { shared, _addresses: Arc::new(AbortOnDrop(task)) };
        client.until_one_serves().await?;
        Ok(client)
    }

    async fn until_one_serves(&self) -> Result<(), FleetError> {
        let mut events = self.shared.events.subscribe();
        let serves = async {
            while self.shared.lock().fleet.content().is_none() {
                if events.changed().await.is_err() {
                    return;
                }
            }
        };
        let served = tokio::time::timeout(self.shared.config.connect_patience, serves).await;
        served.map_err(|_| FleetError::NoneServes(self.shared.troubles()))
    }

    /// The model, with the layers of all services that are known and hold the present weights. Limits are the smallest
    /// of theirs; placement is that of one of them.
    ///
    /// # Errors
    /// UNAVAILABLE if no service has said yet what it holds.
    pub fn model(&self) -> Result<GetModelResponse, Status> {
        let inner = self.shared.lock();
        let with = inner.links.iter().filter(|(id, _)| inner.fleet.has_content(**id));
        let mut models = with.filter_map(|(_, link)| link.model.as_deref());
        let first = models.next().cloned();
        let mut merged = first.ok_or_else(|| Status::unavailable("no service has said yet what it holds"))?;
        for model in models {
            merged.moe_layers.extend(model.moe_layers.iter().cloned());
            if let (Some(limits), Some(other)) = (&mut merged.limits, &model.limits) {
                limits.max_tokens_per_request =
                    limits.max_tokens_per_request.min(other.max_tokens_per_request);
                limits.max_tokens_per_step = limits.max_tokens_per_step.min(other.max_tokens_per_step);
                limits.max_tokens_per_rank = limits.max_tokens_per_rank.min(other.max_tokens_per_rank);
                limits.max_message_bytes = limits.max_message_bytes.min(other.max_message_bytes);
                limits.max_bytes_in_flight = limits.max_bytes_in_flight.min(other.max_bytes_in_flight);
            }
        }
        merged.moe_layers.sort_by_key(|layer| layer.layer);
        merged.moe_layers.dedup_by_key(|layer| layer.layer);
        merged.held_layers = None;
        Ok(merged)
    }

    /// The model once every service that is known has said what it holds, or `patience` is over.
    ///
    /// # Errors
    /// UNAVAILABLE if no service has said it by then.
    pub async fn complete_model(&self, patience: Duration) -> Result<GetModelResponse, Status> {
        let mut events = self.shared.events.subscribe();
        let complete = async {
            while self.shared.lock().fleet.any_unknown() {
                if events.changed().await.is_err() {
                    return;
                }
            }
        };
        // Some may never say it; what the others hold is the answer then.
        let _ = tokio::time::timeout(patience, complete).await;
        self.model()
    }

    /// Addresses of the known services, with the state of each and its rows in flight.
    #[must_use]
    pub fn services(&self) -> Vec<(String, State, u64)> {
        let inner = self.shared.lock();
        let of = |(id, link): (&ServiceId, &Link)| {
            let state = inner.fleet.state(*id).unwrap_or(State::Lost);
            (link.address.clone(), state, inner.fleet.outstanding_rows(*id))
        };
        inner.links.iter().map(of).collect()
    }

    /// Sends one token batch through one layer, on whichever service holds it. `timeout` bounds the whole call; without
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
        let give_up = start + timeout.unwrap_or(self.shared.config.patience);
        let mut last = None;
        loop {
            let mut events = self.shared.events.subscribe();
            let (choice, link) = self.shared.choose(request.layer, u64::from(request.tokens));
            match (choice, link) {
                (Choice::NoSuchLayer, _) => {
                    let layer = request.layer;
                    return Err(Status::not_found(format!(
                        "no service holds layer {layer} with an MoE block"
                    )));
                }
                (Choice::Take(ticket), Some(link)) => {
                    let held = Held { shared: &self.shared, ticket: Some(ticket) };
                    let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
                    match attempt(held, link, request.clone(), left).await {
                        Attempt::Done(result) => return result.map(|response| *response),
                        Attempt::Elsewhere(status) => last = Some(status),
                    }
                    if Instant::now() >= give_up {
                        return Err(self.out_of_time(request.layer, last));
                    }
                }
                (Choice::Take(ticket), None) => self.shared.ended(ticket, Ended::Lost),
                (Choice::Wait { until }, _) => {
                    let until = until.map_or(give_up, |until| give_up.min(self.shared.start + until));
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

/// The end of one attempt.
enum Attempt {
    /// With this result, which other services would not change.
    Done(Result<Box<ForwardResponse>, Status>),
    /// Another service, or the same one later, may answer.
    Elsewhere(Status),
}

async fn attempt(
    mut held: Held<'_>,
    mut link: Link,
    request: ForwardRequest,
    left: Option<Duration>,
) -> Attempt {
    let answer = tokio::select! {
        answer = send_once(link.moe, request, left) => answer,
        _ = link.lost.wait_for(|lost| *lost) => {
            held.end(Ended::Lost);
            return Attempt::Elsewhere(Status::unavailable(format!("{} stopped answering", link.address)));
        }
    };
    let (how, end) = match answer {
        Ok(response) => {
            let content = held.ticket.as_ref().map(|ticket| &ticket.content);
            let same = match (&response.receipt, content) {
                (Some(receipt), Some(content)) => receipt_has_content(receipt, content),
                _ => false,
            };
            if same {
                (Ended::Final, Attempt::Done(Ok(Box::new(response))))
            } else {
                let text = format!("{} has other weights than it said", link.address);
                (Ended::Changed, Attempt::Elsewhere(Status::unavailable(text)))
            }
        }
        Err(status) if is_connection_loss(&status) => {
            (Ended::Lost, Attempt::Elsewhere(connection_loss(status)))
        }
        Err(status) => (
            ended_by(&status),
            match ended_by(&status) {
                Ended::Final => Attempt::Done(Err(status)),
                _ => Attempt::Elsewhere(status),
            },
        ),
    };
    held.end(how);
    end
}

/// What a service's status says about the service.
fn ended_by(status: &Status) -> Ended {
    let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
    match (status.code(), reason.as_str()) {
        (Code::Unavailable, "DRAINING") => Ended::NotServing,
        (Code::Unavailable | Code::ResourceExhausted, _) => Ended::Refused { after: retry_delay(status) },
        (Code::NotFound, "LAYER_NOT_HELD") => Ended::Changed,
        _ => Ended::Final,
    }
}
