//! One session: its memory, the thread that takes its requests, its completions.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use expertd_proto::v1::{self, ForwardRequest, SharedExperts};
use expertd_session::memory::SessionMemory;
use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_shm::ring::{RingConsumer, RingProducer};
use expertd_shm::{SharedRegion, WaitPolicy};
use expertd_types::MemoryId;
use tonic::Code;

use super::Steps;
use super::call::{SessionCall, end_trace, failed};
use super::open::{OpenSession, end_socket};
use super::registry::SessionStatus;
use super::release::HeldRegion;
use super::sizes::Sizes;
use super::table::{Admission, CallTable};
use crate::api::{Envelope, Failure, code_name, next_request_id, validate_session};
use crate::backend::{ClientKey, ModelInfo, SubmitError};
use crate::telemetry::{RequestMetrics, RequestTrace};

/// Who opened a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opener {
    pub(super) user: u32,
    pub(super) pid: u32,
    pub(super) client: ClientKey,
}

/// How long the thread that takes a session's requests spins before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spin {
    /// After a request.
    pub(super) waiting: Duration,
    /// After an answer, while no step is in flight.
    pub(super) answered: Duration,
}

/// Why the thread that takes requests goes on.
enum Wake {
    Request(RequestRecord),
    /// The next request may come soon.
    Answered,
    Closing,
}

/// What the threads of the router share of one session. Its memory stays mapped until the last call is complete, no rank has it, and
/// the client has closed its socket.
#[derive(Debug)]
pub(crate) struct SessionState {
    number: u64,
    opener: Opener,
    memory: SessionMemory,
    socket: UnixStream,
    opened: Instant,
    is_closing: AtomicBool,
    /// Whether the thread that takes requests spins after an answer.
    spins_after_answers: AtomicBool,
    /// Whether a call was answered after which the client may soon send the next one.
    expects_request: AtomicBool,
    calls: Mutex<Calls>,
    calls_total: AtomicU64,
    rows_total: AtomicU64,
    metrics: Arc<RequestMetrics>,
    rows_travel: Mutex<RowsTravel>,
    /// Dropped last: the other fields have views of the region.
    _held: HeldRegion,
}

/// How rows travel between the session's memory and the ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RowsTravel {
    /// The router copies them; ranks have not attached the memory yet.
    #[default]
    Copied,
    /// The router copies them, because a rank cannot attach the memory, for this reason.
    Refused(String),
    /// Ranks read and write them in place.
    InPlace,
}

#[derive(Debug)]
struct Calls {
    table: CallTable,
    completions: RingProducer<CompletionRecord>,
}

impl SessionState {
    pub(super) fn new(
        number: u64,
        opener: Opener,
        memory: SessionMemory,
        completions: RingProducer<CompletionRecord>,
        socket: UnixStream,
        metrics: Arc<RequestMetrics>,
        held: HeldRegion,
    ) -> Arc<Self> {
        let table = CallTable::new(memory.calls() as usize, memory.rows().len());
        Arc::new(SessionState {
            number,
            opener,
            socket,
            opened: Instant::now(),
            is_closing: AtomicBool::new(false),
            spins_after_answers: AtomicBool::new(false),
            expects_request: AtomicBool::new(false),
            calls: Mutex::new(Calls { table, completions }),
            calls_total: AtomicU64::new(0),
            rows_total: AtomicU64::new(0),
            metrics,
            memory,
            rows_travel: Mutex::default(),
            _held: held,
        })
    }

    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    pub(super) const fn memory(&self) -> &SessionMemory {
        &self.memory
    }

    /// The number under which ranks attach the memory.
    pub(crate) const fn memory_id(&self) -> MemoryId {
        // `SessionServer` numbers sessions from 1 and opens none whose number exceeds 32 bits.
        MemoryId(self.number as u32)
    }

    /// The memory as ranks receive it.
    pub(crate) fn region(&self) -> &SharedRegion {
        self.memory.region()
    }

    /// Sets how rows travel from now on.
    pub(crate) fn set_rows_travel(&self, rows_travel: RowsTravel) {
        *self.rows_travel.lock().unwrap_or_else(PoisonError::into_inner) = rows_travel;
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn status(&self) -> SessionStatus {
        SessionStatus {
            session: self.number,
            user: self.opener.user,
            pid: self.opener.pid,
            age: self.opened.elapsed(),
            bytes: self.memory.region().len() as u64,
            calls_total: self.calls_total.load(Ordering::Relaxed),
            rows_total: self.rows_total.load(Ordering::Relaxed),
            calls_in_flight: self.calls().table.in_flight() as u64,
            rows_travel: self.rows_travel.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            device: None,
        }
    }

    fn close(self: &Arc<Self>, reason: &str) {
        OpenSession::Host(Arc::clone(self)).close(Some(reason));
    }

    /// Lets no request enter any more, and cancels calls in flight. Returns whether the session was open.
    pub(super) fn begin_close(&self) -> bool {
        self.calls().table.close();
        !self.is_closing.swap(true, Ordering::AcqRel)
    }

    /// Ends the socket.
    pub(super) fn finish_close(&self, reason: Option<&str>) {
        end_socket(&self.socket, reason);
        // A client that has changed the doorbell delays this by one sleep of the waiting thread at most.
        self.memory.service_bell().ring();
    }

    /// Pushes the completion of a call that was admitted.
    pub(super) fn complete(&self, record: CompletionRecord, tokens: usize, elapsed: Duration) {
        if record.code == 0 {
            self.rows_total.fetch_add(tokens as u64, Ordering::Relaxed);
        }
        let mut calls = self.calls();
        calls.table.complete(record.call);
        self.push(&mut calls, &record, elapsed);
    }

    /// Wakes the thread that takes requests, if it spins then, so that it and the client wake up at the same time.
    pub(super) fn expect_request(&self) {
        if self.spins_after_answers.load(Ordering::Relaxed) {
            self.expects_request.store(true, Ordering::Release);
            self.memory.service_bell().ring();
        }
    }

    fn push(&self, calls: &mut Calls, record: &CompletionRecord, elapsed: Duration) {
        self.calls_total.fetch_add(1, Ordering::Relaxed);
        // The ring has room for every call in flight, unless the client writes nonsense; then nothing is owed to it.
        if !matches!(calls.completions.try_push(record), Ok(true)) {
            tracing::debug!(session = self.number, call = record.call, "a completion found no room");
        }
        self.memory.client_bell().ring();
        self.metrics.answered(code_name(Code::from_i32(record.code.cast_signed())), elapsed);
    }

    /// Takes requests until the session ends.
    pub(super) fn take_requests(
        self: &Arc<Self>,
        mut requests: RingConsumer<RequestRecord>,
        steps: &dyn Steps,
        spin: Spin,
    ) {
        self.spins_after_answers.store(!spin.answered.is_zero(), Ordering::Relaxed);
        let mut next_spin = spin.waiting;
        loop {
            let found = self.memory.service_bell().wait_for(WaitPolicy::unlimited(next_spin), || {
                if self.is_closing() {
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
                        tracing::warn!(session = self.number, reason, "the service ends a session");
                        self.close(&reason);
                    }
                }
                Ok(Ok(Wake::Answered)) => next_spin = spin.answered,
                Ok(Ok(Wake::Closing)) => return,
                Ok(Err(error)) => {
                    tracing::warn!(session = self.number, %error, "the service ends a session");
                    self.close(&format!("the ring of requests is broken: {error}"));
                }
                // A wait without a deadline cannot time out.
                Err(_) => {}
            }
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
    pub(super) fn take(self: &Arc<Self>, record: &RequestRecord, steps: &dyn Steps) -> Result<(), String> {
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
        let trace = RequestTrace::of_session(self.number, "host", began);
        if let Err(failure) = self.submit(record, steps, began, trace.clone()) {
            let completion = failed(record.call, failure);
            self.push(&mut self.calls(), &completion, began.elapsed());
            end_trace(trace, completion.code, None);
        }
        Ok(())
    }

    fn submit(
        self: &Arc<Self>,
        record: &RequestRecord,
        steps: &dyn Steps,
        began: Instant,
        trace: Option<Arc<RequestTrace>>,
    ) -> Result<(), Failure> {
        let model = steps.model();
        let sizes = Sizes::new(record, &model)?;
        let places = sizes.places(record);
        match self.calls().table.admit(record.call, places) {
            Admission::Admitted => {}
            Admission::Invalid(reason) => return Err(Failure::field("places", reason)),
            Admission::Closing => return Err(Failure::ShuttingDown),
            Admission::Full(reason) => {
                let retry_after = Duration::from_millis(5);
                return Err(Failure::Submit(SubmitError::Overloaded { reason, retry_after }));
            }
        }
        let submitted = self.submit_admitted(record, &sizes, &model, steps, began, trace);
        if submitted.is_err() {
            self.calls().table.complete(record.call);
        }
        submitted
    }

    fn submit_admitted(
        self: &Arc<Self>,
        record: &RequestRecord,
        sizes: &Sizes,
        model: &ModelInfo,
        steps: &dyn Steps,
        began: Instant,
        trace: Option<Arc<RequestTrace>>,
    ) -> Result<(), Failure> {
        let has = |flag| record.flags & flag != 0;
        let words = |name: &'static str, offset: u64, words: usize| {
            let copied = self.memory.copy_words(offset as usize, words);
            copied.map(bytes::Bytes::from).map_err(|error| Failure::field(name, error.to_string()))
        };
        let routing = if has(RequestRecord::GIVEN_ROUTING) {
            Some(v1::Routing {
                topk_ids: words("ids", record.ids, sizes.tokens * sizes.k)?,
                topk_weights: words("weights", record.weights, sizes.tokens * sizes.k)?,
                k: sizes.k as u32,
            })
        } else {
            None
        };
        let token_ids = match has(RequestRecord::TOKEN_IDS) {
            true => words("token_ids", record.token_ids, sizes.tokens)?,
            false => bytes::Bytes::new(),
        };
        let shared =
            if has(RequestRecord::EXCLUDE_SHARED) { SharedExperts::Exclude } else { SharedExperts::Include };
        let message = ForwardRequest {
            layer: record.layer,
            tokens: record.tokens,
            dtype: record.dtype.cast_signed(),
            routing,
            token_ids,
            shared_experts: shared.into(),
            expected_weight_version: has(RequestRecord::EXPECT_WEIGHT_VERSION)
                .then_some(record.weight_version),
            return_routing: has(RequestRecord::RETURN_ROUTING),
            return_timings: true,
            ..ForwardRequest::default()
        };
        let deadline = match record.timeout_us {
            0 => None,
            timeout => began.checked_add(Duration::from_micros(timeout)),
        };
        let envelope = Envelope { id: next_request_id(), client: self.opener.client, deadline };
        let call = SessionCall {
            session: Arc::clone(self),
            call: record.call,
            rows: record.rows as usize,
            output: record.output as usize,
            returned: has(RequestRecord::RETURN_ROUTING)
                .then_some((record.ids as usize, record.weights as usize)),
            tokens: sizes.tokens,
            began,
            trace,
            is_complete: false,
        };
        let mut request = match validate_session(model, message, envelope) {
            Ok(request) => request,
            Err(failure) => {
                call.forget();
                return Err(failure);
            }
        };
        self.metrics.admitted(request.tokens);
        if let Some(trace) = &call.trace {
            trace.admitted(&mut request);
        }
        steps.submit(request, call).map_err(Failure::from)
    }
}
