//! A simulation of hundreds of services that are killed, stopped, drained and restarted with other weights, under requests
//! with deadlines. Time is virtual and every random number comes from the seed, so a failure is repeated by its seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::{Choice, Content, Draws, Ended, Facts, Fleet, Limits, ServiceId, State, Ticket};

/// Interval and time limit of probes, as in the client's defaults.
const PROBE: u64 = 500;
const PROBE_TIMEOUT: u64 = 750;
/// Deadline of each request, in milliseconds.
const DEADLINE: u64 = 5000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Up,
    /// Refuses new requests, answers those that it has.
    Draining,
    /// Accepts and answers nothing, without closing connections.
    Stopped,
    /// Its process is gone.
    Dead,
}

#[derive(Debug)]
struct Server {
    id: ServiceId,
    layers: BTreeSet<u32>,
    content: u32,
    life: Life,
    /// Whether the client has asked what it holds since it last started.
    learned: bool,
    missed: u32,
    answered: u64,
    /// Numbers of the requests that it has taken in.
    working: BTreeSet<u64>,
}

#[derive(Debug)]
struct Request {
    layer: u32,
    rows: u64,
    begun: u64,
    ticket: Option<Ticket>,
    server: usize,
    attempt: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive,
    Retry(u64),
    Answer {
        request: u64,
        attempt: u64,
    },
    Probe(usize),
    Missed(usize),
    Fault,
    Change {
        server: usize,
        to: u8,
    },
    /// The next server of a rollout ends, to come back with the next content.
    Roll(usize),
}

struct World {
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    draws: Draws,
    fleet: Fleet,
    servers: Vec<Server>,
    requests: BTreeMap<u64, Request>,
    arrived: u64,
    answered: u64,
    failed: Vec<String>,
    /// Contents of answers in the order in which their requests were sent.
    contents: Vec<(u64, u32)>,
    faults: bool,
    rollout_order: Vec<usize>,
    last_arrival: u64,
    longest: u64,
}

fn content(number: u32) -> Content {
    Content(format!("m {number}"))
}

impl World {
    /// `shares` shares of `width` layers, each held by `replicas` services.
    fn new(seed: u64, shares: u32, width: u32, replicas: u32) -> World {
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

    fn draw(&mut self, below: u64) -> u64 {
        self.draws.next() % below.max(1)
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    fn at(&mut self, after: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((self.now + after, self.number, event)));
    }

    fn run(&mut self, until: u64) {
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
                Event::Change { server, to } => self.change(server, to),
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

    fn send(&mut self, number: u64) {
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

    fn probe(&mut self, index: usize) {
        self.at(PROBE, Event::Probe(index));
        let time = self.time();
        let server = &mut self.servers[index];
        let state = match server.life {
            Life::Stopped if server.missed == 0 => return self.at(PROBE_TIMEOUT, Event::Missed(index)),
            Life::Stopped => return,
            Life::Dead => State::Lost,
            Life::Draining => State::NotServing,
            Life::Up => State::Serving,
        };
        server.missed = 0;
        if state == State::Lost {
            server.learned = false;
            return self.lose(index);
        }
        if state == State::Serving && !server.learned {
            server.learned = true;
            let facts = Facts { content: content(server.content), layers: server.layers.clone() };
            self.fleet.learned(self.servers[index].id, facts, time);
        }
        self.fleet.observed(self.servers[index].id, state, time);
    }

    fn missed(&mut self, index: usize) {
        if self.servers[index].life != Life::Stopped {
            return;
        }
        self.servers[index].missed += 1;
        if self.servers[index].missed == 1 {
            self.fleet.observed(self.servers[index].id, State::Suspect, self.time());
            self.at(PROBE_TIMEOUT, Event::Missed(index));
        } else {
            self.lose(index);
        }
    }

    /// Counts a server as lost: its requests go elsewhere.
    fn lose(&mut self, index: usize) {
        let time = self.time();
        self.fleet.observed(self.servers[index].id, State::Lost, time);
        for number in std::mem::take(&mut self.servers[index].working) {
            let Some(request) = self.requests.get_mut(&number) else { continue };
            if let Some(ticket) = request.ticket.take() {
                self.fleet.ended(ticket, Ended::Lost, time);
            }
            self.send(number);
        }
    }

    /// Something happens to a server, if enough others hold its layers.
    fn fault(&mut self) {
        let gap = 50 + self.draw(300);
        self.at(gap, Event::Fault);
        let count = self.servers.len() as u64;
        let index = self.draw(count) as usize;
        let peers = self.servers.iter().filter(|s| s.layers == self.servers[index].layers);
        let (up, all) = (peers.clone().filter(|s| s.life == Life::Up).count(), peers.count());
        if self.servers[index].life != Life::Up || 2 * (up - 1) < all {
            return;
        }
        match self.draw(3) {
            0 => self.change(index, 0),
            1 => {
                self.servers[index].life = Life::Stopped;
                self.servers[index].missed = 0;
                let pause = 200 + self.draw(6000);
                self.at(pause, Event::Change { server: index, to: 1 });
            }
            _ => {
                self.servers[index].life = Life::Draining;
                self.at(100, Event::Change { server: index, to: 0 });
            }
        }
    }

    /// A process ends (0) and starts again later, or goes on (1).
    fn change(&mut self, index: usize, to: u8) {
        if to == 0 {
            self.servers[index].life = Life::Dead;
            self.servers[index].learned = false;
            let down = 500 + self.draw(3000);
            self.at(down, Event::Change { server: index, to: 1 });
            // Broken connections end requests at once.
            self.lose(index);
        } else {
            let server = &mut self.servers[index];
            server.life = Life::Up;
            server.missed = 0;
            for number in std::mem::take(&mut server.working) {
                let Some(request) = self.requests.get(&number) else { continue };
                let attempt = request.attempt;
                self.at(1, Event::Answer { request: number, attempt });
            }
        }
    }

    fn roll(&mut self, step: usize) {
        let Some(&index) = self.rollout_order.get(step) else { return };
        self.at(40, Event::Roll(step + 1));
        let server = &mut self.servers[index];
        server.content += 1;
        self.change(index, 0);
    }

    /// Ends with everything answered, and all rows taken back.
    fn finish(&mut self, seed: u64) {
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

/// Seeds to run: `EXPERTD_SIMULATION_SEED` alone, or a few.
fn seeds() -> std::ops::Range<u64> {
    match std::env::var("EXPERTD_SIMULATION_SEED").ok().and_then(|text| text.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..4,
    }
}

#[test]
fn no_request_fails_while_services_die_stop_and_drain() {
    for seed in seeds() {
        let mut world = World::new(seed, 20, 3, 15);
        world.last_arrival = 60_000;
        world.at(1000, Event::Arrive);
        world.at(2000, Event::Fault);
        world.run(60_000);
        world.finish(seed);
        let answered: Vec<u64> = world.servers.iter().map(|server| server.answered).collect();
        let mean = answered.iter().sum::<u64>() / answered.len() as u64;
        assert!(answered.iter().all(|&one| one > mean / 3 && one < mean * 3), "seed {seed}: {answered:?}");
    }
}

#[test]
fn contents_are_never_mixed_in_a_rollout() {
    for seed in seeds() {
        let mut world = World::new(seed, 20, 3, 15);
        world.faults = false;
        world.last_arrival = 30_000;
        world.at(1000, Event::Arrive);
        // New weights on one service after the other, in random order.
        let mut order: Vec<usize> = (0..world.servers.len()).collect();
        for last in (1..order.len()).rev() {
            let other = world.draw(last as u64 + 1) as usize;
            order.swap(last, other);
        }
        world.rollout_order = order;
        world.at(3000, Event::Roll(0));
        world.run(30_000);
        world.finish(seed);
        // One switch: an answer of the old weights comes after one of the new weights only if it was sent before.
        let first_new = world.contents.iter().find(|(_, content)| *content == 1).map(|(at, _)| *at);
        let last_old = world.contents.iter().rfind(|(_, content)| *content == 0).map(|(at, _)| *at);
        let (first_new, last_old) =
            (first_new.expect("the new weights answer"), last_old.expect("the old did"));
        assert!(last_old <= first_new + 31, "seed {seed}: old until {last_old}, new from {first_new}");
    }
}
