//! Sessions in a GPU's memory. The Python half (`expertd/_cuda.py`) checks tensors and finds torch's streams; this half opens the session,
//! prepares calls, and enqueues them.

#![allow(unsafe_code, reason = "enqueues work on streams that Python names")]

use std::ffi::c_void;
use std::io::Write as _;
use std::ptr::without_provenance_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_client::session::cuda::wire::PreparedCall;
use expertd_client::session::cuda::{
    CallArrays, CudaSession, CudaSessionOptions, IntegerArray, Lane, Prepared, RoutingArrays, WeightPin,
};
use expertd_client::session::wire::RequestRecord;
use expertd_client::session::{self, DType, SessionError};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use tonic::Status;

use crate::errors::CallError;
use crate::receipt::{self, Receipt};
use crate::runtime::OwnProcess;
use crate::session::open_failure;

/// Time limit of opening a session and of preparing calls.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Two lanes: one for calls outside of graphs and one for calls that graphs capture, because nothing orders a replay against other calls.
const LANES: usize = 2;
const CAPTURED: usize = 1;

/// A session with its lanes.
#[derive(Debug)]
struct OpenSession {
    lanes: Vec<Lane>,
    /// Number of failures of each lane that were raised as exceptions.
    raised: [AtomicU64; LANES],
    /// Number of each lane's calls that were released after the session's end, and whose exception was raised.
    raised_released: [AtomicU64; LANES],
    /// Number of each lane's calls when an exception last said that other weights had computed one.
    raised_moved: [AtomicU64; LANES],
    /// Number of each lane's moves to other weights until the last check.
    moves: [AtomicU32; LANES],
    /// The same until the last check before the first one that failed.
    right_moves: [AtomicU32; LANES],
    /// The process ends when a call in a replayed graph fails.
    ends_process: bool,
    /// The session stays open until the process ends, because graphs use its memory.
    is_kept: AtomicBool,
    /// The weights that must compute the calls.
    pin: Option<WeightPin>,
    process: OwnProcess,
}

/// A session in the memory of one GPU.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeCudaSession {
    open: Arc<OpenSession>,
    /// Size of a lane's memory for rows in bytes; as much again is for outputs.
    area_bytes: u64,
}

/// A call that the service has checked, for each lane.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativePrepared {
    open: Arc<OpenSession>,
    of_lanes: [Prepared; LANES],
}

/// The arguments of a call to prepare, from Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct PreparedArguments {
    layer: u32,
    dtype: String,
    max_rows: u32,
    shared_experts: bool,
    expected_weight_version: Option<u64>,
    timeout_us: u64,
    /// Experts per token of given or returned routing; 0 without either.
    k: u32,
    given_routing: bool,
    return_routing: bool,
    token_ids: bool,
}

fn element_type(name: &str) -> PyResult<DType> {
    DType::ALL.into_iter().find(|dtype| dtype.to_string() == name).ok_or_else(|| {
        PyTypeError::new_err(format!("dtype is {name:?}; expected \"bf16\", \"f16\" or \"f32\""))
    })
}

impl PreparedArguments {
    /// The call with its places in the memory of a lane.
    fn record(&self, lane: usize, area_bytes: u64) -> PyResult<PreparedCall> {
        let flags = [
            (!self.shared_experts, RequestRecord::EXCLUDE_SHARED),
            (self.expected_weight_version.is_some(), RequestRecord::EXPECT_WEIGHT_VERSION),
            (self.given_routing, RequestRecord::GIVEN_ROUTING),
            (self.return_routing, RequestRecord::RETURN_ROUTING),
            (self.token_ids, RequestRecord::TOKEN_IDS),
        ];
        let rows = 2 * lane as u64 * area_bytes;
        Ok(PreparedCall {
            layer: self.layer,
            dtype: element_type(&self.dtype)? as u32,
            max_rows: self.max_rows,
            flags: flags.into_iter().filter_map(|(is_set, flag)| is_set.then_some(flag)).sum(),
            rows,
            output: rows + area_bytes,
            timeout_us: self.timeout_us,
            weight_version: self.expected_weight_version.unwrap_or(0),
            k: self.k,
            ..PreparedCall::zeroed()
        })
    }
}

/// Routing that Python passes: addresses of ids and weights on the GPU, whether ids have 64 bits, the weights' type as
/// [`DType`] numbers it, and whether rows with weights that are not finite become NaN.
type RoutingArguments = (u64, bool, u64, u32, bool);

impl OpenSession {
    fn check_process(&self) -> PyResult<()> {
        self.process.check("CUDA session")
    }

    /// Finds a call that failed and was not raised yet, or the session's end.
    fn check(&self) -> Result<(), SessionError> {
        self.check_lanes(LANES)
    }

    /// Like [`check`](Self::check), but leaves calls that graphs captured to the thread that replays the graph. That thread then finds
    /// their failures even if this one was the first to find that the session has ended.
    fn check_eager(&self) -> Result<(), SessionError> {
        self.check_lanes(CAPTURED)
    }

    fn check_lanes(&self, lanes: usize) -> Result<(), SessionError> {
        for (index, lane) in self.lanes.iter().enumerate().take(lanes) {
            let raised = &self.raised[index];
            let has_failed = lane.has_failed(raised.load(Ordering::Acquire));
            if !has_failed.inspect_err(|_| _ = self.note(lanes))? {
                let (known, moves) = (self.raised_moved[index].load(Ordering::Acquire), &self.moves[index]);
                self.check_weights(index, known, moves)?;
                continue;
            }
            let status = lane.status()?;
            if raised.swap(status.failures, Ordering::AcqRel) < status.failures
                && let Some(failure) = status.last_failure
            {
                return Err(failure.into());
            }
        }
        Ok(())
    }

    /// Finds that calls of a lane, after its first `known` and its first `checked` moves, were computed by other weights than the client
    /// expects, or may have been.
    fn check_weights(&self, index: usize, known: u64, checked: &AtomicU32) -> Result<(), SessionError> {
        let (Some(pin), lane) = (&self.pin, &self.lanes[index]) else { return Ok(()) };
        let counts = lane.counts()?;
        if counts.calls <= known {
            return Ok(());
        }
        let checked = pin.check(checked.load(Ordering::Acquire), &counts, || Ok(lane.status()?.last));
        // A call that failed leaves the weights of those before it unchecked.
        if counts.weight_version != 0 {
            let before = self.moves[index].swap(counts.moves, Ordering::AcqRel);
            if checked.is_ok() {
                let right = &self.right_moves[index];
                let _ = right.compare_exchange(before, counts.moves, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        checked.inspect_err(|_| self.raised_moved[index].store(counts.calls, Ordering::Release))
    }

    /// Finds a call that failed, whether or not it was raised, or that other weights computed, or the session's end.
    fn verify(&self) -> Result<(), SessionError> {
        for (index, lane) in self.lanes.iter().enumerate() {
            if lane.failures()? > 0
                && let Some(failure) = lane.status()?.last_failure
            {
                return Err(failure.into());
            }
            self.check_weights(index, 0, &self.right_moves[index])?;
        }
        Ok(())
    }

    /// Finds the session's end if calls failed or were released since the last exception: those of replayed graphs.
    fn check_ended(&self) -> Result<(), SessionError> {
        if self.note(LANES) { self.lanes[0].status().map(drop) } else { Ok(()) }
    }

    /// Whether calls of the first `lanes` lanes failed or were released since this was last called.
    fn note(&self, lanes: usize) -> bool {
        let mut found = false;
        for (index, lane) in self.lanes.iter().enumerate().take(lanes) {
            let counts =
                [(&self.raised[index], lane.failed()), (&self.raised_released[index], lane.released())];
            for (raised, now) in counts {
                found |= raised.swap(now, Ordering::AcqRel) < now;
            }
        }
        found
    }

    /// Keeps the session until the process ends, because a graph captures a call of it.
    fn keep(this: &Arc<OpenSession>) -> Result<(), SessionError> {
        if this.is_kept.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        std::mem::forget(Arc::clone(this));
        if this.ends_process { this.lanes[CAPTURED].on_failure(end_process) } else { Ok(()) }
    }
}

/// Ends the process because a call in a replayed graph failed. An orderly exit would wait for the GPU, and other threads would go on with the
/// output.
#[allow(clippy::disallowed_methods, reason = "a client has no ranks to reap")]
fn end_process(reason: &str) {
    let text = "a call in a replayed CUDA graph failed, and its output is not a result. Replays raise no exception, so that this process \
                ends. A program that makes its client with on_graph_failure=\"raise\", and calls check() before it uses what a replay \
                computed, gets an exception instead";
    let _ = writeln!(std::io::stderr(), "expertd: {reason}: {text}");
    std::process::abort();
}

fn raise(py: Python<'_>, error: SessionError) -> PyErr {
    let status = match error {
        SessionError::Driver { .. } | SessionError::Device(_) => Status::internal(error.to_string()),
        other => session::status(other),
    };
    CallError::from(status).into_exception(py)
}

#[pymethods]
impl NativeCudaSession {
    /// Opens a session with memory on GPU `device` of this process. `ends_process`: when a call in a replayed graph fails. `fingerprint`: of the
    /// weights that must compute the calls.
    #[new]
    fn new(
        py: Python<'_>,
        address: &str,
        device: u32,
        area_bytes: u64,
        routing_bytes: u32,
        ends_process: bool,
        fingerprint: Option<String>,
    ) -> PyResult<NativeCudaSession> {
        let memory_bytes = 2 * LANES * usize::try_from(area_bytes)?;
        let options = CudaSessionOptions {
            device,
            memory_bytes,
            doorbells: LANES as u32,
            routing_bytes,
            timeout: TIMEOUT,
        };
        let session = py.detach(|| CudaSession::open(address, &options));
        let session = session.map_err(|error| open_failure(address, error).into_exception(py))?;
        let lanes = py.detach(|| Lane::all(&Arc::new(session))).map_err(|error| raise(py, error))?;
        let open = OpenSession {
            lanes,
            raised: [const { AtomicU64::new(0) }; LANES],
            raised_released: [const { AtomicU64::new(0) }; LANES],
            raised_moved: [const { AtomicU64::new(0) }; LANES],
            moves: [const { AtomicU32::new(0) }; LANES],
            right_moves: [const { AtomicU32::new(0) }; LANES],
            ends_process,
            is_kept: AtomicBool::new(false),
            pin: fingerprint.map(WeightPin::new),
            process: OwnProcess::current(),
        };
        Ok(NativeCudaSession { open: Arc::new(open), area_bytes })
    }

    /// Describes calls to the service.
    fn prepare(&self, py: Python<'_>, calls: Vec<PreparedArguments>) -> PyResult<Vec<NativePrepared>> {
        self.open.check_process()?;
        let mut records = Vec::with_capacity(LANES * calls.len());
        for call in &calls {
            for lane in 0..LANES {
                records.push(call.record(lane, self.area_bytes)?);
            }
        }
        let session = self.open.lanes[0].session();
        let prepared = py.detach(|| session.prepare_for_lane(&records)).map_err(|error| raise(py, error))?;
        let of_calls = prepared.as_chunks::<LANES>().0.iter();
        Ok(of_calls.map(|&of_lanes| NativePrepared { open: Arc::clone(&self.open), of_lanes }).collect())
    }

    /// Raises the exception of a call that failed and was not raised yet, or of the session's end.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.open.check_process()?;
        self.open.check().map_err(|error| raise(py, error))
    }

    /// Raises the exception of a failed call, or of the end of the session, each time that it is called: several threads of an engine ask.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.open.check_process()?;
        self.open.verify().map_err(|error| raise(py, error))
    }

    /// Of a session that has ended: raises its end if calls of replayed graphs failed or were released since the last exception.
    fn check_ended(&self, py: Python<'_>) -> PyResult<()> {
        self.open.check_process()?;
        self.open.check_ended().map_err(|error| raise(py, error))
    }

    /// Whether graphs captured calls of the session.
    fn is_kept(&self) -> bool {
        self.open.is_kept.load(Ordering::Acquire)
    }

    /// Whether the session has ended.
    fn has_ended(&self) -> bool {
        matches!(self.open.lanes[0].status(), Err(SessionError::Ended { .. }))
    }

    /// Number of calls that ended, those that graphs captured not included, and the receipt of the last one if it was answered.
    fn last(&self, py: Python<'_>) -> PyResult<(u64, Option<Receipt>)> {
        self.open.check_process()?;
        let status = self.open.lanes[0].status().map_err(|error| raise(py, error))?;
        let receipt =
            status.last.map(|last| receipt::from_message(session::receipt(&last, true), 1).into_receipt(py));
        Ok((status.calls, receipt.transpose()?))
    }
}

#[pymethods]
impl NativePrepared {
    /// Enqueues a call on a stream of the session's GPU, after it raised the exception of a call that failed before. All arrays are row-major
    /// and named by their addresses; `token_ids` are int64 if its second part says so. Returns the call's number, or 0 if a graph
    /// captured it.
    #[allow(
        clippy::too_many_arguments,
        reason = "a call from Python with positional arguments takes the least time"
    )]
    fn call(
        &self,
        py: Python<'_>,
        stream: usize,
        tokens: u32,
        rows: u64,
        output: u64,
        routing: Option<RoutingArguments>,
        token_ids: Option<(u64, bool)>,
        returned: Option<(u64, u64)>,
    ) -> PyResult<u64> {
        let open = &self.open;
        open.check_process()?;
        let given_routing = |(ids, are_wide, weights, dtype, masks): RoutingArguments| {
            let weights_dtype = DType::from_code(dtype).ok_or_else(|| {
                PyTypeError::new_err(format!("weights have the unknown element type {dtype}"))
            })?;
            Ok::<_, PyErr>(RoutingArrays {
                ids: IntegerArray { address: ids, are_wide },
                weights,
                weights_dtype,
                masks,
            })
        };
        let arrays = CallArrays {
            rows,
            output,
            routing: routing.map(given_routing).transpose()?,
            token_ids: token_ids.map(|(address, are_wide)| IntegerArray { address, are_wide }),
            returned,
        };
        // Detached, because the driver waits if the stream's queue is full, and a lane's lock is held meanwhile.
        let called = py.detach(|| {
            let stream: *mut c_void = without_provenance_mut(stream);
            open.check_eager()?;
            // SAFETY: `expertd/_cuda.py` passes a current stream of torch of the session's GPU; torch uses primary contexts and
            // never destroys its streams. It passes tensors of the shapes that the call needs, whose memory torch gives
            // to later work of the same stream only. A session that a graph captured is kept open.
            unsafe {
                let is_captured = open.lanes[0].is_captured(stream)?;
                if is_captured {
                    OpenSession::keep(open)?;
                }
                let lane = if is_captured { CAPTURED } else { 0 };
                open.lanes[lane].call(&self.of_lanes[lane], tokens, &arrays, stream, is_captured)
            }
        });
        called.map_err(|error| raise(py, error))
    }
}
