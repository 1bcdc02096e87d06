//! One CUDA session: its control region, its prepared calls, and the thread that takes rings of its doorbells.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use bytes::Bytes;
use expertd_ipc::control::MemoryKind;
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{OpenCuda, PreparedCall, Ring, RoutingLayout, StatusRecord};
use expertd_session::wire::{CompletionRecord, RequestRecord};

use super::super::Steps;
use super::super::completion::failed;
use super::super::registry::SessionStatus;
use super::super::release::HeldRegion;
use super::super::session::Session;
use super::call::CudaCall;
use super::doorbells::{Admission, DoorbellTable, check as check_prepared};
use crate::api::{Asked, AskedRouting, Failure, check};
use crate::backend::{ModelInfo, Request};
use crate::steps::Raising;
use crate::telemetry::RequestTrace;

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
pub(crate) struct CudaSession {
    pub(in crate::sessions) session: Session,
    control: ControlMemory,
    open: OpenCuda,
    table: Mutex<DoorbellTable>,
    /// `[doorbells]`: the service's own copies.
    statuses: Mutex<Vec<StatusRecord>>,
    /// Dropped last: the other fields have views of the region. It holds the descriptor of the client's memory, too.
    held: HeldRegion,
}

impl CudaSession {
    pub(in crate::sessions) fn new(
        session: Session,
        control: ControlMemory,
        open: OpenCuda,
        held: HeldRegion,
    ) -> Arc<Self> {
        let held = held.with_socket(session.socket());
        let doorbells = control.doorbells();
        Arc::new(CudaSession {
            session,
            control,
            open,
            table: Mutex::new(DoorbellTable::new(doorbells)),
            statuses: Mutex::new(vec![StatusRecord::zeroed(); doorbells as usize]),
            held,
        })
    }

    pub(in crate::sessions) const fn control(&self) -> &ControlMemory {
        &self.control
    }

    /// The memory as ranks receive it, with its descriptors.
    pub(in crate::sessions) fn parts(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>) {
        let OpenCuda { memory_bytes: bytes, device, .. } = self.open;
        let region = self.control.region();
        let kind = MemoryKind::Device { bytes, device, control_bytes: region.len() as u64 };
        (kind, self.held.memory().into_iter().chain([region.as_fd()]).collect())
    }

    fn table(&self) -> MutexGuard<'_, DoorbellTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::sessions) fn status(&self) -> SessionStatus {
        let in_flight = self.table().in_flight() as u64;
        self.session.status(self.open.memory_bytes, in_flight, Some(self.open.device))
    }

    /// Lets no call enter any more, and cancels calls in flight. Returns whether the session was open.
    pub(in crate::sessions) fn begin_close(&self) -> bool {
        self.table().close();
        self.session.begin_close()
    }

    /// Prepares calls; returns the number of the first.
    ///
    /// # Errors
    /// The sentence with which they are refused.
    pub(super) fn prepare(&self, calls: &[PreparedCall], steps: &dyn Steps) -> Result<u32, String> {
        let model = steps.model();
        for (index, call) in calls.iter().enumerate() {
            check_prepared(call, &model, self.open.memory_bytes, self.control.routing_bytes())
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
        self.session.ended(record, tokens);
        self.answer(doorbell, record, raising);
        self.session.record(record, elapsed);
    }

    fn answer(&self, doorbell: u32, record: &CompletionRecord, raising: Raising) {
        let mut statuses = self.statuses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(status) = statuses.get_mut(doorbell as usize) {
            match raising {
                Raising::Caller => self.control.complete(doorbell, record, status),
                Raising::Rank | Raising::KilledRank => self.control.set_status(doorbell, record, status),
            }
        }
    }

    /// Takes rings of doorbells until the session ends.
    pub(in crate::sessions) fn take_rings(self: &Arc<Self>, steps: &dyn Steps, has_spare_cores: bool) {
        let mut last = Instant::now();
        while !self.session.is_closing() {
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
                let trace = RequestTrace::of_session(self.session.number(), "cuda", began);
                let (tokens, layout) =
                    (ring.rows as usize, RoutingLayout::new(prepared.flags, ring.rows, prepared.k));
                let carried = (tokens, layout);
                let call = CudaCall::new(self, (doorbell, call), &prepared, carried, began, trace.clone());
                match self.request(doorbell, ring, &prepared, &layout, &steps.model(), began) {
                    Ok(mut request) => {
                        self.session.admitted(request.tokens);
                        if let Some(trace) = &trace {
                            trace.admitted(&mut request);
                        }
                        steps.take_in(request, Box::new(call));
                    }
                    Err(failure) => call.end(failure),
                }
            }
            Admission::Invalid { call, reason } => {
                let record = failed(call, Failure::field("prepared call", reason));
                self.session.ended(&record, 0);
                self.answer(doorbell, &record, Raising::Caller);
                self.session.record(&record, began.elapsed());
            }
            Admission::Closing => {}
        }
        true
    }

    /// The validated request of a ring, with copies of its ids and weights.
    fn request(
        &self,
        doorbell: u32,
        ring: Ring,
        prepared: &PreparedCall,
        layout: &RoutingLayout,
        model: &ModelInfo,
        began: Instant,
    ) -> Result<Request, Failure> {
        let PreparedCall { flags, layer, dtype, k, .. } = *prepared;
        let has = |flag| flags & flag != 0;
        let carried = |name: &'static str, offset: usize, bytes: usize| {
            let copied = self.control.copy_routing(doorbell, offset, bytes).map(Bytes::from);
            copied.ok_or_else(|| {
                Failure::field(name, format!("{bytes} bytes exceed the doorbell's routing area"))
            })
        };
        let mut asked = Asked::of_record(flags, layer, ring.rows, dtype);
        asked.expected_version = has(RequestRecord::EXPECT_WEIGHT_VERSION).then_some(prepared.weight_version);
        if has(RequestRecord::GIVEN_ROUTING) {
            asked.routing = Some(AskedRouting {
                ids: carried("ids", 0, layout.routing_bytes)?,
                weights: carried("weights", layout.weights, layout.routing_bytes)?,
                k,
            });
        }
        asked.token_ids = carried("token_ids", layout.token_ids, layout.token_bytes)?;
        check(model, asked, self.session.envelope(began, prepared.timeout_us))
    }
}
