//! Sessions in a GPU's memory. The Python half (`expertd/_cuda.py`) copies rows with torch; this half opens the session, prepares
//! calls, and enqueues them on torch's streams.

#![allow(unsafe_code, reason = "enqueues work on streams that Python names")]

use std::ptr::without_provenance_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_proto::session::cuda::wire::PreparedCall;
use expertd_proto::session::cuda::{CudaSession, CudaSessionOptions, Prepared, RoutingPlaces};
use expertd_proto::session::wire::RequestRecord;
use expertd_proto::session::{self, DType, SessionError};
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use tonic::Status;

use crate::dlpack;
use crate::element::Element;
use crate::errors::Failure;
use crate::receipt::{self, Receipt};
use crate::session::open_failure;

/// Time limit of opening a session and of preparing calls.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A session in the memory of one GPU.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeCudaSession {
    session: Arc<CudaSession>,
    device: u32,
    /// Number of failures of each doorbell that were raised as exceptions.
    raised: Vec<AtomicU64>,
    /// The session stays open until the process ends, because graphs use its memory.
    is_kept: AtomicBool,
    /// The process that opened the session. CUDA does not survive a fork.
    process: u32,
}

/// A call that the service has checked.
#[pyclass(frozen)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NativePrepared(Prepared);

/// What Python says about a call to prepare.
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
    places: PlaceArguments,
}

/// Places in the session's memory, in bytes.
#[derive(Clone, Copy, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct PlaceArguments {
    rows: u64,
    output: u64,
    ids: u64,
    weights: u64,
    token_ids: u64,
}

impl PreparedArguments {
    fn record(&self) -> PyResult<(PreparedCall, RoutingPlaces)> {
        let dtype = match self.dtype.as_str() {
            "bf16" => DType::Bf16,
            "f16" => DType::F16,
            "f32" => DType::F32,
            other => {
                let text = format!("dtype is {other:?}; expected \"bf16\", \"f16\" or \"f32\"");
                return Err(PyTypeError::new_err(text));
            }
        };
        let flags = [
            (!self.shared_experts, RequestRecord::EXCLUDE_SHARED),
            (self.expected_weight_version.is_some(), RequestRecord::EXPECT_WEIGHT_VERSION),
            (self.given_routing, RequestRecord::GIVEN_ROUTING),
            (self.return_routing, RequestRecord::RETURN_ROUTING),
            (self.token_ids, RequestRecord::TOKEN_IDS),
        ];
        let PlaceArguments { rows, output, ids, weights, token_ids } = self.places;
        let call = PreparedCall {
            layer: self.layer,
            dtype: dtype as u32,
            max_rows: self.max_rows,
            flags: flags.into_iter().filter_map(|(is_set, flag)| is_set.then_some(flag)).sum(),
            rows,
            output,
            timeout_us: self.timeout_us,
            weight_version: self.expected_weight_version.unwrap_or(0),
            k: self.k,
            ..PreparedCall::zeroed()
        };
        Ok((call, RoutingPlaces { ids, weights, token_ids }))
    }
}

impl NativeCudaSession {
    fn checked(&self) -> PyResult<&Arc<CudaSession>> {
        let found = std::process::id();
        if found != self.process {
            return Err(PyRuntimeError::new_err(format!(
                "this CUDA session was opened in process {} and is used in process {found}. CUDA does not survive a fork: make a \
                 client in each process",
                self.process
            )));
        }
        Ok(&self.session)
    }
}

fn raise(py: Python<'_>, error: SessionError) -> PyErr {
    let status = match error {
        SessionError::Driver { .. } | SessionError::Device(_) => Status::internal(error.to_string()),
        other => session::status(other),
    };
    Failure::from(status).into_exception(py)
}

#[pymethods]
impl NativeCudaSession {
    /// Opens a session with memory on GPU `device` of this process.
    #[new]
    fn new(
        py: Python<'_>,
        address: &str,
        device: u32,
        memory_bytes: usize,
        routing_bytes: u32,
        doorbells: u32,
    ) -> PyResult<NativeCudaSession> {
        let options = CudaSessionOptions { device, memory_bytes, doorbells, routing_bytes, timeout: TIMEOUT };
        let session = py.detach(|| CudaSession::open(address, &options));
        let session = session.map_err(|error| open_failure(address, error).into_exception(py))?;
        Ok(NativeCudaSession {
            session: Arc::new(session),
            device,
            raised: (0..doorbells).map(|_| AtomicU64::new(0)).collect(),
            is_kept: AtomicBool::new(false),
            process: std::process::id(),
        })
    }

    /// The session's memory, int32 `[bytes / 4]`.
    fn memory(&self) -> DeviceArray {
        let memory = self.session.memory();
        self.array(memory.address(), Element::I32, memory.bytes() / Element::I32.size())
    }

    /// The completion words of a doorbell, int32 `[words]`: 1 if the output of its last call is complete.
    fn words(&self, doorbell: u32) -> PyResult<DeviceArray> {
        let (address, count) = self
            .session
            .completion_words(doorbell)
            .ok_or_else(|| PyRuntimeError::new_err(format!("there is no doorbell {doorbell}")))?;
        Ok(self.array(address, Element::I32, count as usize))
    }

    /// Describes calls to the service.
    fn prepare(&self, py: Python<'_>, calls: Vec<PreparedArguments>) -> PyResult<Vec<NativePrepared>> {
        let records = calls.iter().map(PreparedArguments::record).collect::<PyResult<Vec<_>>>()?;
        let session = self.checked()?;
        let prepared = py.detach(|| session.prepare_routed(&records)).map_err(|error| raise(py, error))?;
        Ok(prepared.into_iter().map(NativePrepared).collect())
    }

    /// Enqueues a call of the first `rows` rows on a stream of the session's GPU.
    fn enqueue(
        &self,
        py: Python<'_>,
        call: &NativePrepared,
        doorbell: u32,
        rows: u32,
        stream: usize,
    ) -> PyResult<()> {
        let session = self.checked()?;
        let call = call.0;
        // Detached, because the driver waits if the stream's queue is full.
        let enqueued = py.detach(|| {
            // SAFETY: `expertd/_cuda.py` passes torch's current stream of the session's GPU; torch uses primary contexts and
            // never destroys its streams. It orders the calls of each doorbell by locks and events, and keeps the session
            // open where a graph captured a call.
            unsafe { session.enqueue(call, doorbell, rows, without_provenance_mut(stream)) }
        });
        enqueued.map_err(|error| raise(py, error))
    }

    /// Raises the exception of a call that failed and was not raised yet, or of the session's end.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let session = self.checked()?;
        for (doorbell, raised) in (0..).zip(&self.raised) {
            let status = session.status(doorbell).map_err(|error| raise(py, error))?;
            if raised.swap(status.failures, Ordering::AcqRel) >= status.failures {
                continue;
            }
            if let Some(failure) = status.last_failure {
                return Err(raise(py, failure.into()));
            }
        }
        Ok(())
    }

    /// Whether the session has ended.
    fn has_ended(&self) -> bool {
        matches!(self.session.status(0), Err(SessionError::Ended { .. }))
    }

    /// The number of calls of a doorbell that ended, and the receipt of the last one if it was answered.
    fn last(&self, py: Python<'_>, doorbell: u32) -> PyResult<(u64, Option<Receipt>)> {
        let session = self.checked()?;
        let status = session.status(doorbell).map_err(|error| raise(py, error))?;
        let receipt =
            status.last.map(|last| receipt::from_message(session::receipt(&last, true), 1).into_receipt(py));
        Ok((status.calls, receipt.transpose()?))
    }

    /// Keeps the session open until the process ends.
    fn keep(&self) {
        if !self.is_kept.swap(true, Ordering::AcqRel) {
            std::mem::forget(Arc::clone(&self.session));
        }
    }
}

impl NativeCudaSession {
    fn array(&self, address: u64, element: Element, len: usize) -> DeviceArray {
        DeviceArray { session: Arc::clone(&self.session), device: self.device, address, element, len }
    }
}

/// Memory on a GPU, `[len]`, for `torch.from_dlpack`.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct DeviceArray {
    session: Arc<CudaSession>,
    device: u32,
    address: u64,
    element: Element,
    len: usize,
}

#[pymethods]
impl DeviceArray {
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // No stream has work on this memory before its consumer does.
        let _ = stream;
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) || copy == Some(true) {
            return Err(PyBufferError::new_err("memory of a session is shared without a copy"));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let memory = dlpack::Memory {
            data: without_provenance_mut(self.address as usize),
            device: self.__dlpack_device__(),
            element: self.element,
            shape: &[self.len],
        };
        dlpack::export(py, Arc::<CudaSession>::clone(&self.session), &memory, versioned)
    }

    /// `(kDLCUDA, device)`.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CUDA, i32::try_from(self.device).unwrap_or(i32::MAX))
    }
}
