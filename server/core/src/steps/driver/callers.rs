//! The callers' side: mail, answers, failures, reloads, and the memories of clients.

use std::time::Instant;

use expertd_ipc::control::CheckpointSource;
use expertd_scheduler::{
    self as scheduler, Ask, Attachment, Callers, Mail, MemoryMail as Memory, Receipt, ReloadFailure,
    Reloaded, RequestKey, ServiceState, StepLoop, Time,
};
use expertd_types::MemoryId;
use tokio::sync::oneshot;

use super::Processes;
use crate::backend::{DrainReport, ReloadReport};
use crate::failure::Failure;
use crate::steps::active::Active;
use crate::steps::shared::{MemoryMail, Payload, ReloadMail};
use expertd_telemetry::names;

/// Receiver of a reload's result.
type Ticket = oneshot::Sender<Result<ReloadReport, String>>;

impl Callers for Processes {
    type Payload = Payload;
    type Source = CheckpointSource;
    type Ticket = Ticket;

    fn now(&self) -> Time {
        self.shared.time(Instant::now())
    }

    fn take_mail_flag(&mut self) -> bool {
        self.shared.take_mail_flag()
    }

    fn exchange(&mut self, steps: &mut StepLoop, now: Time) -> Mail<Payload, CheckpointSource, Ticket> {
        let mut front = self.shared.front();
        let delivery = steps.exchange(&mut front.inbox, now);
        let reloads = std::mem::take(&mut front.reloads);
        let memories = std::mem::take(&mut front.memories);
        drop(front);
        let ask = |ReloadMail { source, checked_against, has_room, reply }| Ask {
            source,
            checked_against,
            has_room,
            ticket: reply,
        };
        let clients = &mut self.clients;
        let take_in = |mail| match mail {
            MemoryMail::Opened(client) => {
                let memory = client.id();
                clients.insert(memory, client);
                Memory::Opened(memory)
            }
            MemoryMail::Ended(memory) => Memory::Ended(memory),
        };
        Mail {
            delivery,
            reloads: reloads.into_iter().map(ask).collect(),
            memories: memories.into_iter().map(take_in).collect(),
        }
    }

    fn keep(&mut self, key: RequestKey, Payload { request, caller }: Payload) {
        self.active.insert(key, Active::new(request, caller, self.cluster.shape.hidden));
    }

    fn has_left(&self, key: RequestKey) -> bool {
        self.active.get(&key).is_none_or(Active::is_cancelled)
    }

    fn memory_of(&self, key: RequestKey) -> Option<MemoryId> {
        self.active.get(&key)?.memory()
    }

    fn answer(&mut self, key: RequestKey, receipt: Receipt) {
        if let Some(active) = self.active.remove(&key) {
            active.answer(receipt, self.shared.fingerprint(), self.launched.is_empty());
        }
    }

    fn fail(&mut self, key: RequestKey, failure: scheduler::Unanswered) {
        let Some(active) = self.active.remove(&key) else { return };
        let request = active.request();
        match failure {
            scheduler::Unanswered::Unavailable { reason, retry_after } => {
                active.fail(Failure::Unavailable { reason: reason.as_ref().to_owned(), retry_after });
            }
            scheduler::Unanswered::DeadlineExceeded => active.fail(Failure::DeadlineExceeded),
            scheduler::Unanswered::OtherWeights { expected, loaded } => {
                active.fail(Failure::OtherWeights { expected, loaded });
            }
            scheduler::Unanswered::Cancelled => {
                tracing::debug!(request = %request.id, "cancelled");
                metrics::counter!(names::REQUESTS_CANCELLED_TOTAL).increment(1);
            }
            scheduler::Unanswered::Poisoned { lost_steps } => {
                tracing::error!(
                    request = %request.id, layer = %request.layer, tokens = request.tokens, dtype = %request.dtype,
                    k = request.routing.as_ref().map(|given| given.k), lost_steps,
                    "a request ended a generation that computed nothing else; it will not be retried"
                );
                metrics::counter!(names::REQUESTS_POISONED_TOTAL).increment(1);
                active.fail(Failure::Poisoned { lost_steps });
            }
        }
    }

    fn restart(&mut self, key: RequestKey) {
        if let Some(active) = self.active.get_mut(&key) {
            active.restart();
        }
    }

    fn show(&mut self, state: ServiceState, reason: &str) {
        self.shared.set_state(state, reason);
        let name = format!("{state:?}").to_lowercase();
        let reason = Some(reason).filter(|reason| !reason.is_empty() && *reason != name);
        tracing::info!(reason, "state: {name}");
    }

    fn report_drain(&mut self, requests_dropped: u64) {
        let dropped = Some(requests_dropped).filter(|&dropped| dropped > 0);
        tracing::info!(requests_dropped = dropped, "drained");
        for waiter in std::mem::take(&mut self.shared.front().drain_waiters) {
            let _ = waiter.send(DrainReport { requests_dropped });
        }
    }

    fn end_reload(&mut self, reply: Ticket, end: Result<Reloaded, ReloadFailure>) {
        if !matches!(end, Err(ReloadFailure::Refused(_))) {
            self.show_reload(None);
        }
        let result = match end {
            Ok(Reloaded { version, load_time, pause }) => {
                let weight_fingerprint = self.shared.fingerprint();
                tracing::info!(
                    version = version.0,
                    fingerprint = %weight_fingerprint,
                    load_seconds = load_time.as_secs_f64(),
                    pause_seconds = pause.as_secs_f64(),
                    "new weights serve"
                );
                Ok(ReloadReport { weight_version: version, weight_fingerprint, load_time, pause })
            }
            Err(ReloadFailure::Refused(reason)) => {
                tracing::warn!(reason, "the reload is refused");
                Err(reason)
            }
            Err(ReloadFailure::GoOn(reason)) => {
                tracing::error!(reason, "the new weights could not be loaded; the present ones go on");
                Err(reason)
            }
            Err(ReloadFailure::Again(reason)) => {
                tracing::error!(
                    reason,
                    "the new weights could not be loaded; the earlier ones are loaded again"
                );
                Err(reason)
            }
            Err(ReloadFailure::NotServed(fault)) => {
                tracing::error!(%fault, "no generation serves the new weights; the earlier ones go on");
                Err(format!("the generation with the new weights ended: {fault}"))
            }
        };
        let _ = reply.send(result);
    }

    fn set_attachment(&mut self, memory: MemoryId, attachment: Attachment) {
        if let Attachment::Refused(reason) = &attachment {
            tracing::warn!(%memory, reason, "a rank cannot use a session's memory");
        }
        if let Some(client) = self.clients.get(&memory) {
            tracing::debug!(%memory, ?attachment, "what ranks have of a memory");
            client.set_attachment(attachment);
        }
    }

    fn end_session(&mut self, memory: MemoryId, left: &[u32]) {
        let reason = "ranks that were killed do not end and may still write to the session's memory; open another session";
        tracing::error!(session = %memory, processes = ?left, reason, "the service ends a session");
        if let Some(client) = self.clients.get(&memory) {
            client.end(reason.to_owned());
        }
    }

    fn release(&mut self, memory: MemoryId) {
        self.clients.remove(&memory);
    }
}
