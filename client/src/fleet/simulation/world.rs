//! The services, requests and events of the simulation, and the way of a request through them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::super::{Choice, Content, Draws, Ended, Fleet, Limits, ServiceId, Ticket};

/// Interval and time limit of probes in milliseconds, as in the client's defaults.
pub(super) const PROBE: u64 = 500;
pub(super) const PROBE_TIMEOUT: u64 = 750;
/// Deadline of each request, in milliseconds.
const DEADLINE: u64 = 5000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Up,
    /// Refuses new requests, answers those that it has.
    Draining,
    /// Accepts and answers nothing, without closing connections.
    Stopped,
    /// Its process is gone.
    Dead,
}

#[derive(Debug)]
pub(super) struct Server {
    pub(super) id: ServiceId,
    pub(super) layers: BTreeSet<u32>,
    pub(super) content: u32,
    pub(super) life: Life,
    /// Whether the client has asked what it holds since it last started.
    pub(super) learned: bool,
    pub(super) missed: u32,
    pub(super) answered: u64,
    /// Numbers of the requests that it has taken in.
    pub(super) working: BTreeSet<u64>,
}

#[derive(Debug)]
pub(super) struct Request {
    layer: u32,
    rows: u64,
    begun: u64,
    pub(super) ticket: Option<Ticket>,
    server: usize,
    pub(super) attempt: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Arrive,
    Retry(u64),
    Answer {
        request: u64,
        attempt: u64,
    },
    Probe(usize),
    Missed(usize),
    Fault,
    /// The process of a server ends.
    End(usize),
    /// The process of a server starts again, or continues after a stop.
    GoOn(usize),
    /// The next server of a rollout ends, to come back with the next content.
    Roll(usize),
}

pub(super) struct World {
    pub(super) now: u64,
    pub(super) events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pub(super) number: u64,
    pub(super) draws: Draws,
    pub(super) fleet: Fleet,
    pub(super) servers: Vec<Server>,
    pub(super) requests: BTreeMap<u64, Request>,
    pub(super) arrived: u64,
    pub(super) answered: u64,
    pub(super) failed: Vec<String>,
    /// Contents of answers in the order in which their requests were sent.
    pub(super) contents: Vec<(u64, u32)>,
    pub(super) faults: bool,
    pub(super) rollout_order: Vec<usize>,
    pub(super) last_arrival: u64,
    pub(super) longest: u64,
}

pub(super) fn content(number: u32) -> Content {
    Content(format!("m {number}"))
}

impl World {
    /// `shares` shares of `width` layers, each held by `replicas` services.
    pub(super) fn new(seed: u64, shares: u32, width: u32, replicas: u32) -> World {
        let mut world = World {
            now: 0,
            events: BinaryHeap::new(),
            number: 0,
            draws: Draws(seed),
            fleet: Fleet::new(Limits::default()),
            servers: Vec::new(),
            requests: BTreeMap::new(),
            arrived: 0,
            answered: 0,
            failed: Vec::new(),
            contents: Vec::new(),
            faults: true,
            rollout_order: Vec::new(),
            last_arrival: 0,
            longest: 0,
        };
        for share in 0..shares {
            for _ in 0..replicas {
                let id = world.fleet.add();
                world.fleet.connected(id);
                let layers = (share * width..(share + 1) * width).collect();
                let server = world.servers.len();
                world.servers.push(Server {
                    id,
                    layers,
                    content: 0,
                    life: Life::Up,
                    learned: false,
                    missed: 0,
                    answered: 0,
                    working: BTreeSet::new(),
                });
                let at = world.draw(PROBE);
                world.at(at, Event::Probe(server));
            }
        }
        world
    }

    pub(super) fn draw(&mut self, below: u64) -> u64 {
        self.draws.next() % below.max(1)
    }

    pub(super) fn time(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    pub(super) fn at(&mut self, after: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((self.now + after, self.number, event)));
    }

    pub(super) fn run(&mut self, until: u64) {
        while let Some(Reverse((when, _, event))) = self.events.pop() {
            self.now = when;
            if when > until && self.requests.is_empty() {
                return;
            }
            match event {
                Event::Arrive => self.arrive(),
                Event::Retry(request) => self.send(request),
                Event::Answer { request, attempt } => self.answer(request, attempt),
                Event::Probe(server) => self.probe(server),
                Event::Missed(server) => self.missed(server),
                Event::Fault if self.faults => self.fault(),
                Event::Fault => {}
                Event::End(server) => self.end(server),
                Event::GoOn(server) => self.go_on(server),
                Event::Roll(step) => self.roll(step),
            }
        }
    }

    fn arrive(&mut self) {
        let layers = self.servers.iter().flat_map(|server| &server.layers).max().map_or(1, |last| last + 1);
        let request = Request {
            layer: self.draw(u64::from(layers)) as u32,
            rows: 1 + self.draw(64),
            begun: self.now,
            ticket: None,
            server: 0,
            attempt: 0,
        };
        self.arrived += 1;
        let number = self.arrived;
        self.requests.insert(number, request);
        self.send(number);
        if self.now < self.last_arrival {
            let gap = self.draw(3);
            self.at(gap, Event::Arrive);
        }
    }

    pub(super) fn send(&mut self, number: u64) {
        let Some(request) = self.requests.get(&number) else { return };
        if request.ticket.is_some() {
            return;
        }
        if self.now >= request.begun + DEADLINE {
            let holders = self.servers.iter().filter(|s| s.layers.contains(&request.layer));
            let holders: Vec<_> = holders.map(|s| (s.life, s.content, self.fleet.state(s.id))).collect();
            let content = self.fleet.content();
            self.failed.push(format!("{request:?} at {} with {content:?}: {holders:?}", self.now));
            self.requests.remove(&number);
            return;
        }
        let (layer, rows, time) = (request.layer, request.rows, self.time());
        let draw = self.draws.next();
        match self.fleet.choose(layer, rows, draw, time) {
            Choice::NoSuchLayer => panic!("layer {layer} exists"),
            Choice::Wait { until } => {
                // The client is woken by events; here it looks again soon.
                let pause = until.map_or(20, |until| (until.as_millis() as u64).saturating_sub(self.now));
                self.at(pause.clamp(1, 20), Event::Retry(number));
            }
            Choice::Take(ticket) => {
                let server = self.servers.iter().position(|server| server.id == ticket.service);
                let server = server.expect("the fleet chooses known services");
                assert!(
                    self.servers[server].layers.contains(&layer),
                    "a service without the layer was chosen"
                );
                assert_eq!(
                    Some(&ticket.content),
                    self.fleet.content(),
                    "a service with other weights was chosen"
                );
                let request = self.requests.get_mut(&number).expect("it was found above");
                request.ticket = Some(ticket);
                request.server = server;
                request.attempt += 1;
                let attempt = request.attempt;
                self.servers[server].working.insert(number);
                let latency = 1 + self.draw(30);
                self.at(latency, Event::Answer { request: number, attempt });
            }
        }
    }

    /// The request's answer, or the error that the state of its server gives.
    fn answer(&mut self, number: u64, attempt: u64) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        if request.attempt != attempt || request.ticket.is_none() {
            return;
        }
        let server = &mut self.servers[request.server];
        let how = match server.life {
            Life::Stopped => return,
            Life::Dead => Ended::Lost,
            Life::Draining => Ended::NotServing,
            Life::Up => Ended::Final,
        };
        server.working.remove(&number);
        let Some(ticket) = request.ticket.take() else { return };
        // The receipt names the weights that computed the answer.
        let how = if how == Ended::Final && ticket.content != content(server.content) {
            Ended::Changed
        } else {
            how
        };
        if how == Ended::Final {
            server.answered += 1;
            self.answered += 1;
            self.longest = self.longest.max(self.now - request.begun);
            self.contents.push((self.now, server.content));
            self.requests.remove(&number);
        }
        if how == Ended::Changed {
            server.learned = false;
        }
        self.fleet.ended(ticket, how, Duration::from_millis(self.now));
        if how != Ended::Final {
            self.send(number);
        }
    }

    /// Ends with everything answered, and all rows taken back.
    pub(super) fn finish(&mut self, seed: u64) {
        assert!(
            self.failed.is_empty(),
            "seed {seed}: {} of {}: {:#?}",
            self.failed.len(),
            self.arrived,
            &self.failed[..1]
        );
        assert_eq!(self.answered, self.arrived, "seed {seed}");
        for server in &self.servers {
            assert_eq!(self.fleet.outstanding_rows(server.id), 0, "seed {seed}: {server:?}");
        }
    }
}
