//! Calls in flight of a session, and the threads that wait for them.
//!
//! One waiting thread at a time has the consuming end of the ring of completions and sleeps on the doorbell; it records
//! what arrives. The other waiting threads sleep until it wakes them, and one of them takes over when it leaves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use expertd_shm::WaitPolicy;
use expertd_shm::ring::{RingConsumer, RingError, RingProducer};
use expertd_shm::wait::Doorbell;

use super::link::OwnProcess;
use super::{Buffer, SessionError};
use crate::wire::{CompletionRecord, RequestRecord};

/// The state of a call until its completion.
#[derive(Debug)]
pub(super) struct CallBuffers {
    pub(super) rows: Buffer,
    pub(super) output: Buffer,
    /// Ids, then weights.
    pub(super) routing: Option<Buffer>,
    #[expect(dead_code, reason = "the service reads it until the completion")]
    pub(super) token_ids: Option<Buffer>,
}

#[derive(Debug)]
struct CallEntry {
    buffers: Option<CallBuffers>,
    completion: Option<CompletionRecord>,
    /// The caller no longer waits: the buffers are dropped at the completion.
    is_abandoned: bool,
}

#[derive(Debug)]
struct Calls {
    requests: RingProducer<RequestRecord>,
    /// Absent while a waiting thread has it.
    completions: Option<RingConsumer<CompletionRecord>>,
    entries: HashMap<u64, CallEntry>,
    next: u64,
    /// Requests that were pushed and whose completion has not been popped.
    in_flight: u64,
    /// Whether the session was dropped: no buffer is given out any more.
    is_closed: bool,
}

/// State that the threads of a client share. Only the process that opened the session uses it.
#[derive(Debug)]
pub(super) struct CallTable {
    process: OwnProcess,
    calls: Mutex<Calls>,
    changed: Condvar,
    service_bell: Doorbell,
    client_bell: Doorbell,
    capacity: u64,
    spin: Duration,
    has_ended: AtomicBool,
    end: Mutex<Option<String>>,
}

impl CallTable {
    pub(super) fn new(
        requests: RingProducer<RequestRecord>,
        completions: RingConsumer<CompletionRecord>,
        bells: (Doorbell, Doorbell),
        capacity: u32,
        spin: Duration,
    ) -> Self {
        let calls = Calls {
            requests,
            completions: Some(completions),
            entries: HashMap::new(),
            next: 1,
            in_flight: 0,
            is_closed: false,
        };
        CallTable {
            process: OwnProcess::current(),
            calls: Mutex::new(calls),
            changed: Condvar::new(),
            service_bell: bells.0,
            client_bell: bells.1,
            capacity: u64::from(capacity),
            spin,
            has_ended: AtomicBool::new(false),
            end: Mutex::new(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the session: every waiting call fails with `reason`.
    pub(super) fn end(&self, reason: &str) {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.to_owned());
        self.has_ended.store(true, Ordering::Release);
        self.client_bell.ring();
        // Under the lock, so that a thread between its check and its sleep is not missed.
        let _calls = self.lock();
        self.changed.notify_all();
    }

    /// The session was dropped: every waiting call fails, and the buffers of calls that no thread waits for are dropped.
    pub(super) fn close(&self) {
        self.end("the client has dropped the session");
        let mut calls = self.lock();
        calls.is_closed = true;
        calls.entries.retain(|_, entry| !entry.is_abandoned);
    }

    fn ended(&self) -> Option<SessionError> {
        let reason = || self.end.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default();
        self.has_ended.load(Ordering::Acquire).then(|| SessionError::Ended { reason: reason() })
    }

    /// Pushes a request; returns the number of its call.
    pub(super) fn submit(
        &self,
        mut record: RequestRecord,
        buffers: Option<CallBuffers>,
    ) -> Result<u64, SessionError> {
        self.process.check()?;
        if let Some(ended) = self.ended() {
            return Err(ended);
        }
        let mut calls = self.lock();
        if calls.in_flight >= self.capacity {
            self.drain(&mut calls)?;
        }
        if calls.in_flight >= self.capacity {
            return Err(SessionError::TooManyCalls { calls: self.capacity });
        }
        record.call = calls.next;
        match calls.requests.try_push(&record) {
            Ok(true) => {}
            Ok(false) => return Err(SessionError::TooManyCalls { calls: self.capacity }),
            Err(error) => return Err(self.broken(&error)),
        }
        calls.next += 1;
        calls.in_flight += 1;
        let entry = CallEntry { buffers, completion: None, is_abandoned: false };
        calls.entries.insert(record.call, entry);
        drop(calls);
        self.service_bell.ring();
        Ok(record.call)
    }

    fn broken(&self, error: &RingError) -> SessionError {
        let reason = format!("the session's memory is broken: {error}");
        self.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.clone());
        self.has_ended.store(true, Ordering::Release);
        self.changed.notify_all();
        SessionError::Ended { reason }
    }

    /// Records the completions that are in the ring, unless a waiting thread is popping them.
    fn drain(&self, calls: &mut Calls) -> Result<(), SessionError> {
        let Some(mut completions) = calls.completions.take() else { return Ok(()) };
        let drained = loop {
            match completions.try_pop() {
                Ok(Some(record)) => calls.record(record),
                Ok(None) => break Ok(()),
                Err(error) => break Err(self.broken(&error)),
            }
        };
        calls.completions = Some(completions);
        drained
    }

    /// Waits until the call is complete or `timeout` has passed. It stays in flight then, until it is waited for again or
    /// abandoned. The end of a call is taken once.
    pub(super) fn wait(
        &self,
        call: u64,
        timeout: Duration,
    ) -> Result<(Option<CallBuffers>, CompletionRecord), SessionError> {
        self.process.check()?;
        let policy = WaitPolicy::within(self.spin, timeout);
        let mut calls = self.lock();
        loop {
            self.drain(&mut calls)?;
            if let Some(done) = calls.take(call) {
                // Wakes waiting threads, because one of them must now pop the ring.
                self.changed.notify_all();
                return Ok(done);
            }
            if calls.entries.get(&call).is_none_or(|entry| entry.is_abandoned) {
                self.changed.notify_all();
                return Err(SessionError::NoSuchCall { call });
            }
            if let Some(ended) = self.ended() {
                return Err(ended);
            }
            let left = policy.deadline.map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                self.changed.notify_all();
                return Err(SessionError::TimedOut { waited: timeout });
            }
            let Some(mut completions) = calls.completions.take() else {
                // Another thread has the ring.
                let waited = self.changed.wait_timeout(calls, left);
                calls = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            drop(calls);
            let arrived = self.client_bell.wait_for(policy, || match completions.try_pop() {
                Ok(Some(record)) => Some(Ok(Some(record))),
                Ok(None) => self.has_ended.load(Ordering::Acquire).then_some(Ok(None)),
                Err(error) => Some(Err(error)),
            });
            calls = self.lock();
            calls.completions = Some(completions);
            match arrived {
                Ok(Ok(Some(record))) => {
                    calls.record(record);
                    self.drain(&mut calls)?;
                    self.changed.notify_all();
                }
                Ok(Err(error)) => return Err(self.broken(&error)),
                Ok(Ok(None)) | Err(_) => {}
            }
        }
    }

    /// Whether no call is kept.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lock().entries.is_empty()
    }

    /// Forgets a call whose caller no longer waits; its buffers return at its completion.
    pub(super) fn abandon(&self, call: u64) {
        if self.process.is_current() {
            self.lock().abandon(call);
        }
    }
}

impl Calls {
    fn record(&mut self, record: CompletionRecord) {
        // A completion without a call is an error of the service; it ends no wait.
        let Some(entry) = self.entries.get_mut(&record.call).filter(|entry| entry.completion.is_none())
        else {
            return;
        };
        self.in_flight -= 1;
        if entry.is_abandoned {
            self.entries.remove(&record.call);
        } else {
            entry.completion = Some(record);
        }
    }

    fn take(&mut self, call: u64) -> Option<(Option<CallBuffers>, CompletionRecord)> {
        let record = self.entries.get(&call)?.completion?;
        Some((self.entries.remove(&call)?.buffers, record))
    }

    fn abandon(&mut self, call: u64) {
        let Some(entry) = self.entries.get_mut(&call) else { return };
        if entry.completion.is_some() || self.is_closed {
            self.entries.remove(&call);
        } else {
            entry.is_abandoned = true;
        }
    }
}
