//! A CUDA session, whose rows lie in the memory of the client's GPU: its control region, its prepared calls, and the thread that takes
//! rings of its doorbells.

mod doorbells;

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use bytes::Bytes;
use expertd_core::backend::{ModelInfo, Request, SessionStatus};
use expertd_core::failure::Failure;
use expertd_core::steps::{Raising, Steps};
use expertd_core::validate::{AskedRouting, check};
use expertd_ipc::Raise;
use expertd_ipc::control::MemoryKind;
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{OpenCuda, PrepareReply, PreparedCall, Ring, RoutingLayout, StatusRecord};
use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_telemetry::RequestTrace;

use self::doorbells::{DoorbellTable, RingVerdict, check as check_prepared};
use crate::call::{Call, CallEnd, RowPlaces, asked};
use crate::completion::failed;
use crate::release::HeldRegion;
use crate::session::Session;

/// How long the thread of doorbells polls without a pause after a call, where cores are spare: an engine computes between two calls.
const BUSY_AFTER_CALL: Duration = Duration::from_millis(10);
/// Pause between polls until a session counts as idle.
const PAUSE: Duration = Duration::from_micros(20);
/// How long after its last call a session counts as idle.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// Pause between polls of an idle session.
const IDLE_PAUSE: Duration = Duration::from_micros(500);

/// The state of one CUDA session that threads of the router share. Its control region stays mapped, and its memory's descriptor open,
/// until the last call is complete, no rank has the memory, and the client has closed its socket.
#[derive(Debug)]
pub(crate) struct CudaSession {
    pub(crate) session: Session,
    control: ControlMemory,
    open: OpenCuda,
    table: Mutex<DoorbellTable>,
    /// `[doorbells]`: the service's own copies of the statuses, which it writes to the control region.
    statuses: Mutex<Vec<StatusRecord>>,
    /// Dropped last: the other fields have views of the region. It holds the descriptor of the client's memory, too.
    held: HeldRegion,
}

impl CudaSession {
    pub(crate) fn new(
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

    /// The memory as ranks receive it, with its descriptors.
    pub(crate) fn parts(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>) {
        let OpenCuda { memory_bytes: bytes, device, .. } = self.open;
        let region = self.control.region();
        let kind = MemoryKind::Device { bytes, device, control_bytes: region.len() as u64 };
        (kind, self.held.memory().into_iter().chain([region.as_fd()]).collect())
    }

    fn table(&self) -> MutexGuard<'_, DoorbellTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> SessionStatus {
        let in_flight = self.table().in_flight() as u64;
        self.session.status(self.open.memory_bytes, in_flight, Some(self.open.device))
    }

    /// Lets no call enter any more, and cancels calls in flight. Returns whether the session was open.
    pub(crate) fn begin_close(&self) -> bool {
        self.table().close();
        self.session.begin_close()
    }

    /// Prepares calls; returns the number of the first.
    ///
    /// # Errors
    /// The error message for the client.
    pub(crate) fn prepare(&self, calls: &[PreparedCall], steps: &dyn Steps) -> Result<u32, String> {
        let model = steps.model();
        for (index, call) in calls.iter().enumerate() {
            check_prepared(call, &model, self.open.memory_bytes, self.control.routing_bytes())
                .map_err(|reason| format!("call {index} of the frame: {reason}"))?;
        }
        self.table().prepare(calls)
    }

    /// The answer to a PREPARE frame: the numbers of the calls, or an error message.
    pub(crate) fn prepare_frame(&self, payload: &[u8], steps: &dyn Steps) -> Vec<u8> {
        let (records, rest) = payload.as_chunks::<{ size_of::<PreparedCall>() }>();
        let prepared = if !rest.is_empty() || records.is_empty() {
            Err(format!(
                "a frame of {} bytes, expected one or more records of {} bytes",
                payload.len(),
                size_of::<PreparedCall>()
            ))
        } else {
            let calls: Vec<PreparedCall> =
                records.iter().map(|record| bytemuck::pod_read_unaligned(record)).collect();
            self.prepare(&calls, steps).map(|first| PrepareReply { first, count: calls.len() as u32 })
        };
        match prepared {
            Ok(reply) => bytemuck::bytes_of(&reply).to_vec(),
            Err(reason) => {
                [bytemuck::bytes_of(&PrepareReply { first: 0, count: 0 }), reason.as_bytes()].concat()
            }
        }
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
    pub(crate) fn take_rings(self: &Arc<Self>, steps: &dyn Steps, has_spare_cores: bool) {
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
    pub(crate) fn poll(self: &Arc<Self>, steps: &dyn Steps) -> bool {
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
            RingVerdict::Admitted { call, prepared } => {
                let trace = RequestTrace::of_session(self.session.number(), "cuda", began);
                let layout = RoutingLayout::new(prepared.flags, ring.rows, prepared.k);
                let returns = prepared.flags & RequestRecord::RETURN_ROUTING != 0;
                let end = CudaEnd {
                    session: Arc::clone(self),
                    doorbell,
                    returned: returns.then_some(layout),
                    raising: Raising::Caller,
                };
                let places =
                    RowPlaces { input: prepared.rows, output: prepared.output, tokens: ring.rows as usize };
                let request = self.request(doorbell, ring, &prepared, &layout, &steps.model(), began);
                Call::new(end, call, places, began, trace).submit(request, steps);
            }
            RingVerdict::Invalid { call, reason } => {
                let record = failed(call, &Failure::field("prepared call", reason));
                self.session.ended(&record, 0);
                self.answer(doorbell, &record, Raising::Caller);
                self.session.record(&record, began.elapsed());
            }
            RingVerdict::Closing => {}
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
        let PreparedCall { flags, layer, dtype, k, weight_version, .. } = *prepared;
        let has = |flag| flags & flag != 0;
        let carried = |name: &'static str, offset: usize, bytes: usize| {
            let copied = self.control.copy_routing(doorbell, offset, bytes).map(Bytes::from);
            copied.ok_or_else(|| {
                Failure::field(name, format!("{bytes} bytes exceed the doorbell's routing area"))
            })
        };
        let mut asked = asked(flags, layer, ring.rows, dtype, weight_version);
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

/// The client's side of a doorbell's call.
#[derive(Debug)]
struct CudaEnd {
    session: Arc<CudaSession>,
    doorbell: u32,
    /// Where the call's routing is returned, if the client asked for it.
    returned: Option<RoutingLayout>,
    raising: Raising,
}

impl CallEnd for CudaEnd {
    fn session(&self) -> &Session {
        &self.session.session
    }

    fn return_routing(&self, ids: &[u8], weights: &[u8]) {
        if let Some(layout) = &self.returned {
            // The layout was checked to lie within the routing area.
            let _ = self.session.control.write_routing(self.doorbell, 0, ids);
            let _ = self.session.control.write_routing(self.doorbell, layout.weights, weights);
        }
    }

    fn complete(&self, record: &CompletionRecord, tokens: usize, elapsed: Duration) {
        let CudaEnd { session, doorbell, raising, .. } = self;
        let mut table = session.table();
        if *raising == Raising::KilledRank && table.is_last(*doorbell, record.call) {
            // Under the lock under which rings are taken. If a later call was taken, the client has seen the end of this one.
            session.control.raise_unseen(*doorbell);
        }
        // Before the word is raised: the client may ring at once.
        table.complete(*doorbell);
        drop(table);
        session.session.ended(record, tokens);
        session.answer(*doorbell, record, *raising);
        session.session.record(record, elapsed);
    }

    fn raise(&self, call: u64) -> Option<Raise> {
        let control = &self.session.control;
        Some(Raise {
            memory: self.session.session.memory_id().0,
            word: control.doorbell_offset(self.doorbell) as u32,
            number: control.number_offset(self.doorbell) as u32,
            reserved: 0,
            call,
        })
    }

    fn set_raising(&mut self, raising: Raising) {
        self.raising = raising;
    }
}
