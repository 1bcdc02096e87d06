//! What calls and background tasks share: the fleet and the connections to its services under one lock, and a count of events.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tonic::Status;

use super::{Choice, Draws, Ended, Facts, Fleet, FleetConfig, ServiceId, State, Ticket};
use crate::client::send_once;
use crate::transport::Channel;
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::{ForwardRequest, ForwardResponse, GetModelResponse, Limits};

/// A connection to one service.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) moe: MoeClient<Channel>,
    /// Becomes true when the service counts as lost.
    pub(super) lost: watch::Receiver<bool>,
    /// Wakes the task that probes the service.
    pub(super) woken: Arc<Notify>,
    pub(super) address: String,
    /// The service's answer to `GetModel`, once there is one.
    pub(super) model: Option<Arc<GetModelResponse>>,
    #[cfg(feature = "network")]
    pub(super) network: Option<Arc<super::network::NetworkRoute>>,
}

impl Link {
    /// Makes one attempt of a call.
    pub(super) async fn send(
        &self,
        request: ForwardRequest,
        left: Option<Duration>,
    ) -> Result<ForwardResponse, Status> {
        let start = Instant::now();
        #[cfg(feature = "network")]
        if let Some(network) = &self.network
            && let Some(answer) = network.forward(&request, left).await
        {
            return answer;
        }
        let left = left.map(|left| left.saturating_sub(start.elapsed()));
        send_once(self.moe.clone(), request, left).await
    }
}

/// The state of a client of several services.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: FleetConfig,
    /// The zero of the fleet's times.
    start: Instant,
    inner: Mutex<Inner>,
    /// Counts events after which a waiting request may find a service.
    events: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    fleet: Fleet,
    links: BTreeMap<ServiceId, Link>,
    /// The last error of each address.
    troubles: BTreeMap<String, String>,
    draws: Draws,
}

impl Shared {
    pub(super) fn new(config: FleetConfig) -> Shared {
        let inner = Inner {
            fleet: Fleet::new(config.limits),
            links: BTreeMap::new(),
            troubles: BTreeMap::new(),
            draws: Draws(RandomState::new().hash_one(std::process::id())),
        };
        Shared { config, start: Instant::now(), inner: Mutex::new(inner), events: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every change to the data is complete before anything in it can panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// The instant of one of the fleet's times.
    pub(super) fn instant(&self, time: Duration) -> Instant {
        self.start + time
    }

    /// Receives a change at each event after which a waiting request may find a service.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.events.subscribe()
    }

    /// Waits until `is_reached` holds, for at most `limit`. Returns whether it does.
    pub(super) async fn wait_until(&self, limit: Duration, is_reached: impl Fn(&Fleet) -> bool) -> bool {
        let mut events = self.subscribe();
        let reached = async {
            while !is_reached(&self.lock().fleet) {
                // The sender lives as long as this state.
                if events.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(limit, reached).await.is_ok()
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

    pub(super) fn choose(&self, layer: u32, rows: u64) -> (Choice, Option<Link>) {
        let mut inner = self.lock();
        let draw = inner.draws.next();
        let choice = inner.fleet.choose(layer, rows, draw, self.now());
        let link = match &choice {
            Choice::Take(ticket) => inner.links.get(&ticket.service).cloned(),
            Choice::Wait { .. } | Choice::NoSuchLayer => None,
        };
        (choice, link)
    }

    pub(super) fn ended(&self, ticket: Ticket, how: Ended) {
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

    /// The model with the layers of all services that hold the present weights; `None` before the first answer.
    pub(super) fn merged_model(&self) -> Option<GetModelResponse> {
        let inner = self.lock();
        let present = inner.links.iter().filter(|(id, _)| inner.fleet.has_content(**id));
        let mut models = present.filter_map(|(_, link)| link.model.as_deref());
        let mut merged = models.next()?.clone();
        for model in models {
            merged.moe_layers.extend(model.moe_layers.iter().cloned());
            if let (Some(limits), Some(other)) = (&mut merged.limits, &model.limits) {
                lower(limits, other);
            }
        }
        merged.moe_layers.sort_by_key(|layer| layer.layer);
        merged.moe_layers.dedup_by_key(|layer| layer.layer);
        merged.held_layers = None;
        Some(merged)
    }

    /// Address, state and rows in flight of each known service.
    pub(super) fn services(&self) -> Vec<(String, State, u64)> {
        let inner = self.lock();
        let of = |(id, link): (&ServiceId, &Link)| {
            let state = inner.fleet.state(*id).unwrap_or(State::Lost);
            (link.address.clone(), state, inner.fleet.outstanding_rows(*id))
        };
        inner.links.iter().map(of).collect()
    }

    /// The last error of each address, for messages.
    pub(super) fn troubles(&self) -> String {
        let inner = self.lock();
        if inner.troubles.is_empty() {
            return "no service has answered yet".to_owned();
        }
        inner.troubles.iter().map(|(at, why)| format!("{at}: {why}")).collect::<Vec<_>>().join("; ")
    }
}

/// Lowers each limit to the other service's if that is smaller.
fn lower(limits: &mut Limits, other: &Limits) {
    limits.max_tokens_per_request = limits.max_tokens_per_request.min(other.max_tokens_per_request);
    limits.max_tokens_per_step = limits.max_tokens_per_step.min(other.max_tokens_per_step);
    limits.max_tokens_per_rank = limits.max_tokens_per_rank.min(other.max_tokens_per_rank);
    limits.max_message_bytes = limits.max_message_bytes.min(other.max_message_bytes);
    limits.max_bytes_in_flight = limits.max_bytes_in_flight.min(other.max_bytes_in_flight);
}

/// The ticket of a call. If the call is dropped, the ticket ends as cancelled.
pub(super) struct TicketGuard<'a> {
    shared: &'a Shared,
    ticket: Option<Ticket>,
}

impl<'a> TicketGuard<'a> {
    pub(super) const fn new(shared: &'a Shared, ticket: Ticket) -> TicketGuard<'a> {
        TicketGuard { shared, ticket: Some(ticket) }
    }

    /// The ticket, unless it has ended.
    pub(super) const fn ticket(&self) -> Option<&Ticket> {
        self.ticket.as_ref()
    }

    pub(super) fn end(&mut self, how: Ended) {
        if let Some(ticket) = self.ticket.take() {
            self.shared.ended(ticket, how);
        }
    }
}

impl Drop for TicketGuard<'_> {
    fn drop(&mut self) {
        self.end(Ended::Cancelled);
    }
}
