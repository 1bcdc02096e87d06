//! The wait for connections of the last step, whose next calls may join the next one.

use std::time::Duration;

use crate::{ConnectionKey, Time};

/// The wait lasts at most this part of the last step's time.
const SHARE: u32 = 8;
/// A wait that could only be shorter than this does not begin: no answer reaches a client and brings the next call sooner.
const MIN_WAIT: Duration = Duration::from_micros(20);
/// Longest wait. A step that a debugger or a suspend stopped says nothing about clients.
const MAX_WAIT: Duration = Duration::from_millis(5);
/// Number of connections that are waited for. With more, a step has rows enough.
const MAX_AWAITED: usize = 64;
/// Largest number of steps without a wait after waits that nothing joined.
const MAX_PAUSE: u32 = 62;

/// Decides how long waiting requests are held back for connections that were in the last step.
///
/// A step that is formed the moment it could be has the requests that waited while the last one ran; the connections that are answered
/// then come back too late, and two groups of clients take turns although a step of all of them costs less than two. The wait begins
/// when the last step's experts phase ends, and is over when each of its connections has sent a request. Waits whose step none of those
/// joins that came meanwhile are followed by 2, 6, 14, up to [`MAX_PAUSE`] steps without a wait. These numbers are even, so that of two
/// groups that take turns not always the same one is waited for.
#[derive(Clone, Debug, Default)]
pub(super) struct Gathering {
    /// Connections of the last step that have sent nothing since it was formed.
    absent: Vec<ConnectionKey>,
    /// Those that were absent when the wait began, and have sent something since.
    came: Vec<ConnectionKey>,
    /// The earliest deadline of the requests that have arrived since it was formed.
    due: Option<Time>,
    /// How long the last step took whose experts phase has ended.
    took: Duration,
    /// The wait's begin and end, once the last step's experts phase has ended.
    wait: Option<(Time, Time)>,
    /// Number of steps that form without a wait, and of those after the next wait that nothing joins.
    pause: u32,
    next_pause: u32,
}

impl Gathering {
    /// The wait's end, for a step whose oldest request is from `connection` and has this deadline. `None`: it forms at once. Requests of a
    /// connection do not wait for that connection, and none waits if its deadline, or one that has arrived since, is near.
    pub(super) fn until(&self, connection: ConnectionKey, deadline: Option<Time>) -> Option<Time> {
        let (_, end) = self.wait?;
        let waits = self.pause == 0 && !self.absent.is_empty() && !self.absent.contains(&connection);
        let is_in_time = |due: Time| end + self.took < due;
        (waits && deadline.into_iter().chain(self.due).all(is_in_time)).then_some(end)
    }

    /// The wait's end, whatever waits.
    pub(super) fn end(&self) -> Option<Time> {
        self.wait.map(|(_, until)| until)
    }

    /// A connection has sent a request.
    pub(super) fn arrived(&mut self, connection: ConnectionKey, deadline: Option<Time>) {
        if let Some(at) = self.absent.iter().position(|absent| *absent == connection) {
            self.absent.swap_remove(at);
            self.came.extend(self.wait.map(|_| connection));
        }
        self.due = self.due.into_iter().chain(deadline).min();
    }

    /// The experts phase of the last step, which was formed at `formed`, has ended, or all of that step.
    pub(super) fn experts_ended(&mut self, formed: Time, now: Time) {
        if self.wait.is_some() {
            return;
        }
        // The shorter of the last two steps decides: short steps do not wait long after a long one.
        let took = now.since(formed);
        let wait = took.min(self.took) / SHARE;
        self.took = took;
        let wait = if wait < MIN_WAIT { Duration::ZERO } else { wait.min(MAX_WAIT) };
        self.wait = Some((now, now + wait));
    }

    /// A step of `connections` is formed. Its oldest request arrived at `arrived`.
    pub(super) fn formed(
        &mut self,
        connections: impl Iterator<Item = ConnectionKey>,
        arrived: Time,
        now: Time,
    ) {
        let has_waited = self.wait.is_some_and(|(from, until)| arrived.max(from) < until && until <= now);
        let was_held = has_waited && !self.absent.is_empty() || !self.came.is_empty();
        self.absent.clear();
        self.absent.extend(connections.take(MAX_AWAITED));
        self.absent.sort_unstable();
        self.absent.dedup();
        if self.pause == 0 && was_held && !self.absent.is_empty() {
            let has_joined = self.came.iter().any(|connection| self.absent.contains(connection));
            if has_joined && self.absent.len() > 1 {
                self.next_pause = 0;
            } else if !has_joined {
                self.next_pause = (2 * self.next_pause + 2).min(MAX_PAUSE);
                self.pause = self.next_pause + 1;
            }
        }
        self.pause = self.pause.saturating_sub(1);
        self.came.clear();
        (self.due, self.wait) = (None, None);
    }
}
