//! Requests that wait for a step, fair between clients.
//!
//! One queue per lane (a layer, and what else the requests of a step must share); a step serves the lane whose oldest
//! request has waited longest. Within a lane, clients take turns by tokens served (start-time fair queueing: each client carries a virtual time that advances by the tokens it
//! was given; the client with the smallest one is next; a client that returns from idling starts at the current
//! minimum, so that it cannot save up credit. Goyal, Vin and Cheng, SIGCOMM 1996).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;
use std::time::Instant;

/// One waiting request.
#[derive(Debug)]
struct Waiting<I> {
    item: I,
    /// Rows not yet given to a step.
    tokens: usize,
    since: Instant,
}

#[derive(Debug)]
struct Client<I> {
    virtual_time: u64,
    waiting: VecDeque<Waiting<I>>,
}

#[derive(Debug)]
struct Lane<C, I> {
    /// Virtual time of the client served last: where newcomers start.
    virtual_now: u64,
    clients: HashMap<C, Client<I>>,
    /// Clients in order of arrival, to break ties the same way every time.
    order: Vec<C>,
}

/// Rows that a step takes of one request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Take<I> {
    /// The request.
    pub(super) item: I,
    /// Rows taken now; the first ones not taken before.
    pub(super) tokens: usize,
    /// Whether these are the last rows of the request.
    pub(super) last: bool,
}

/// Waiting requests `I` of clients `C` in lanes `L`.
#[derive(Debug)]
pub(super) struct FairQueue<L, C, I> {
    lanes: BTreeMap<L, Lane<C, I>>,
}

impl<L, C, I> Default for FairQueue<L, C, I> {
    fn default() -> Self {
        FairQueue { lanes: BTreeMap::new() }
    }
}

impl<L: Copy + Ord, C: Clone + Eq + Hash, I: Copy> FairQueue<L, C, I> {
    /// Adds a request of `tokens` rows (at least 1).
    pub(super) fn push(&mut self, lane: L, client: C, item: I, tokens: usize, since: Instant) {
        let queue = self.lanes.entry(lane).or_insert_with(|| Lane {
            virtual_now: 0,
            clients: HashMap::new(),
            order: Vec::new(),
        });
        let now = queue.virtual_now;
        let entry = queue.clients.entry(client.clone()).or_insert_with(|| {
            queue.order.push(client);
            Client { virtual_time: now, waiting: VecDeque::new() }
        });
        entry.waiting.push_back(Waiting { item, tokens, since });
    }

    /// The lane whose oldest request has waited longest.
    #[must_use]
    pub(super) fn next_lane(&self) -> Option<L> {
        self.lanes
            .iter()
            .filter_map(|(lane, queue)| queue.oldest().map(|since| (since, *lane)))
            .min()
            .map(|(_, lane)| lane)
    }

    /// When the oldest request of `lane` arrived.
    #[must_use]
    pub(super) fn oldest(&self, lane: L) -> Option<Instant> {
        self.lanes.get(&lane).and_then(Lane::oldest)
    }

    /// Rows waiting for `lane`.
    #[must_use]
    pub(super) fn waiting_tokens(&self, lane: L) -> usize {
        self.lanes
            .get(&lane)
            .map_or(0, |queue| queue.clients.values().flat_map(|c| &c.waiting).map(|w| w.tokens).sum())
    }

    /// Whether nothing waits.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Takes up to `limit` rows and `max_takes` requests for a step of `lane`.
    ///
    /// A request of at most `limit` rows is never split: if it does not fit beside what was taken, its client waits for
    /// the next step. A larger one is taken piece by piece and fills what room is left.
    pub(super) fn take(&mut self, lane: L, limit: usize, max_takes: usize) -> Vec<Take<I>> {
        let mut takes = Vec::new();
        let Some(queue) = self.lanes.get_mut(&lane) else { return takes };
        let mut room = limit;
        let mut passed: Vec<C> = Vec::new();
        while room > 0 && takes.len() < max_takes {
            let Some(key) = queue.next_client(&passed) else { break };
            let Some(client) = queue.clients.get_mut(&key) else { break };
            let Some(head) = client.waiting.front_mut() else { break };
            if head.tokens > room && head.tokens <= limit {
                passed.push(key);
                continue;
            }
            let tokens = head.tokens.min(room);
            head.tokens -= tokens;
            let last = head.tokens == 0;
            takes.push(Take { item: head.item, tokens, last });
            room -= tokens;
            queue.virtual_now = client.virtual_time;
            client.virtual_time += tokens as u64;
            if last {
                client.waiting.pop_front();
                if client.waiting.is_empty() {
                    queue.remove_client(&key);
                }
            }
        }
        if queue.clients.is_empty() {
            self.lanes.remove(&lane);
        }
        takes
    }

    /// Drops the requests that `gone` names and returns them with the rows they still had waiting.
    pub(super) fn remove_where(&mut self, mut gone: impl FnMut(I) -> bool) -> Vec<(I, usize)> {
        let mut removed = Vec::new();
        self.lanes.retain(|_, queue| {
            for client in queue.clients.values_mut() {
                client.waiting.retain(|w| {
                    let drop = gone(w.item);
                    if drop {
                        removed.push((w.item, w.tokens));
                    }
                    !drop
                });
            }
            queue.clients.retain(|_, client| !client.waiting.is_empty());
            let clients = &queue.clients;
            queue.order.retain(|key| clients.contains_key(key));
            !queue.clients.is_empty()
        });
        removed
    }
}

impl<C: Clone + Eq + Hash, I> Lane<C, I> {
    fn oldest(&self) -> Option<Instant> {
        self.clients.values().filter_map(|c| c.waiting.front()).map(|w| w.since).min()
    }

    /// The client with the smallest virtual time that is not in `passed`.
    fn next_client(&self, passed: &[C]) -> Option<C> {
        self.order
            .iter()
            .filter(|key| !passed.contains(key))
            .min_by_key(|key| self.clients.get(*key).map_or(u64::MAX, |c| c.virtual_time))
            .cloned()
    }

    fn remove_client(&mut self, key: &C) {
        self.clients.remove(key);
        self.order.retain(|k| k != key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const L0: u32 = 0;
    const L7: u32 = 7;

    fn at(ms: u64, start: Instant) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn the_lane_that_waited_longest_is_next() {
        let start = Instant::now();
        let mut q = FairQueue::default();
        q.push(L0, 'a', 1, 4, at(5, start));
        q.push(L7, 'a', 2, 4, at(3, start));
        assert_eq!(q.next_lane(), Some(L7));
        assert_eq!(q.take(L7, 100, 100), vec![Take { item: 2, tokens: 4, last: true }]);
        assert_eq!(q.next_lane(), Some(L0));
        assert_eq!(q.waiting_tokens(L0), 4);
        q.take(L0, 100, 100);
        assert!(q.is_empty());
        assert_eq!(q.next_lane(), None);
    }

    #[test]
    fn small_requests_are_never_split_and_large_ones_fill_steps() {
        let start = Instant::now();
        let mut q = FairQueue::default();
        q.push(L0, 'a', 1, 6, start);
        q.push(L0, 'b', 2, 6, start);
        q.push(L0, 'c', 3, 25, start);
        let first = q.take(L0, 10, 100);
        assert_eq!(
            first,
            vec![Take { item: 1, tokens: 6, last: true }, Take { item: 3, tokens: 4, last: false }]
        );
        let mut rows_of_3 = 4;
        let mut seen_2 = 0;
        while !q.is_empty() {
            let takes = q.take(L0, 10, 100);
            assert!(takes.iter().map(|t| t.tokens).sum::<usize>() <= 10);
            for t in takes {
                match t.item {
                    3 => rows_of_3 += t.tokens,
                    _ => {
                        assert_eq!((t.tokens, t.last), (6, true));
                        seen_2 += 1;
                    }
                }
            }
        }
        assert_eq!((rows_of_3, seen_2), (25, 1));
    }

    #[test]
    fn clients_share_a_saturated_lane_by_tokens() {
        let start = Instant::now();
        let mut q = FairQueue::default();
        // A flood of small requests against a client with few big ones.
        for i in 0..1000 {
            q.push(L0, "flood", i, 1, start);
        }
        for i in 0..10 {
            q.push(L0, "calm", 1000 + i, 8, start);
        }
        let mut served = HashMap::new();
        for _ in 0..10 {
            for t in q.take(L0, 16, 1000) {
                *served.entry(t.item >= 1000).or_insert(0) += t.tokens;
            }
        }
        assert_eq!(served[&true], 80, "the calm client gets its half of 160 rows");
        assert_eq!(served[&false], 80);
    }

    #[test]
    fn an_idle_client_does_not_save_up_credit() {
        let start = Instant::now();
        let mut q = FairQueue::default();
        for i in 0..100 {
            q.push(L0, 'a', i, 10, start);
        }
        for _ in 0..50 {
            q.take(L0, 10, 100);
        }
        for i in 100..150 {
            q.push(L0, 'b', i, 10, start);
        }
        let of_b = (0..20).flat_map(|_| q.take(L0, 10, 100)).filter(|t| t.item >= 100).count();
        assert!((9..=11).contains(&of_b), "b got {of_b} of 20 steps");
    }

    #[test]
    fn removed_requests_leave_the_queue() {
        let start = Instant::now();
        let mut q = FairQueue::default();
        q.push(L0, 'a', 1, 5, start);
        q.push(L7, 'b', 2, 6, start);
        q.push(L7, 'b', 3, 7, start);
        assert_eq!(q.remove_where(|i| i == 1 || i == 3), vec![(1, 5), (3, 7)]);
        assert_eq!(q.next_lane(), Some(L7));
        assert_eq!(q.take(L7, 100, 1), vec![Take { item: 2, tokens: 6, last: true }]);
        assert!(q.is_empty());
    }

    #[test]
    fn takes_are_bounded_in_number() {
        let start = Instant::now();
        let mut q = FairQueue::default();
        for i in 0..10 {
            q.push(L0, i, i, 1, start);
        }
        assert_eq!(q.take(L0, 100, 3).len(), 3);
    }
}
