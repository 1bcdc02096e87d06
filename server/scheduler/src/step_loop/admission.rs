//! Admission control and the inbox.

use std::sync::Arc;

use super::{Action, OnFault, Request, ServiceState, StepLoop};
use crate::inbox::{Admission, View};
use crate::recovery::jittered;
use crate::{Delivery, Inbox, RequestKey, Time, Unanswered};

/// Whether requests may be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Open,
    Recovering,
    NotReady,
    Ended,
}

/// The state that the inbox was told last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    waiting_tokens: usize,
    standing: Standing,
    ready_at: Option<Time>,
    tokens_per_second: f64,
}

impl StepLoop {
    /// Whether [`exchange`](Self::exchange) would tell the inbox something new.
    pub fn has_news_for_inbox(&self, now: Time) -> bool {
        self.told.is_none_or(|told| {
            told.waiting_tokens != self.queued_tokens()
                || told.standing != self.standing()
                || told.tokens_per_second != self.throughput.tokens_per_second()
                // While a generation is overdue, the expected time moves. The inbox is told again when the time it was told has passed.
                || told.ready_at.is_some_and(|ready_at| ready_at <= now)
        })
    }

    /// Exchanges state with the callers' side, under the lock. It takes constant time. The delivery must be given to
    /// [`receive`](Self::receive) after the lock is released.
    pub fn exchange<P>(&mut self, inbox: &mut Inbox<P>, now: Time) -> Delivery<P> {
        let admission = self.admission(now);
        let ready_at = match &admission {
            Admission::Recovering { ready_at, .. } | Admission::NotReady { ready_at, .. } => Some(*ready_at),
            Admission::Open | Admission::Ended { .. } => None,
        };
        let waiting_tokens = self.queued_tokens();
        let tokens_per_second = self.throughput.tokens_per_second();
        let (delivery, drain) = inbox.exchange(View { waiting_tokens, admission, tokens_per_second });
        if let Some(deadline) = drain
            && self.drain.replace(deadline).is_none()
            && self.ending.is_none()
            && !self.has_ended
        {
            self.show(ServiceState::Draining, "draining".into());
        }
        self.told = Some(Told {
            waiting_tokens: waiting_tokens + delivery.tokens(),
            standing: self.standing(),
            ready_at,
            tokens_per_second,
        });
        self.is_closed = self.ending.is_some();
        delivery
    }

    /// Queues the requests of a delivery. `keep` gets each request's `P`, before any action names the request.
    pub fn receive<P>(&mut self, delivery: Delivery<P>, now: Time, mut keep: impl FnMut(RequestKey, P)) {
        for mail in delivery.0 {
            keep(mail.key, mail.payload);
            let submission = mail.submission;
            self.gathering.arrived(submission.connection, submission.deadline);
            let request = Request {
                client: submission.client,
                connection: submission.connection,
                kind: submission.kind,
                tokens: submission.tokens,
                deadline: submission.deadline,
                admitted: mail.admitted,
                expected_version: submission.expected_version,
                completed: 0,
                begun: 0,
                first_step: None,
                lost_steps: 0,
                steps: Vec::new(),
                tokens_per_rank: Vec::new(),
                in_place: submission.in_place,
                withdrawn: None,
            };
            // The inbox learns of a fault or of the end at the next exchange; requests that arrived before are refused here.
            let refused = match self.admission(now) {
                Admission::Open => false,
                Admission::Recovering { ready_at, .. } => {
                    request.deadline.is_some_and(|deadline| deadline < ready_at)
                }
                Admission::NotReady { .. } | Admission::Ended { .. } => true,
            };
            if refused {
                let failure = self.unavailable(now);
                self.actions.push_back(Action::Fail { key: mail.key, failure });
                continue;
            }
            // Where no generation serves, the next one decides.
            if self.is_serving()
                && let Some(failure) = self.other_weights(&request)
            {
                self.actions.push_back(Action::Fail { key: mail.key, failure });
                continue;
            }
            self.queue.push(request.kind, request.client, mail.key, request.tokens);
            self.requests.insert(mail.key, request);
        }
    }

    /// Whether requests may be admitted, without the reason and the retry time for callers.
    fn standing(&self) -> Standing {
        if self.ending.is_some() || self.has_ended {
            Standing::Ended
        } else if self.is_serving() {
            Standing::Open
        } else if self.has_served && (self.config.on_fault == OnFault::Retry || self.is_replacement) {
            Standing::Recovering
        } else {
            Standing::NotReady
        }
    }

    pub(super) fn admission(&self, now: Time) -> Admission {
        let (reason, ready_at) = (&self.reason, || self.expected_ready(now));
        match self.standing() {
            Standing::Open => Admission::Open,
            Standing::Recovering => {
                Admission::Recovering { reason: Arc::clone(reason), ready_at: ready_at() }
            }
            Standing::NotReady => Admission::NotReady { reason: Arc::clone(reason), ready_at: ready_at() },
            Standing::Ended => Admission::Ended { reason: Arc::clone(reason) },
        }
    }

    pub(super) fn expected_ready(&self, now: Time) -> Time {
        let forming = self.group.filter(|_| !self.is_leaving());
        self.recovery.expected_ready(forming.map(|group| group.started), now)
    }

    /// The failure of requests that do not wait for the next generation.
    pub(super) fn unavailable(&mut self, now: Time) -> Unanswered {
        let wait = self.expected_ready(now).since(now);
        Unanswered::Unavailable {
            reason: Arc::clone(&self.reason),
            retry_after: jittered(wait, &mut self.jitter),
        }
    }
}
