//! A host session: its memory, the thread that takes its requests, its completions.

mod sizes;
mod table;

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_core::backend::{ModelInfo, Request, SessionStatus};
use expertd_core::failure::Failure;
use expertd_core::validate::{AskedRouting, check};
use expertd_ipc::control::MemoryKind;
use expertd_session::memory::SessionMemory;
use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_shm::WaitPolicy;
use expertd_shm::ring::{RingConsumer, RingProducer};
use expertd_telemetry::RequestTrace;

use self::sizes::Sizes;
use self::table::{CallTable, RequestVerdict};
use crate::call::{Call, CallEnd, RowPlaces, asked};
use crate::completion::failed;
use crate::release::HeldRegion;
use crate::session::Session;
use expertd_core::steps::Steps;

/// How long the thread that takes a session's requests spins before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    /// After a request.
    pub(crate) waiting: Duration,
    /// After an answer, while no step is in flight.
    pub(crate) answered: Duration,
}

/// Why the thread that takes requests goes on.
enum Wake {
    Request(RequestRecord),
    /// The next request may come soon.
    Answered,
    Closing,
}

/// The state of one host session that threads of the router share. Its memory stays mapped until the last call is complete, no rank has it,
/// and the client has closed its socket.
#[derive(Debug)]
pub(crate) struct HostSession {
    pub(crate) session: Session,
    memory: SessionMemory,
    /// Whether the thread that takes requests spins after an answer.
    spins_after_answers: AtomicBool,
    /// Whether a call was answered after which the client may soon send the next one.
    expects_request: AtomicBool,
    calls: Mutex<Calls>,
    /// Dropped last: the other fields have views of the region.
    _held: HeldRegion,
}

#[derive(Debug)]
struct Calls {
    table: CallTable,
    completions: RingProducer<CompletionRecord>,
}

impl HostSession {
    pub(crate) fn new(
        session: Session,
        memory: SessionMemory,
        completions: RingProducer<CompletionRecord>,
        held: HeldRegion,
    ) -> Arc<Self> {
        let table = CallTable::new(memory.calls() as usize, memory.rows().len());
        let held = held.with_socket(session.socket());
        Arc::new(HostSession {
            session,
            spins_after_answers: AtomicBool::new(false),
            expects_request: AtomicBool::new(false),
            calls: Mutex::new(Calls { table, completions }),
            memory,
            _held: held,
        })
    }

    /// The memory as ranks receive it.
    pub(crate) fn parts(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>) {
        let region = self.memory.region();
        (MemoryKind::Host { bytes: region.len() as u64 }, vec![region.as_fd()])
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> SessionStatus {
        self.session.status(self.memory.region().len() as u64, self.calls().table.in_flight() as u64, None)
    }

    /// Lets no request enter any more, and cancels calls in flight. Returns whether the session was open.
    pub(crate) fn begin_close(&self) -> bool {
        self.calls().table.close();
        self.session.begin_close()
    }

    /// Ends the socket.
    pub(crate) fn finish_close(&self, reason: Option<&str>) {
        self.session.end_socket(reason);
        // A client that has changed the doorbell delays this by one sleep of the waiting thread at most.
        self.memory.service_bell().ring();
    }

    fn push(&self, calls: &mut Calls, record: &CompletionRecord) {
        // The ring has room for every call in flight, unless the client writes nonsense; then nothing is owed to it.
        if !matches!(calls.completions.try_push(record), Ok(true)) {
            tracing::debug!(
                session = self.session.number(),
                call = record.call,
                "a completion found no room"
            );
        }
        self.memory.client_bell().ring();
    }

    /// Takes requests until the session ends.
    pub(crate) fn take_requests(
        self: &Arc<Self>,
        mut requests: RingConsumer<RequestRecord>,
        steps: &dyn Steps,
        spin: Spin,
    ) {
        self.spins_after_answers.store(!spin.answered.is_zero(), Ordering::Relaxed);
        let mut next_spin = spin.waiting;
        loop {
            let found = self.memory.service_bell().wait_for(WaitPolicy::unlimited(next_spin), || {
                if self.session.is_closing() {
                    return Some(Ok(Wake::Closing));
                }
                match requests.try_pop() {
                    Ok(Some(record)) => Some(Ok(Wake::Request(record))),
                    Ok(None) => self.was_answered().then_some(Ok(Wake::Answered)),
                    Err(error) => Some(Err(error)),
                }
            });
            next_spin = spin.waiting;
            match found {
                Ok(Ok(Wake::Request(record))) => {
                    self.expects_request.store(false, Ordering::Relaxed);
                    if let Err(reason) = self.take(&record, steps) {
                        self.break_off(&reason);
                    }
                }
                Ok(Ok(Wake::Answered)) => next_spin = spin.answered,
                Ok(Ok(Wake::Closing)) => return,
                Ok(Err(error)) => self.break_off(&format!("the ring of requests is broken: {error}")),
                // A wait without a deadline cannot time out.
                Err(_) => {}
            }
        }
    }

    fn break_off(&self, reason: &str) {
        tracing::warn!(session = self.session.number(), reason, "the service ends a session");
        if self.begin_close() {
            self.finish_close(Some(reason));
        }
    }

    /// Whether a call was answered since the last question.
    fn was_answered(&self) -> bool {
        self.expects_request.load(Ordering::Relaxed) && self.expects_request.swap(false, Ordering::Acquire)
    }

    /// Hands a request to the step loop, or completes it with a status.
    ///
    /// # Errors
    /// Why the session ends.
    pub(crate) fn take(self: &Arc<Self>, record: &RequestRecord, steps: &dyn Steps) -> Result<(), String> {
        let began = Instant::now();
        let mut calls = self.calls();
        let unread = calls.completions.waiting().map_err(|error| error.to_string())?;
        if calls.table.exceeds(unread) {
            let capacity = self.memory.calls();
            return Err(format!(
                "more than {capacity} calls are in flight or have completions that were not read"
            ));
        }
        drop(calls);
        let trace = RequestTrace::of_session(self.session.number(), "host", began);
        let model = steps.model();
        let sizes = match self.admit(record, &model) {
            Ok(sizes) => sizes,
            Err(failure) => {
                let completion = failed(record.call, &failure);
                self.session.ended(&completion, 0);
                self.push(&mut self.calls(), &completion);
                self.session.record(&completion, began.elapsed());
                if let Some(trace) = trace {
                    trace.end(completion.code);
                }
                return Ok(());
            }
        };
        let returns = record.flags & RequestRecord::RETURN_ROUTING != 0;
        let returned = returns.then_some((record.ids as usize, record.weights as usize));
        let area = self.memory.rows_offset() as u64;
        let places =
            RowPlaces { input: area + record.rows, output: area + record.output, tokens: sizes.tokens };
        let end = HostEnd { session: Arc::clone(self), returned };
        let call = Call::new(end, record.call, places, began, trace);
        call.submit(self.request(record, &sizes, &model, began), steps);
        Ok(())
    }

    /// Enters a call in the table.
    fn admit(&self, record: &RequestRecord, model: &ModelInfo) -> Result<Sizes, Failure> {
        let sizes = Sizes::new(record, model)?;
        match self.calls().table.admit(record.call, sizes.places(record)) {
            RequestVerdict::Admitted => Ok(sizes),
            RequestVerdict::Invalid(reason) => Err(Failure::field("places", reason)),
            RequestVerdict::Closing => Err(Failure::Draining),
            RequestVerdict::Full(reason) => {
                Err(Failure::Overloaded { reason, retry_after: Duration::from_millis(5) })
            }
        }
    }

    /// The validated request of a call, with copies of its ids and weights.
    fn request(
        &self,
        record: &RequestRecord,
        sizes: &Sizes,
        model: &ModelInfo,
        began: Instant,
    ) -> Result<Request, Failure> {
        let has = |flag| record.flags & flag != 0;
        let words = |name: &'static str, offset: u64, words: usize| {
            let copied = self.memory.copy_words(offset as usize, words);
            copied.map(Bytes::from).map_err(|error| Failure::field(name, error.to_string()))
        };
        let mut asked = asked(record.flags, record.layer, record.tokens, record.dtype, record.weight_version);
        if has(RequestRecord::GIVEN_ROUTING) {
            asked.routing = Some(AskedRouting {
                ids: words("ids", record.ids, sizes.tokens * sizes.k)?,
                weights: words("weights", record.weights, sizes.tokens * sizes.k)?,
                k: sizes.k as u32,
            });
        }
        if has(RequestRecord::TOKEN_IDS) {
            asked.token_ids = words("token_ids", record.token_ids, sizes.tokens)?;
        }
        check(model, asked, self.session.envelope(began, record.timeout_us))
    }
}

/// The client's side of a call that the session's table holds, and whose places were checked.
#[derive(Debug)]
struct HostEnd {
    session: Arc<HostSession>,
    /// Offsets of returned ids and weights, in bytes.
    returned: Option<(usize, usize)>,
}

impl CallEnd for HostEnd {
    fn session(&self) -> &Session {
        &self.session.session
    }

    fn return_routing(&self, ids: &[u8], weights: &[u8]) {
        if let Some((ids_at, weights_at)) = self.returned {
            // Both were checked to lie within the row area.
            let _ = self.session.memory.write_words(ids_at, ids);
            let _ = self.session.memory.write_words(weights_at, weights);
        }
    }

    fn complete(&self, record: &CompletionRecord, tokens: usize, elapsed: Duration) {
        let HostSession { session, .. } = &*self.session;
        session.ended(record, tokens);
        let mut calls = self.session.calls();
        calls.table.complete(record.call);
        self.session.push(&mut calls, record);
        drop(calls);
        session.record(record, elapsed);
    }

    /// If the thread that takes requests spins after answers, wakes it now, together with the client, which may send its next
    /// request at once.
    fn expect_call(&self) {
        if self.session.spins_after_answers.load(Ordering::Relaxed) {
            self.session.expects_request.store(true, Ordering::Release);
            self.session.memory.service_bell().ring();
        }
    }
}
