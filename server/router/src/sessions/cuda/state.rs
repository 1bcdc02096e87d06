//! One CUDA session: its control region, the thread that takes rings of its doorbells, its completions.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use expertd_ipc::control::MemoryKind;
use expertd_proto::v1::{self, ForwardRequest, SharedExperts};
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{OpenCuda, PreparedCall, Ring, RoutingLayout, StatusRecord};
use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_types::MemoryId;
use tonic::Code;

use super::super::call::{end_trace, failed};
use super::super::open::{OpenSession, end_socket};
use super::super::registry::SessionStatus;
use super::super::release::HeldRegion;
use super::super::session::{Opener, RowsTravel};
use super::call::{CudaCall, Raising};
use super::doorbells::{Admission, DoorbellTable, check};
use crate::api::{Envelope, Failure, code_name, next_request_id, validate_session};
use crate::sessions::Steps;
use crate::telemetry::{RequestMetrics, RequestTrace};

/// How long the thread of doorbells polls without a pause after a call, where cores are spare: an engine computes between two calls.
const BUSY_AFTER_CALL: Duration = Duration::from_millis(10);
/// Pause between polls until a session counts as idle.
const PAUSE: Duration = Duration::from_micros(20);
/// How long after its last call a session counts as idle.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// Pause between polls of an idle session.
const IDLE_PAUSE: Duration = Duration::from_micros(500);

/// What the threads of the router share of one CUDA session. Its control region stays mapped, and its memory's descriptor open,
/// until the last call is complete, no rank has the memory, and the client has closed its socket.
#[derive(Debug)]
pub(crate) struct CudaState {
    number: u64,
    opener: Opener,
    control: ControlMemory,
    memory: OwnedFd,
    open: OpenCuda,
    socket: UnixStream,
    opened: Instant,
    /// Whether the client was told that the session is open.
    is_open: AtomicBool,
    is_closing: AtomicBool,
    table: Mutex<DoorbellTable>,
    /// `[doorbells]`: the service's own copies.
    statuses: Mutex<Vec<StatusRecord>>,
    rows_travel: Mutex<RowsTravel>,
    answered: Condvar,
    calls_total: AtomicU64,
    rows_total: AtomicU64,
    metrics: Arc<RequestMetrics>,
    /// Dropped last: the other fields have views of the region.
    _held: HeldRegion,
}

/// The parts that the listener makes before a session.
pub(in crate::sessions) struct SessionParts {
    pub(in crate::sessions) number: u64,
    pub(in crate::sessions) opener: Opener,
    pub(in crate::sessions) control: ControlMemory,
    pub(in crate::sessions) memory: OwnedFd,
    pub(in crate::sessions) open: OpenCuda,
    pub(in crate::sessions) socket: UnixStream,
    pub(in crate::sessions) metrics: Arc<RequestMetrics>,
    pub(in crate::sessions) held: HeldRegion,
}

impl CudaState {
    pub(in crate::sessions) fn new(parts: SessionParts) -> Arc<Self> {
        let doorbells = parts.control.doorbells();
        Arc::new(CudaState {
            number: parts.number,
            opener: parts.opener,
            control: parts.control,
            memory: parts.memory,
            open: parts.open,
            socket: parts.socket,
            opened: Instant::now(),
            is_open: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            table: Mutex::new(DoorbellTable::new(doorbells)),
            statuses: Mutex::new(vec![StatusRecord::zeroed(); doorbells as usize]),
            rows_travel: Mutex::default(),
            answered: Condvar::new(),
            calls_total: AtomicU64::new(0),
            rows_total: AtomicU64::new(0),
            metrics: parts.metrics,
            _held: parts.held,
        })
    }

    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    pub(super) const fn control(&self) -> &ControlMemory {
        &self.control
    }

    /// The number under which ranks attach the memory.
    pub(crate) const fn memory_id(&self) -> MemoryId {
        // Sessions are numbered from 1, and none whose number exceeds 32 bits is opened.
        MemoryId(self.number as u32)
    }

    /// The memory as ranks receive it, with its descriptors.
    pub(crate) fn memory(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>) {
        let OpenCuda { memory_bytes: bytes, device, .. } = self.open;
        let region = self.control.region();
        let kind = MemoryKind::Device { bytes, device, control_bytes: region.len() as u64 };
        (kind, vec![self.memory.as_fd(), region.as_fd()])
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    fn table(&self) -> MutexGuard<'_, DoorbellTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rows_travel(&self) -> MutexGuard<'_, RowsTravel> {
        self.rows_travel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether the ranks have attached the memory. A session that is open ends if one of them refuses it.
    pub(crate) fn set_rows_travel(self: &Arc<Self>, rows_travel: RowsTravel) {
        let mut travel = self.rows_travel();
        *travel = rows_travel;
        let reason = match &*travel {
            RowsTravel::Refused(reason) if self.is_open.load(Ordering::Acquire) => Some(reason.clone()),
            _ => None,
        };
        drop(travel);
        self.answered.notify_all();
        if let Some(reason) = reason {
            OpenSession::Cuda(Arc::clone(self)).close_apart(format!(
                "the ranks of a new generation cannot use the session's memory: {reason}"
            ));
        }
    }

    /// Waits until every rank has attached the memory, at most until `deadline`.
    ///
    /// # Errors
    /// Why the session is refused.
    pub(super) fn wait_attached(&self, deadline: Instant) -> Result<(), String> {
        let mut travel = self.rows_travel();
        loop {
            match &*travel {
                RowsTravel::InPlace => break,
                RowsTravel::Refused(reason) => return Err(reason.clone()),
                RowsTravel::Copied => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_closing() {
                return Err(
                    "the ranks have not attached the memory in time; they may be loading or recovering"
                        .into(),
                );
            }
            travel = self.answered.wait_timeout(travel, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        // Under the lock, so that a refusal that follows ends the session.
        self.is_open.store(true, Ordering::Release);
        Ok(())
    }

    pub(in crate::sessions) fn status(&self) -> SessionStatus {
        SessionStatus {
            session: self.number,
            user: self.opener.user,
            pid: self.opener.pid,
            age: self.opened.elapsed(),
            bytes: self.open.memory_bytes,
            calls_total: self.calls_total.load(Ordering::Relaxed),
            rows_total: self.rows_total.load(Ordering::Relaxed),
            calls_in_flight: self.table().in_flight() as u64,
            rows_travel: self.rows_travel().clone(),
            device: Some(self.open.device),
        }
    }

    /// Lets no call enter any more, and cancels calls in flight. Returns whether the session was open.
    pub(in crate::sessions) fn begin_close(&self) -> bool {
        self.table().close();
        self.answered.notify_all();
        !self.is_closing.swap(true, Ordering::AcqRel)
    }

    /// Ends the socket.
    pub(in crate::sessions) fn finish_close(&self, reason: Option<&str>) {
        end_socket(&self.socket, reason);
    }

    /// Prepares calls; returns the number of the first.
    ///
    /// # Errors
    /// The sentence with which they are refused.
    pub(super) fn prepare(&self, calls: &[PreparedCall], steps: &dyn Steps) -> Result<u32, String> {
        let model = steps.model();
        for (index, call) in calls.iter().enumerate() {
            check(call, &model, self.open.memory_bytes, self.control.routing_bytes())
                .map_err(|reason| format!("call {index} of the frame: {reason}"))?;
        }
        self.table().prepare(calls)
    }

    /// Writes the routing that a call returns.
    pub(super) fn return_routing(&self, doorbell: u32, layout: &RoutingLayout, ids: &[u8], weights: &[u8]) {
        // The layout was checked to lie within the routing area.
        let _ = self.control.write_routing(doorbell, 0, ids);
        let _ = self.control.write_routing(doorbell, layout.weights, weights);
    }

    /// Ends a doorbell's call.
    pub(super) fn complete(
        &self,
        doorbell: u32,
        record: &CompletionRecord,
        tokens: usize,
        elapsed: Duration,
        raising: Raising,
    ) {
        let mut table = self.table();
        if raising == Raising::KilledRank && table.is_last(doorbell, record.call) {
            // Under the lock under which rings are taken. If a later call was taken, the client has seen the end of this one.
            self.control.raise_unseen(doorbell);
        }
        // Before the word is raised: the client may ring at once.
        table.complete(doorbell);
        drop(table);
        self.answer(doorbell, record, elapsed, raising);
        if record.code == 0 {
            self.rows_total.fetch_add(tokens as u64, Ordering::Relaxed);
        }
    }

    fn answer(&self, doorbell: u32, record: &CompletionRecord, elapsed: Duration, raising: Raising) {
        let mut statuses = self.statuses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(status) = statuses.get_mut(doorbell as usize) {
            match raising {
                Raising::Router => self.control.complete(doorbell, record, status),
                Raising::Rank | Raising::KilledRank => self.control.set_status(doorbell, record, status),
            }
        }
        drop(statuses);
        self.calls_total.fetch_add(1, Ordering::Relaxed);
        self.metrics.answered(code_name(Code::from_i32(record.code.cast_signed())), elapsed);
    }

    /// Takes rings of doorbells until the session ends.
    pub(super) fn take_rings(self: &Arc<Self>, steps: &dyn Steps, has_spare_cores: bool) {
        let mut last = Instant::now();
        while !self.is_closing() {
            if self.poll(steps) {
                last = Instant::now();
                continue;
            }
            let idle = last.elapsed();
            if has_spare_cores && idle < BUSY_AFTER_CALL {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(if idle < IDLE_AFTER { PAUSE } else { IDLE_PAUSE });
            }
        }
    }

    /// Takes a ring of each doorbell; returns whether there was one.
    pub(super) fn poll(self: &Arc<Self>, steps: &dyn Steps) -> bool {
        let mut found = false;
        for doorbell in 0..self.control.doorbells() {
            if self.control.is_rung(doorbell) {
                found |= self.take(doorbell, steps);
            }
        }
        found
    }

    /// Takes a ring of a doorbell; returns whether there was one.
    fn take(self: &Arc<Self>, doorbell: u32, steps: &dyn Steps) -> bool {
        let mut table = self.table();
        let Some(ring) = self.control.take(doorbell, table.in_flight_of(doorbell)) else { return false };
        let admission = table.ring(doorbell, ring);
        drop(table);
        let began = Instant::now();
        match admission {
            Admission::Admitted { call, prepared } => {
                let trace = RequestTrace::of_session(self.number, "cuda", began);
                let submitted = self.submit(doorbell, ring, call, &prepared, steps, (began, trace.clone()));
                if let Err(failure) = submitted {
                    let record = failed(call, failure);
                    self.complete(doorbell, &record, 0, began.elapsed(), Raising::Router);
                    end_trace(trace, record.code, None);
                }
            }
            Admission::Invalid { call, reason } => {
                let record = failed(call, Failure::field("prepared call", reason));
                self.answer(doorbell, &record, began.elapsed(), Raising::Router);
            }
            Admission::Closing => {}
        }
        true
    }

    /// Hands a call to the step loop.
    fn submit(
        self: &Arc<Self>,
        doorbell: u32,
        ring: Ring,
        call: u64,
        prepared: &PreparedCall,
        steps: &dyn Steps,
        (began, trace): (Instant, Option<Arc<RequestTrace>>),
    ) -> Result<(), Failure> {
        let has = |flag| prepared.flags & flag != 0;
        let shared =
            if has(RequestRecord::EXCLUDE_SHARED) { SharedExperts::Exclude } else { SharedExperts::Include };
        let PreparedCall { flags, k, .. } = *prepared;
        let layout = RoutingLayout::new(flags, ring.rows, k);
        let carried = |name: &'static str, offset: usize, bytes: usize| {
            let copied = self.control.copy_routing(doorbell, offset, bytes).map(bytes::Bytes::from);
            copied.ok_or_else(|| {
                Failure::field(name, format!("{bytes} bytes exceed the doorbell's routing area"))
            })
        };
        let routing = if has(RequestRecord::GIVEN_ROUTING) {
            Some(v1::Routing {
                topk_ids: carried("ids", 0, layout.routing_bytes)?,
                topk_weights: carried("weights", layout.weights, layout.routing_bytes)?,
                k,
            })
        } else {
            None
        };
        let message = ForwardRequest {
            layer: prepared.layer,
            tokens: ring.rows,
            dtype: prepared.dtype.cast_signed(),
            routing,
            token_ids: carried("token_ids", layout.token_ids, layout.token_bytes)?,
            return_routing: has(RequestRecord::RETURN_ROUTING),
            shared_experts: shared.into(),
            expected_weight_version: has(RequestRecord::EXPECT_WEIGHT_VERSION)
                .then_some(prepared.weight_version),
            return_timings: true,
            ..ForwardRequest::default()
        };
        let deadline = match prepared.timeout_us {
            0 => None,
            timeout => began.checked_add(Duration::from_micros(timeout)),
        };
        let envelope = Envelope { id: next_request_id(), client: self.opener.client, deadline };
        let mut request = validate_session(&steps.model(), message, envelope)?;
        self.metrics.admitted(request.tokens);
        if let Some(trace) = &trace {
            trace.admitted(&mut request);
        }
        let call = CudaCall {
            session: Arc::clone(self),
            doorbell,
            call,
            rows: prepared.rows,
            output: prepared.output,
            returned: has(RequestRecord::RETURN_ROUTING).then_some(layout),
            tokens: request.tokens,
            began,
            trace,
            raising: Raising::Router,
            is_complete: false,
        };
        steps.submit_cuda(request, call).map_err(Failure::from)
    }
}
