//! Shares of rows between clients that always have more to send.

use std::collections::BTreeMap;

use expertd_scheduler::MAX_DEBT_STEPS;

use super::schedule::Schedule;

/// Least number of clients that send one request at a time for which shares are checked. With fewer, the others cannot keep the ranks
/// busy while a client's next request is on the way, so the client cannot use its share.
pub const MIN_CLOSED_LOOPS: usize = 32;

/// Number of rounds between two checks of the shares of all pairs of clients.
const CHECK_INTERVAL: u32 = 8;

#[derive(Clone, Debug)]
struct Share {
    rows: i64,
    largest_request: usize,
    /// `(kind, rows that always wait, rows of one request)`.
    backlogs: Vec<(usize, usize, usize)>,
}

/// The rows that steps took of each client, and the differences between clients.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    clients: BTreeMap<u64, Share>,
    /// For each pair of clients, the smallest lead of the first over the second so far.
    least_lead: BTreeMap<(u64, u64), i64>,
    rounds: u32,
}

impl Shares {
    pub fn add(&mut self, client: u64, largest_request: usize, _kind: usize) {
        let share = Share { rows: 0, largest_request: 0, backlogs: Vec::new() };
        let share = self.clients.entry(client).or_insert(share);
        share.largest_request = share.largest_request.max(largest_request);
    }

    pub fn add_backlog(&mut self, client: u64, size: usize, kind: usize, tokens: usize) {
        self.add(client, size, kind);
        if let Some(share) = self.clients.get_mut(&client) {
            share.backlogs.push((kind, tokens, size));
        }
    }

    /// For each backlog: the client, the kind, the number of rows that always wait, and the rows of a request.
    pub fn backlogs(&self) -> Vec<(u64, usize, usize, usize)> {
        let of_client = |(client, share): (&u64, &Share)| {
            share.backlogs.iter().map(|(k, t, s)| (*client, *k, *t, *s)).collect::<Vec<_>>()
        };
        self.clients.iter().flat_map(of_client).collect()
    }

    /// Notes that a step takes rows of a client.
    pub fn count(&mut self, client: u64, rows: usize) {
        if let Some(share) = self.clients.get_mut(&client) {
            share.rows += rows as i64;
        }
    }

    /// Checks that over no stretch of the schedule steps take more rows of one client than of another, beyond a bound that does not
    /// grow with time.
    pub fn check(&mut self, schedule: &Schedule, is_healthy: bool) -> Result<(), String> {
        let always_wait = self.clients.values().all(|share| !share.backlogs.is_empty());
        if !is_healthy || !always_wait && self.clients.len() < MIN_CLOSED_LOOPS {
            return Ok(());
        }
        self.rounds += 1;
        if !self.rounds.is_multiple_of(CHECK_INTERVAL) {
            return Ok(());
        }
        let limit = schedule.config.max_tokens_per_step;
        let largest = self.clients.values().map(|share| share.largest_request).max().unwrap_or(0);
        // A client that sends one request at a time loses the rows that others get before its next request arrives.
        let on_the_way = if always_wait { 0 } else { MAX_DEBT_STEPS * limit };
        let bound = ((schedule.kinds.len() + 1) * limit + 2 * largest + on_the_way) as i64;
        for (ahead, of_ahead) in &self.clients {
            for (behind, of_behind) in &self.clients {
                let lead = of_ahead.rows - of_behind.rows;
                let least = self.least_lead.entry((*ahead, *behind)).or_insert(lead);
                *least = lead.min(*least);
                if lead - *least > bound {
                    return Err(format!(
                        "steps took {} rows more of client {ahead} than of client {behind}, over a stretch in which \
                         both wanted more; the bound is {bound}",
                        lead - *least
                    ));
                }
            }
        }
        Ok(())
    }
}
