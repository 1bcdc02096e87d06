//! The state of several services, and the choice of the one that gets a request. It has no clock and does no I/O: callers
//! pass the time since some start, and random numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The content of a model's weights: services with equal content give the same answers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Content(pub(super) String);

/// Number of a service; never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub u64);

/// A service's description of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Content of its weights.
    pub content: Content,
    /// The layers that it serves.
    pub layers: BTreeSet<u32>,
}

/// Whether a service takes requests, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Connected, or about to be, and not yet asked what it serves.
    Unknown,
    /// Its health check says SERVING.
    Serving,
    /// One probe had no answer in time. It gets requests only if no other service can take them.
    Suspect,
    /// Its health check says that it does not serve: it loads, recovers or drains. It still answers the requests that it has taken in.
    NotServing,
    /// It cannot be reached, or two probes in a row had no answer. Requests that it has taken in go elsewhere.
    Lost,
}

/// The limits of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pause for a service that refused a request without saying for how long.
    pub pause: Duration,
    /// Longest pause for a service that refused a request.
    pub max_pause: Duration,
    /// Time for which a service that no longer serves still counts when the layers of contents are compared.
    pub content_grace: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            pause: Duration::from_millis(50),
            max_pause: Duration::from_secs(1),
            content_grace: Duration::from_secs(10),
        }
    }
}

/// One service as the state machine sees it.
#[derive(Clone, Debug)]
struct Service {
    state: State,
    facts: Option<Facts>,
    /// Number of its connection; the end of a call on an earlier connection says nothing about this one.
    connection: u64,
    /// Rows sent and not yet answered, over all connections.
    outstanding_rows: u64,
    /// No request is sent before this time.
    paused_until: Duration,
    /// Last time at which it was seen serving, if it ever was.
    served_at: Duration,
    has_served: bool,
}

/// A request that was given to a service. [`Fleet::ended`] takes it back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the rows count as outstanding until the ticket comes back"]
pub struct Ticket {
    /// The chosen service.
    pub service: ServiceId,
    /// The content that its answer must have.
    pub content: Content,
    connection: u64,
    rows: u64,
}

/// The answer to [`Fleet::choose`].
#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    /// Send the request to this service.
    Take(Ticket),
    /// No service can take it now: choose again at `until`, or at once after any event.
    Wait {
        /// When a paused service may be asked again; `None` if only an event can help.
        until: Option<Duration>,
    },
    /// Services are known, and none of them holds the layer.
    NoSuchLayer,
}

/// How a request ended at a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With an answer, or with an error that other services would give as well.
    Final,
    /// The service refused it for now, and said for how long.
    Refused {
        /// The stated delay.
        after: Option<Duration>,
    },
    /// The service takes no new requests.
    NotServing,
    /// The connection broke, or the service stopped answering.
    Lost,
    /// The service has other weights or other layers than it said.
    Changed,
    /// The caller went away.
    Cancelled,
}

/// Several services that are used as one.
#[derive(Debug)]
pub struct Fleet {
    limits: Limits,
    services: BTreeMap<ServiceId, Service>,
    content: Option<Content>,
    /// The services with the present content, by layer.
    holders: BTreeMap<u32, Vec<ServiceId>>,
    settled_at: Duration,
    /// Number of times that the content was replaced.
    switches: u64,
    next_id: u64,
}

/// Interval at which the passing of time alone may change the content.
const SETTLE_INTERVAL: Duration = Duration::from_millis(250);

impl Fleet {
    /// No services yet.
    #[must_use]
    pub fn new(limits: Limits) -> Fleet {
        Fleet {
            limits,
            services: BTreeMap::new(),
            content: None,
            holders: BTreeMap::new(),
            settled_at: Duration::ZERO,
            switches: 0,
            next_id: 0,
        }
    }

    /// Adds a service about which nothing is known.
    pub fn add(&mut self) -> ServiceId {
        let id = ServiceId(self.next_id);
        self.next_id += 1;
        let service = Service {
            state: State::Unknown,
            facts: None,
            connection: 0,
            outstanding_rows: 0,
            paused_until: Duration::ZERO,
            served_at: Duration::ZERO,
            has_served: false,
        };
        self.services.insert(id, service);
        id
    }

    /// Forgets a service. Its tickets may still come back.
    pub fn remove(&mut self, id: ServiceId, now: Duration) {
        self.services.remove(&id);
        self.settle_content(now);
    }

    /// A service has a new connection; what it serves must be asked again.
    pub fn connected(&mut self, id: ServiceId) {
        if let Some(service) = self.services.get_mut(&id) {
            service.connection += 1;
            service.state = State::Unknown;
            service.paused_until = Duration::ZERO;
        }
    }

    /// A service said what it serves.
    pub fn learned(&mut self, id: ServiceId, facts: Facts, now: Duration) {
        if let Some(service) = self.services.get_mut(&id) {
            service.facts = Some(facts);
            // What it served before says nothing about these weights.
            service.has_served = false;
        }
        self.settle_content(now);
    }

    /// A probe, or the loss of one, showed the state of a service.
    pub fn observed(&mut self, id: ServiceId, state: State, now: Duration) {
        let Some(service) = self.services.get_mut(&id) else { return };
        if service.state == State::Serving || state == State::Serving {
            service.served_at = now;
            service.has_served = true;
        }
        if std::mem::replace(&mut service.state, state) == state {
            self.settle_if_due(now);
        } else {
            self.settle_content(now);
        }
    }

    /// The state of a service.
    #[must_use]
    pub fn state(&self, id: ServiceId) -> Option<State> {
        self.services.get(&id).map(|service| service.state)
    }

    /// Whether some service has neither said what it holds nor turned out to be out of reach.
    #[must_use]
    pub fn any_unknown(&self) -> bool {
        self.services.values().any(|service| service.state == State::Unknown)
    }

    /// The content whose services get requests.
    #[must_use]
    pub fn content(&self) -> Option<&Content> {
        self.content.as_ref()
    }

    /// Number of times that the content was replaced, the first one included.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Rows that a service was sent and has not answered.
    #[must_use]
    pub fn outstanding_rows(&self, id: ServiceId) -> u64 {
        self.services.get(&id).map_or(0, |service| service.outstanding_rows)
    }

    /// Whether a service has the content whose services get requests.
    #[must_use]
    pub fn has_content(&self, id: ServiceId) -> bool {
        let facts = self.services.get(&id).and_then(|service| service.facts.as_ref());
        facts.is_some_and(|facts| Some(&facts.content) == self.content.as_ref())
    }

    /// Chooses a service for a request of `rows` rows to `layer`: of two random ones that can take it, the one with fewer
    /// outstanding rows. `draw` is a uniformly distributed random number.
    pub fn choose(&mut self, layer: u32, rows: u64, draw: u64, now: Duration) -> Choice {
        self.settle_if_due(now);
        let ids = self.holders.get(&layer).map(Vec::as_slice).unwrap_or_default();
        let holders: Vec<(ServiceId, &Service)> =
            ids.iter().filter_map(|id| Some((*id, self.services.get(id)?))).collect();
        if holders.is_empty() {
            return self.without_holder(layer);
        }
        let able = |wanted: State| -> Vec<ServiceId> {
            let able = holders.iter().filter(|(_, s)| s.state == wanted && s.paused_until <= now);
            able.map(|(id, _)| *id).collect()
        };
        let mut able_now = able(State::Serving);
        if able_now.is_empty() {
            able_now = able(State::Suspect);
        }
        if able_now.is_empty() {
            let paused = holders.iter().filter(|(_, s)| matches!(s.state, State::Serving | State::Suspect));
            return Choice::Wait { until: paused.map(|(_, service)| service.paused_until).min() };
        }
        let chosen = self.less_loaded(&able_now, draw);
        let Some(service) = self.services.get_mut(&chosen) else { return Choice::Wait { until: None } };
        service.outstanding_rows += rows;
        let content =
            service.facts.as_ref().map_or_else(|| Content(String::new()), |facts| facts.content.clone());
        Choice::Take(Ticket { service: chosen, content, connection: service.connection, rows })
    }

    /// Takes a ticket back.
    pub fn ended(&mut self, ticket: Ticket, how: Ended, now: Duration) {
        let limits = self.limits;
        let Some(service) = self.services.get_mut(&ticket.service) else { return };
        service.outstanding_rows = service.outstanding_rows.saturating_sub(ticket.rows);
        if ticket.connection != service.connection {
            return;
        }
        match how {
            Ended::Final | Ended::Cancelled => {}
            Ended::Refused { after } => {
                let pause = after.unwrap_or(limits.pause).min(limits.max_pause);
                service.paused_until = service.paused_until.max(now + pause);
            }
            Ended::NotServing => self.observed(ticket.service, State::NotServing, now),
            Ended::Lost => self.observed(ticket.service, State::Lost, now),
            Ended::Changed => self.observed(ticket.service, State::Unknown, now),
        }
    }

    /// A layer that no service of the present content holds does not exist if every service has said what it holds and
    /// no other content has it.
    fn without_holder(&self, layer: u32) -> Choice {
        let none_has = |service: &Service| {
            let settled = !matches!(service.state, State::Unknown | State::Lost);
            settled && service.facts.as_ref().is_some_and(|facts| !facts.layers.contains(&layer))
        };
        if !self.services.is_empty() && self.services.values().all(none_has) {
            return Choice::NoSuchLayer;
        }
        Choice::Wait { until: None }
    }

    fn less_loaded(&self, able: &[ServiceId], draw: u64) -> ServiceId {
        let count = able.len() as u64;
        let first = (draw & 0xffff_ffff) % count;
        if count == 1 {
            return able[0];
        }
        // The second is any of the others.
        let second = (first + 1 + (draw >> 32) % (count - 1)) % count;
        let rows = |at: u64| self.outstanding_rows(able[at as usize]);
        able[if rows(second) < rows(first) { second } else { first } as usize]
    }

    /// Keeps the present content while no other one covers more layers, and indexes its services by layer. A layer is
    /// covered by a service that serves or has served within the grace.
    fn settle_content(&mut self, now: Duration) {
        let grace = self.limits.content_grace;
        let lasts = |service: &Service| match service.state {
            State::Serving | State::Suspect => true,
            State::Unknown | State::NotServing | State::Lost => {
                service.has_served && now < service.served_at + grace
            }
        };
        let mut covered: BTreeMap<&Content, BTreeSet<u32>> = BTreeMap::new();
        for service in self.services.values().filter(|service| lasts(service)) {
            if let Some(facts) = &service.facts {
                covered.entry(&facts.content).or_default().extend(&facts.layers);
            }
        }
        let present = self.content.as_ref().and_then(|content| covered.get(content)).map_or(0, BTreeSet::len);
        let most = covered.iter().map(|(content, layers)| (layers.len(), *content)).max();
        if let Some((layers, content)) = most
            && layers > present
        {
            self.content = Some(content.clone());
            self.switches += 1;
        }
        self.holders.clear();
        for (id, service) in &self.services {
            let facts = service.facts.as_ref().filter(|facts| Some(&facts.content) == self.content.as_ref());
            for layer in facts.iter().flat_map(|facts| &facts.layers) {
                self.holders.entry(*layer).or_default().push(*id);
            }
        }
        self.settled_at = now;
    }

    /// Settles the content if time alone may have changed it.
    fn settle_if_due(&mut self, now: Duration) {
        if now >= self.settled_at + SETTLE_INTERVAL {
            self.settle_content(now);
        }
    }
}
