//! Calls on arrays of the caller's own, as work of the caller's streams.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUstream, CUstreamCaptureStatus};
use expertd_types::DType;

use super::client::{CudaSession, DoorbellStatus, FailureHandler, Prepared};
use super::control::Counts;
use super::copies::{Copies, Integers, Put, Take, Weights};
use super::driver::check;
use super::wire::RoutingLayout;
use crate::client::SessionError;

/// int32 or int64 elements in the memory of the session's GPU.
#[derive(Clone, Copy, Debug)]
pub struct IntegerArray {
    /// Address of the first one.
    pub address: CUdeviceptr,
    /// True for int64 elements, false for int32. A value beyond 32 bits becomes an id that no expert has.
    pub are_wide: bool,
}

/// Routing of the caller, `[rows, k]` each, in the memory of the session's GPU.
#[derive(Clone, Copy, Debug)]
pub struct RoutingArrays {
    /// Expert ids.
    pub ids: IntegerArray,
    /// Address of the weights.
    pub weights: CUdeviceptr,
    /// Element type of the weights.
    pub weights_dtype: DType,
    /// A row with a weight that is not finite gets NaN as its output, and its weights are sent as zeros. Otherwise the service refuses
    /// the call.
    pub masks: bool,
}

/// What a call reads and writes: row-major arrays of the caller in the memory of the session's GPU.
#[derive(Clone, Copy, Debug)]
pub struct CallArrays {
    /// Address of the rows, `[rows, hidden]`.
    pub rows: CUdeviceptr,
    /// Address of the output, of the same shape and type; it may be that of the rows.
    pub output: CUdeviceptr,
    /// Required by calls that were prepared with given routing, ignored by others.
    pub routing: Option<RoutingArrays>,
    /// `[rows]`; required by calls that were prepared with token ids, ignored by others.
    pub token_ids: Option<IntegerArray>,
    /// Addresses of i32 and f32 `[rows, k]` for returned ids and weights; required by calls that return them.
    pub returned: Option<(CUdeviceptr, CUdeviceptr)>,
}

/// A doorbell whose calls copy between arrays of the caller and the session's memory. They are work of the caller's streams and follow one
/// another, also from several streams.
#[derive(Debug)]
pub struct Lane {
    session: Arc<CudaSession>,
    copies: Arc<Copies>,
    doorbell: u32,
    /// Recorded after each call that is not captured.
    event: CUevent,
    last: Mutex<Last>,
}

/// The last call of a lane.
#[derive(Debug)]
struct Last {
    /// Its stream; null before the first call.
    stream: CUstream,
    is_first: bool,
    /// Number of calls so far, as the service counts them.
    calls: u64,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Lane {}
// SAFETY: as above; the mutex guards what changes.
unsafe impl Sync for Lane {}

impl Lane {
    /// Makes a lane for each doorbell of a session, and compiles the kernels that copy.
    ///
    /// # Errors
    /// The driver's error.
    pub fn all(session: &Arc<CudaSession>) -> Result<Vec<Lane>, SessionError> {
        let copies = Arc::new(Copies::load(session.gpu(), session.doorbells())?);
        let _entered = session.gpu().enter()?;
        let lane = |doorbell| {
            let mut event = ptr::null_mut();
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: the argument is valid for writes; the event is destroyed in drop.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
            Ok(Lane {
                session: Arc::clone(session),
                copies: Arc::clone(&copies),
                doorbell,
                event,
                last: Mutex::new(Last { stream: ptr::null_mut(), is_first: true, calls: 0 }),
            })
        };
        (0..session.doorbells()).map(lane).collect()
    }

    /// The session.
    #[must_use]
    pub const fn session(&self) -> &Arc<CudaSession> {
        &self.session
    }

    /// Whether a stream is being captured.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// `stream` is a live stream of the session's GPU in its primary context.
    pub unsafe fn is_captured(&self, stream: *mut c_void) -> Result<bool, SessionError> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let _entered = self.session.gpu().enter()?;
        // SAFETY: the argument is valid for writes; the caller vouches for the stream.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream.cast(), &raw mut status) })?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Enqueues a call of `rows` rows on a stream, in parts if they are more than the call was prepared for, and returns the number of the
    /// last part among the lane's calls. Work of the stream that was enqueued before has written the arrays that the call reads, and work
    /// that is enqueued later finds the output: NaN if the call failed. The host waits for nothing.
    ///
    /// `is_captured` says that a graph captures the stream. Nothing orders replays of graphs and other calls, so that captured calls
    /// need a lane of their own; their number is 0.
    ///
    /// # Errors
    /// If the call was prepared by another session or with arrays that `arrays` lacks, the session has ended, or the driver refuses the
    /// work.
    ///
    /// # Safety
    /// `stream` is a live stream (`CUstream` or `cudaStream_t`) of the session's GPU in its primary context, and `arrays` have the elements
    /// that the call needs until the work has ended. The work, graphs that captured it included, has ended before the session is
    /// dropped.
    pub unsafe fn call(
        &self,
        call: &Prepared,
        rows: u32,
        arrays: &CallArrays,
        stream: *mut c_void,
        is_captured: bool,
    ) -> Result<u64, SessionError> {
        self.session.check_call(call, self.doorbell, rows.min(call.max_rows()))?;
        let stream: CUstream = stream.cast();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = self.session.gpu().enter()?;
        if !is_captured && !last.is_first && last.stream != stream {
            // SAFETY: the event is recorded by the last call; the caller vouches for the stream.
            check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.event, 0) })?;
        }
        let mut first = 0;
        while first < rows {
            let count = call.max_rows().min(rows - first);
            let (put, take) = self.copies_of(call, first, count, arrays)?;
            // SAFETY: the context is current. Places are in the session's memory (checked by the service) and in its control region
            // (checked by `copies_of`), which stay mapped until the session is dropped; the caller vouches for the rest.
            unsafe {
                self.copies.put(put, stream)?;
                self.session.start(call, self.doorbell, count, stream)?;
                self.copies.take(take, stream)?;
            }
            last.calls += u64::from(!is_captured);
            first += count;
        }
        if is_captured {
            return Ok(0);
        }
        // SAFETY: event and stream are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, stream) })?;
        (last.stream, last.is_first) = (stream, false);
        Ok(last.calls)
    }

    /// The copies of `count` rows from row `first` on.
    fn copies_of(
        &self,
        call: &Prepared,
        first: u32,
        count: u32,
        arrays: &CallArrays,
    ) -> Result<(Put, Take), SessionError> {
        let lacks = |what: &str| {
            Err(SessionError::Device(format!("the call was prepared with {what}, and its arrays have none")))
        };
        let layout = RoutingLayout::new(call.flags(), count, call.k());
        let places = self.session.call_places(call, self.doorbell);
        let row_bytes = (self.session.hidden() * call.dtype().size()) as u64;
        let (before, bytes) = (u64::from(first) * row_bytes, u64::from(count) * row_bytes);
        let routed_before = u64::from(first) * u64::from(call.k());
        let integers = |array: IntegerArray, before: u64| Integers {
            data: array.address + before * if array.are_wide { 8 } else { 4 },
            are_wide: array.are_wide.into(),
        };
        let (ids_place, weights_place) = (places.routing, places.routing + layout.weights as u64);
        let mut put = Put {
            rows: arrays.rows + before,
            rows_place: places.rows,
            rows_bytes: bytes,
            tokens: count.into(),
            ..Put::default()
        };
        let mut take = Take {
            word: places.word,
            arrivals: self.copies.arrivals(self.doorbell),
            nan: not_a_number(call.dtype()),
            output_place: places.output,
            output: arrays.output + before,
            output_bytes: bytes,
            row_bytes,
            ..Take::default()
        };
        if call.has_given_routing() {
            let Some(routing) = arrays.routing else { return lacks("given routing") };
            let size = routing.weights_dtype.size() as u64;
            let weights = Weights {
                data: routing.weights + routed_before * size,
                dtype: routing.weights_dtype as u32,
                k: call.k(),
            };
            put.routed = u64::from(count) * u64::from(call.k());
            (put.ids, put.ids_place) = (integers(routing.ids, routed_before), ids_place);
            (put.weights, put.weights_place) = (weights, weights_place);
            put.masks = routing.masks.into();
            take.masks = if routing.masks { weights } else { Weights::default() };
        }
        if layout.token_bytes > 0 {
            let Some(token_ids) = arrays.token_ids else { return lacks("token ids") };
            put.token_ids = integers(token_ids, first.into());
            put.token_ids_place = places.routing + layout.token_ids as u64;
        }
        if call.returns_routing() {
            let Some((ids, weights)) = arrays.returned else { return lacks("returned routing") };
            take.routed = u64::from(count) * u64::from(call.k());
            (take.ids, take.ids_place) = (ids + routed_before * 4, ids_place);
            (take.weights, take.weights_place) = (weights + routed_before * 4, weights_place);
        }
        Ok((put, take))
    }

    /// True if the lane has more than `known` failed calls. Waits for the status of a call whose completion word is raised,
    /// as [`CudaSession::status`] does.
    ///
    /// # Errors
    /// As [`CudaSession::status`].
    pub fn has_failed(&self, known: u64) -> Result<bool, SessionError> {
        Ok(self.session.counts(self.doorbell)?.failures > known)
    }

    /// How the calls ended, in short. Waits as [`has_failed`](Self::has_failed) does.
    ///
    /// # Errors
    /// As [`CudaSession::status`].
    pub fn counts(&self) -> Result<Counts, SessionError> {
        self.session.counts(self.doorbell)
    }

    /// As [`failures`](Self::failures), also once the session has ended: the service fails calls before it ends a session.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.session.failed(self.doorbell)
    }

    /// Number of calls of this lane that failed, as [`CudaSession::failures`] says.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn failures(&self) -> Result<u64, SessionError> {
        self.session.failures(self.doorbell)
    }

    /// Number of calls of this lane that were released because the session had ended.
    #[must_use]
    pub fn released(&self) -> u64 {
        self.session.released(self.doorbell)
    }

    /// Has `handler` called when a call of this lane fails, as [`CudaSession::on_failure`] says.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn on_failure(&self, handler: FailureHandler) -> Result<(), SessionError> {
        self.session.on_failure(self.doorbell, handler)
    }

    /// How the calls ended.
    ///
    /// # Errors
    /// As [`CudaSession::status`].
    pub fn status(&self) -> Result<DoorbellStatus, SessionError> {
        self.session.status(self.doorbell)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Ok(_entered) = self.session.gpu().enter() {
            // SAFETY: destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Bits of two quiet NaN of 16 bits, or of one of 32.
const fn not_a_number(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 => 0x7fc0_7fc0,
        DType::F16 => 0x7e00_7e00,
        DType::F32 => 0x7fc0_0000,
    }
}
