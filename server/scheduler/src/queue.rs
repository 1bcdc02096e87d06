//! The queue of requests that wait for a step. It shares rows fairly between clients.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over all step kinds at once. Each client has a *start
//! tag*: the virtual time at which its next row begins. It advances by the rows that steps take of the client, in any kind, and is at
//! least the virtual time at which the client queued a request after it had nothing waiting. A step is formed for the kind whose
//! first client has the smallest start tag, and takes requests in the order of tags. Virtual time follows the start tags that were
//! served. It does not pass the tag of a client that waits or has rows in a step, so a client that sends its next request when the
//! last one is answered loses nothing in between.
//!
//! * A client with nothing waiting keeps its tag until virtual time has passed it, so that its use is not forgotten.
//! * A request that fits into a step is taken even if requests before it do not fit, so that no room is wasted. Its client is charged
//!   for it, up to the rows of [`MAX_DEBT_STEPS`] steps ahead of virtual time.
//! * Every [`AGED_STEP_INTERVAL`]th step serves the oldest request first, so that thousands of small steps of other kinds do not hold
//!   back a request of many rows.
//! * Suppose that at most [`AGED_STEP_INTERVAL`] clients always have requests waiting, in sizes that fill steps. Then over any stretch
//!   of time steps take at most (kinds + 1) × step limit + 2 × the largest request more rows of one client than of another. If there
//!   are more clients, the aged steps can give one of them more.
//!
//! Operations cost O(log n) in the waiting clients and requests. A client that waits in several kinds costs a further
//! O(log n) for each of them in each step that takes rows of it.

mod kind;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use self::kind::{KindQueue, Waiting};
use crate::hash::KeyMap;
use crate::{ClientKey, RequestKey, StepKind};

/// One step out of this number serves the oldest request first, instead of the smallest start tag.
pub const AGED_STEP_INTERVAL: u32 = 8;
/// A client's start tag is at most the rows of this number of steps ahead of virtual time. Aged steps, and steps that fill spare room,
/// take more rows of a client than its share; rows beyond this limit are not charged.
pub const MAX_DEBT_STEPS: usize = 4;
/// Largest number of clients with nothing waiting whose start tags are kept; if there are more, the smallest are dropped.
pub const MAX_IDLE_CLIENTS: usize = 16 << 10;
/// Largest number of clients that are skipped because their first request does not fit into the rest of a step.
pub const MAX_SKIPPED: usize = 32;

/// A client that has requests waiting or a start tag that virtual time has not passed.
#[derive(Clone, Debug)]
struct Client {
    start_tag: u64,
    /// The kinds in which it has requests waiting.
    kinds: Vec<StepKind>,
    /// Number of its requests in steps under way.
    in_steps: usize,
}

/// Rows that a step takes of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Take {
    pub(crate) key: RequestKey,
    /// Number of rows, which are the next ones of the request.
    pub(crate) tokens: usize,
}

/// The result of taking a step's requests out of the queue.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) takes: Vec<Take>,
    /// Requests that left the queue because they are unwanted.
    pub(crate) dropped: Vec<RequestKey>,
    /// Number of queue entries that were examined, a measure of the cost.
    pub(crate) examined: usize,
}

/// The waiting requests of all clients and kinds.
#[derive(Clone, Debug, Default)]
pub(crate) struct FairQueue {
    virtual_now: u64,
    tokens: usize,
    requests: usize,
    clients: KeyMap<ClientKey, Client>,
    kinds: BTreeMap<StepKind, KindQueue>,
    /// Kinds with requests, ordered by the start tag and the first request of each kind's first client.
    ranking: BTreeSet<(u64, RequestKey, StepKind)>,
    /// Clients with nothing waiting and rows in a step, by start tag.
    computing: BTreeSet<(u64, ClientKey)>,
    /// Clients with nothing waiting and nothing in a step, by start tag.
    idle: BTreeSet<(u64, ClientKey)>,
    /// Empty queues for reuse.
    spare: Vec<VecDeque<Waiting>>,
}

impl FairQueue {
    /// Number of waiting rows.
    pub(crate) const fn tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// Number of clients with nothing waiting whose start tags are kept.
    pub(crate) fn idle_clients(&self) -> usize {
        self.idle.len()
    }

    /// Number of waiting rows of `kind`.
    pub(crate) fn tokens_of(&self, kind: StepKind) -> usize {
        self.kinds.get(&kind).map_or(0, KindQueue::tokens)
    }

    /// The request of `kind` that was admitted first, among those that wait.
    pub(crate) fn oldest(&self, kind: StepKind) -> Option<RequestKey> {
        self.kinds.get(&kind).and_then(KindQueue::oldest)
    }

    /// Kinds with waiting requests, the one with the smallest start tag first.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = StepKind> {
        self.ranking.iter().map(|(_, _, kind)| *kind)
    }

    /// Adds a request of `tokens` rows, at least 1, after the client's other requests of its kind.
    pub(crate) fn push(&mut self, kind: StepKind, client: ClientKey, key: RequestKey, tokens: usize) {
        let tag = self.activate(client, kind);
        self.edit(kind, |queue, spare| queue.push(tag, client, Waiting { key, tokens }, spare));
        self.tokens += tokens;
        self.requests += 1;
    }

    /// Puts back rows that a step took but did not compute, before the client's other requests, and takes back their charge.
    /// Callers put back the youngest request of a client first, so that the oldest one is first in the queue.
    pub(crate) fn put_back(&mut self, kind: StepKind, client: ClientKey, key: RequestKey, tokens: usize) {
        let tag = self.activate(client, kind);
        let new = self.edit(kind, |queue, spare| queue.put_back(tag, client, Waiting { key, tokens }, spare));
        self.tokens += tokens;
        self.requests += usize::from(new);
        self.set_tag(client, tag.saturating_sub(tokens as u64), None);
    }

    /// Removes a request. Returns the number of its waiting rows.
    pub(crate) fn remove(&mut self, kind: StepKind, client: ClientKey, key: RequestKey) -> Option<usize> {
        let tag = self.clients.get(&client)?.start_tag;
        let (tokens, last) = self.edit(kind, |queue, spare| queue.remove(tag, client, key, spare))?;
        self.tokens -= tokens;
        self.requests -= 1;
        if last {
            self.leave_kind(client, kind);
        }
        Some(tokens)
    }

    /// Takes up to `limit` rows and `max_takes` requests of `kind`: first `lead` if it is the oldest request, then requests of clients
    /// in the order of start tags. Requests for which `unwanted` is true leave the queue.
    ///
    /// A request of at most `limit` rows is never split: if it does not fit into the rest of the step, its client waits for the next
    /// step. A larger request is taken range by range and fills the rest of the step.
    pub(crate) fn take(
        &mut self,
        kind: StepKind,
        limit: usize,
        max_takes: usize,
        lead: Option<RequestKey>,
        mut unwanted: impl FnMut(RequestKey) -> bool,
    ) -> Taken {
        let mut taken = Taken::default();
        let Some(mut queue) = self.begin_edit(kind) else { return taken };
        let mut room = limit;
        let mut served_tag = self.virtual_now;
        let mut skipped = Vec::new();
        // Clients that also wait in other kinds, with their tags there.
        let mut charged: KeyMap<ClientKey, u64> = KeyMap::default();
        let mut lead = queue
            .oldest_of()
            .filter(|(key, _)| lead == Some(*key))
            .and_then(|(key, client)| self.clients.get(&client).map(|state| (state.start_tag, key, client)));
        while room > 0 && taken.takes.len() < max_takes && skipped.len() < MAX_SKIPPED {
            let Some((tag, head, client)) = lead.take().or_else(|| queue.first()) else { break };
            taken.examined += 1;
            let Some(waiting) = queue.head(client) else { break };
            if unwanted(head) {
                taken.dropped.push(head);
                self.tokens -= waiting.tokens;
                self.requests -= 1;
                if queue.pop_head((tag, head, client), tag, &mut self.spare) {
                    self.leave_kind(client, kind);
                }
                continue;
            }
            if waiting.tokens > room && waiting.tokens <= limit {
                queue.skip((tag, head, client));
                skipped.push((tag, head, client));
                continue;
            }
            let tokens = waiting.tokens.min(room);
            let most = self.virtual_now + (MAX_DEBT_STEPS * limit) as u64;
            let next_tag = (tag + tokens as u64).min(most).max(tag);
            let whole = tokens == waiting.tokens;
            taken.takes.push(Take { key: head, tokens });
            room -= tokens;
            self.tokens -= tokens;
            served_tag = served_tag.max(tag);
            if let Some(state) = self.clients.get_mut(&client) {
                state.start_tag = next_tag;
                state.in_steps += 1;
                if state.kinds.len() > 1 {
                    charged.entry(client).or_insert(tag);
                }
            }
            if whole {
                self.requests -= 1;
                if queue.pop_head((tag, head, client), next_tag, &mut self.spare) {
                    self.leave_kind(client, kind);
                }
            } else {
                queue.shorten_head((tag, head, client), next_tag, tokens);
            }
        }
        for place in skipped {
            queue.unskip(place);
        }
        self.end_edit(kind, queue);
        for (client, old_tag) in charged {
            if let Some(tag) = self.clients.get(&client).map(|state| state.start_tag) {
                self.restate_tag(client, old_tag, tag, Some(kind));
            }
        }
        let waiting_tag = self.ranking.first().map_or(u64::MAX, |(tag, _, _)| *tag);
        let computing_tag = self.computing.first().map_or(u64::MAX, |(tag, _)| *tag);
        self.virtual_now = self.virtual_now.max(served_tag.min(waiting_tag).min(computing_tag));
        self.forget_passed();
        taken
    }

    /// Call when a step's request of `client` is complete, or before it is put back with [`put_back`](Self::put_back).
    pub(crate) fn release(&mut self, client: ClientKey) {
        self.unlist(client);
        if let Some(state) = self.clients.get_mut(&client) {
            state.in_steps = state.in_steps.saturating_sub(1);
        }
        self.list(client);
        self.forget_passed();
    }

    /// Drops all start tags. Must be called only when nothing waits and no step is under way.
    pub(crate) fn end_busy_period(&mut self) {
        if let Some((tag, _)) = self.idle.last() {
            self.virtual_now = self.virtual_now.max(*tag);
            self.forget_passed();
        }
    }

    /// Notes that `client` waits in `kind` from now on. Returns its start tag.
    fn activate(&mut self, client: ClientKey, kind: StepKind) -> u64 {
        let now = self.virtual_now;
        self.unlist(client);
        let new = || Client { start_tag: now, kinds: Vec::new(), in_steps: 0 };
        let state = self.clients.entry(client).or_insert_with(new);
        if state.kinds.is_empty() {
            state.start_tag = state.start_tag.max(now);
        }
        if !state.kinds.contains(&kind) {
            state.kinds.push(kind);
        }
        state.start_tag
    }

    /// Notes that `client` no longer has anything waiting in `kind`.
    fn leave_kind(&mut self, client: ClientKey, kind: StepKind) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.kinds.retain(|other| *other != kind);
        self.list(client);
    }

    /// The set that contains `client`, which has nothing waiting.
    fn listing(&mut self, client: ClientKey) -> Option<(u64, &mut BTreeSet<(u64, ClientKey)>)> {
        let state = self.clients.get(&client).filter(|state| state.kinds.is_empty())?;
        Some((state.start_tag, if state.in_steps > 0 { &mut self.computing } else { &mut self.idle }))
    }

    fn list(&mut self, client: ClientKey) {
        if let Some((tag, set)) = self.listing(client) {
            set.insert((tag, client));
        }
    }

    fn unlist(&mut self, client: ClientKey) {
        if let Some((tag, set)) = self.listing(client) {
            set.remove(&(tag, client));
        }
    }

    /// Gives a waiting client another start tag, in every kind but `except`.
    fn set_tag(&mut self, client: ClientKey, tag: u64, except: Option<StepKind>) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let old = std::mem::replace(&mut state.start_tag, tag);
        self.restate_tag(client, old, tag, except);
    }

    fn restate_tag(&mut self, client: ClientKey, old: u64, new: u64, except: Option<StepKind>) {
        let Some(state) = self.clients.get(&client) else { return };
        for kind in state.kinds.clone() {
            if Some(kind) != except {
                self.edit(kind, |queue, _| queue.restate(client, old, new));
            }
        }
    }

    /// Drops the start tags of clients with nothing waiting that virtual time has passed, and those beyond the limit.
    fn forget_passed(&mut self) {
        while let Some((tag, client)) = self.idle.first().copied() {
            if tag > self.virtual_now {
                if self.idle.len() <= MAX_IDLE_CLIENTS {
                    break;
                }
                self.virtual_now = tag;
            }
            self.idle.pop_first();
            self.clients.remove(&client);
        }
    }

    /// Changes the queue of one kind and updates the ranking of kinds.
    fn edit<R>(
        &mut self,
        kind: StepKind,
        change: impl FnOnce(&mut KindQueue, &mut Vec<VecDeque<Waiting>>) -> R,
    ) -> R {
        let queue = self.kinds.entry(kind).or_default();
        let before = queue.first();
        let result = change(queue, &mut self.spare);
        let after = queue.first();
        if before != after {
            if let Some((tag, head, _)) = before {
                self.ranking.remove(&(tag, head, kind));
            }
            if let Some((tag, head, _)) = after {
                self.ranking.insert((tag, head, kind));
            }
        }
        result
    }

    /// Takes the queue of one kind out of the ranking, for several changes.
    fn begin_edit(&mut self, kind: StepKind) -> Option<KindQueue> {
        let queue = std::mem::take(self.kinds.get_mut(&kind)?);
        if let Some((tag, head, _)) = queue.first() {
            self.ranking.remove(&(tag, head, kind));
        }
        Some(queue)
    }

    fn end_edit(&mut self, kind: StepKind, queue: KindQueue) {
        if let Some((tag, head, _)) = queue.first() {
            self.ranking.insert((tag, head, kind));
        }
        self.kinds.insert(kind, queue);
    }
}
