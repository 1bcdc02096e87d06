//! Requests that wait for a step, fair between clients by rows.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over all step kinds at once. Each client has a *start
//! tag*: the virtual time at which its next row begins. It advances by the rows that steps take of the client, whatever
//! their kind, and is at least the virtual time at which the client, having nothing waiting, queued something again. A
//! step is formed for the kind whose first client has the smallest start tag, and takes requests in the order of tags.
//! Virtual time follows the start tags that were served, and does not pass the tag of a client that waits or has rows in a
//! step: a client that sends its next request when the last one is answered loses nothing meanwhile.
//!
//! * A client that had nothing waiting keeps its tag until virtual time has passed it: what it used is not forgotten.
//! * A request that fits is taken though others before it do not fit: room is not wasted. Its client is charged, up to
//!   [`MAX_DEBT_STEPS`] steps' rows ahead of virtual time.
//! * Every [`AGED_STEP_INTERVAL`]th step goes to the oldest request, so that a request of many rows is not held back by
//!   thousands of small steps of other kinds.
//! * Let requests of at most [`AGED_STEP_INTERVAL`] clients always wait, in sizes that fill steps. Over any stretch steps
//!   take at most (kinds + 1) × step limit + 2 × the largest request more rows of one than of another. With more clients
//!   aged steps, one in [`AGED_STEP_INTERVAL`], can give one of them more.
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

/// One step in this many goes to the oldest request instead of the smallest start tag.
pub const AGED_STEP_INTERVAL: u32 = 8;
/// A client's start tag lies at most the rows of this many steps ahead of virtual time. Steps that had room to spare, and
/// aged ones, take more rows of a client than its share; beyond this they are forgiven.
pub const MAX_DEBT_STEPS: usize = 4;
/// Clients with nothing waiting whose use is remembered; beyond that the smallest start tags are forgotten.
pub const MAX_IDLE_CLIENTS: usize = 16 << 10;
/// Clients whose first request does not fit beside what a step has already, after which the step is as full as it gets.
pub const MAX_SKIPPED: usize = 32;

/// A client that has requests waiting or a start tag that virtual time has not passed.
#[derive(Clone, Debug)]
struct Client {
    start_tag: u64,
    /// The kinds in which it has requests waiting.
    kinds: Vec<StepKind>,
    /// Requests that steps under way took of it.
    in_steps: usize,
}

/// Rows that a step takes of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Take {
    pub(crate) key: RequestKey,
    /// The next rows of the request, as many as these.
    pub(crate) tokens: usize,
}

/// What a step takes out of the queue.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) takes: Vec<Take>,
    /// Requests that left the queue because they are not wanted any more.
    pub(crate) dropped: Vec<RequestKey>,
    /// Queue entries that were examined: the cost.
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
    /// Kinds with requests, by the start tag and the first request of the client that comes first in each.
    ranking: BTreeSet<(u64, RequestKey, StepKind)>,
    /// Clients with nothing waiting and rows in a step, by start tag.
    computing: BTreeSet<(u64, ClientKey)>,
    /// Clients with nothing waiting and nothing in a step, by start tag.
    idle: BTreeSet<(u64, ClientKey)>,
    /// Empty queues for reuse.
    spare: Vec<VecDeque<Waiting>>,
}

impl FairQueue {
    /// Waiting rows.
    pub(crate) const fn tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// Clients that are remembered though they have nothing waiting.
    pub(crate) fn idle_clients(&self) -> usize {
        self.idle.len()
    }

    /// Waiting rows of `kind`.
    pub(crate) fn tokens_of(&self, kind: StepKind) -> usize {
        self.kinds.get(&kind).map_or(0, KindQueue::tokens)
    }

    /// The request of `kind` that was admitted first.
    pub(crate) fn oldest(&self, kind: StepKind) -> Option<RequestKey> {
        self.kinds.get(&kind).and_then(KindQueue::oldest)
    }

    /// Kinds with waiting requests, the one with the smallest start tag first.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = StepKind> {
        self.ranking.iter().map(|(_, _, kind)| *kind)
    }

    /// Adds a request of `tokens` rows, at least 1, behind the client's others of its kind.
    pub(crate) fn push(&mut self, kind: StepKind, client: ClientKey, key: RequestKey, tokens: usize) {
        let tag = self.activate(client, kind);
        self.edit(kind, |queue, spare| queue.push(tag, client, Waiting { key, tokens }, spare));
        self.tokens += tokens;
        self.requests += 1;
    }

    /// Puts rows back that a step took and did not compute: before the client's other requests, and no longer charged.
    /// Put back the youngest request of a client first, so that the oldest one comes to stand in front.
    pub(crate) fn put_back(&mut self, kind: StepKind, client: ClientKey, key: RequestKey, tokens: usize) {
        let tag = self.activate(client, kind);
        let new = self.edit(kind, |queue, spare| queue.put_back(tag, client, Waiting { key, tokens }, spare));
        self.tokens += tokens;
        self.requests += usize::from(new);
        self.set_tag(client, tag.saturating_sub(tokens as u64), None);
    }

    /// Takes a request out; its waiting rows.
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

    /// Takes up to `limit` rows and `max_takes` requests of `kind`: first `lead`, if it is the oldest one, then of the
    /// client with the smallest start tag, and so on. Requests that `unwanted` names leave the queue.
    ///
    /// A request of at most `limit` rows is never split: if it does not fit beside what was taken, its client waits for
    /// the next step. A larger one is taken range by range and fills what room is left.
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
        // Clients that wait in other kinds, too, with the tags under which they stand there.
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

    /// A request that a step took of `client` is complete, or comes back with [`put_back`](Self::put_back).
    pub(crate) fn release(&mut self, client: ClientKey) {
        self.unlist(client);
        if let Some(state) = self.clients.get_mut(&client) {
            state.in_steps = state.in_steps.saturating_sub(1);
        }
        self.list(client);
        self.forget_passed();
    }

    /// Everything that was used is forgotten. For the moment when nothing waits and no step is under way.
    pub(crate) fn end_busy_period(&mut self) {
        if let Some((tag, _)) = self.idle.last() {
            self.virtual_now = self.virtual_now.max(*tag);
            self.forget_passed();
        }
    }

    /// The start tag under which `client` waits in `kind` from now on.
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

    /// Notes that `client` has nothing waiting in `kind` any more.
    fn leave_kind(&mut self, client: ClientKey, kind: StepKind) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.kinds.retain(|other| *other != kind);
        self.list(client);
    }

    /// The set in which a client with nothing waiting stands.
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

    /// Forgets clients with nothing waiting whose start tag virtual time has passed, and those beyond the limit.
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

    /// Changes the queue of one kind and keeps the ranking of kinds true.
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
