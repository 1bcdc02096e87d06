//! What happens to services: probes, faults, restarts and rollouts.

use super::super::{Ended, Facts, State};
use super::world::{Event, Life, PROBE, PROBE_TIMEOUT, World, content};

impl World {
    pub(super) fn probe(&mut self, index: usize) {
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

    pub(super) fn missed(&mut self, index: usize) {
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
    pub(super) fn lose(&mut self, index: usize) {
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
    pub(super) fn fault(&mut self) {
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
            0 => self.end(index),
            1 => {
                self.servers[index].life = Life::Stopped;
                self.servers[index].missed = 0;
                let pause = 200 + self.draw(6000);
                self.at(pause, Event::GoOn(index));
            }
            _ => {
                self.servers[index].life = Life::Draining;
                self.at(100, Event::End(index));
            }
        }
    }

    /// The process of a server ends and starts again later.
    pub(super) fn end(&mut self, index: usize) {
        self.servers[index].life = Life::Dead;
        self.servers[index].learned = false;
        let down = 500 + self.draw(3000);
        self.at(down, Event::GoOn(index));
        // Broken connections end requests at once.
        self.lose(index);
    }

    /// A server serves again, and answers the requests that it still has.
    pub(super) fn go_on(&mut self, index: usize) {
        let server = &mut self.servers[index];
        server.life = Life::Up;
        server.missed = 0;
        for number in std::mem::take(&mut server.working) {
            let Some(request) = self.requests.get(&number) else { continue };
            let attempt = request.attempt;
            self.at(1, Event::Answer { request: number, attempt });
        }
    }

    pub(super) fn roll(&mut self, step: usize) {
        let Some(&index) = self.rollout_order.get(step) else { return };
        self.at(40, Event::Roll(step + 1));
        let server = &mut self.servers[index];
        server.content += 1;
        self.end(index);
    }
}
