//! A line in which callers wait for something that others leave.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Callers get room in the order in which they joined the line.
#[derive(Debug, Default)]
pub(crate) struct Line {
    state: Mutex<State>,
    /// Signalled when `State::departures` changes.
    departed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Counts those that left the room or the line.
    departures: u64,
    next_ticket: u64,
    waiting: BTreeSet<u64>,
}

/// A place in the line, until it is dropped.
pub(crate) struct Ticket<'a> {
    line: &'a Line,
    number: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.line.state().waiting.remove(&self.number);
        self.line.depart();
    }
}

impl Line {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often room was left so far.
    pub(crate) fn departures(&self) -> u64 {
        self.state().departures
    }

    /// Tells the line that there may be room.
    pub(crate) fn depart(&self) {
        self.state().departures += 1;
        self.departed.notify_all();
    }

    /// Whether a caller may take room: it is the first in line, or there is no line.
    pub(crate) fn is_next(&self, ticket: Option<&Ticket<'_>>) -> bool {
        let state = self.state();
        match ticket {
            Some(ticket) => state.waiting.first() == Some(&ticket.number),
            None => state.waiting.is_empty(),
        }
    }

    /// Joins the end of the line.
    pub(crate) fn join(&self) -> Ticket<'_> {
        let mut state = self.state();
        let number = state.next_ticket;
        state.next_ticket += 1;
        state.waiting.insert(number);
        Ticket { line: self, number }
    }

    /// Waits until the number of departures is no longer `seen`, for `interval` at most.
    pub(crate) fn wait(&self, seen: u64, interval: Duration) {
        let waited =
            self.departed.wait_timeout_while(self.state(), interval, |state| state.departures == seen);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
