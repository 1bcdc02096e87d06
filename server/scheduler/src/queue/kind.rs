//! The waiting requests of one step kind.

use std::collections::{BTreeSet, VecDeque};

use crate::hash::KeyMap;
use crate::{ClientKey, RequestKey};

/// One waiting request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) key: RequestKey,
    /// Number of rows that no step has taken.
    pub(super) tokens: usize,
}

/// The place of a client in the order: by its start tag, then by its first request.
pub(super) type Place = (u64, RequestKey, ClientKey);

#[derive(Clone, Debug, Default)]
pub(super) struct KindQueue {
    tokens: usize,
    /// One entry per client.
    order: BTreeSet<Place>,
    /// Each client's requests, the oldest first.
    clients: KeyMap<ClientKey, VecDeque<Waiting>>,
    /// Each request with its client.
    requests: BTreeSet<(RequestKey, ClientKey)>,
}

impl KindQueue {
    pub(super) const fn tokens(&self) -> usize {
        self.tokens
    }

    pub(super) fn oldest(&self) -> Option<RequestKey> {
        self.requests.first().map(|(key, _)| *key)
    }

    pub(super) fn first(&self) -> Option<Place> {
        self.order.first().copied()
    }

    /// The oldest request and its client. It is the client's first request.
    pub(super) fn oldest_of(&self) -> Option<(RequestKey, ClientKey)> {
        self.requests.first().copied()
    }

    pub(super) fn head(&self, client: ClientKey) -> Option<Waiting> {
        self.clients.get(&client)?.front().copied()
    }

    pub(super) fn push(
        &mut self,
        tag: u64,
        client: ClientKey,
        waiting: Waiting,
        spare: &mut Vec<VecDeque<Waiting>>,
    ) {
        self.tokens += waiting.tokens;
        self.requests.insert((waiting.key, client));
        let queue = self.clients.entry(client).or_insert_with(|| spare.pop().unwrap_or_default());
        if queue.is_empty() {
            self.order.insert((tag, waiting.key, client));
        }
        queue.push_back(waiting);
    }

    /// Puts rows back at the front. Returns whether the request had no other rows waiting.
    pub(super) fn put_back(
        &mut self,
        tag: u64,
        client: ClientKey,
        waiting: Waiting,
        spare: &mut Vec<VecDeque<Waiting>>,
    ) -> bool {
        self.tokens += waiting.tokens;
        let queue = self.clients.entry(client).or_insert_with(|| spare.pop().unwrap_or_default());
        match queue.front_mut() {
            Some(head) if head.key == waiting.key => {
                head.tokens += waiting.tokens;
                return false;
            }
            Some(head) => {
                self.order.remove(&(tag, head.key, client));
            }
            None => {}
        }
        self.order.insert((tag, waiting.key, client));
        self.requests.insert((waiting.key, client));
        queue.push_front(waiting);
        true
    }

    /// Removes a request. Returns the number of its rows, and whether the client has no other request of this kind.
    pub(super) fn remove(
        &mut self,
        tag: u64,
        client: ClientKey,
        key: RequestKey,
        spare: &mut Vec<VecDeque<Waiting>>,
    ) -> Option<(usize, bool)> {
        let queue = self.clients.get_mut(&client)?;
        let at = queue.binary_search_by_key(&key, |waiting| waiting.key).ok()?;
        if at == 0 {
            let tokens = queue[0].tokens;
            return Some((tokens, self.pop_head((tag, key, client), tag, spare)));
        }
        let waiting = queue.remove(at)?;
        self.tokens -= waiting.tokens;
        self.requests.remove(&(key, client));
        Some((waiting.tokens, false))
    }

    /// Drops the first request of the client at `place` and moves the client to `tag`. Returns whether it was the last request.
    pub(super) fn pop_head(&mut self, place: Place, tag: u64, spare: &mut Vec<VecDeque<Waiting>>) -> bool {
        let (_, _, client) = place;
        self.order.remove(&place);
        let Some(queue) = self.clients.get_mut(&client) else { return true };
        if let Some(head) = queue.pop_front() {
            self.tokens -= head.tokens;
            self.requests.remove(&(head.key, client));
        }
        match queue.front() {
            Some(next) => {
                self.order.insert((tag, next.key, client));
                false
            }
            None => {
                spare.extend(self.clients.remove(&client));
                true
            }
        }
    }

    /// Takes `tokens` rows of the first request of the client at `place` and moves the client to `tag`.
    pub(super) fn shorten_head(&mut self, place: Place, tag: u64, tokens: usize) {
        let (_, head, client) = place;
        self.order.remove(&place);
        self.order.insert((tag, head, client));
        if let Some(waiting) = self.clients.get_mut(&client).and_then(VecDeque::front_mut) {
            waiting.tokens -= tokens;
            self.tokens -= tokens;
        }
    }

    /// Leaves a client out until [`unskip`](Self::unskip).
    pub(super) fn skip(&mut self, place: Place) {
        self.order.remove(&place);
    }

    pub(super) fn unskip(&mut self, place: Place) {
        self.order.insert(place);
    }

    /// Moves a client from one start tag to another.
    pub(super) fn restate(&mut self, client: ClientKey, old: u64, new: u64) {
        if let Some(head) = self.clients.get(&client).and_then(VecDeque::front)
            && self.order.remove(&(old, head.key, client))
        {
            self.order.insert((new, head.key, client));
        }
    }
}
