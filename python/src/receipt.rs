//! Answers and receipts.

use std::sync::Arc;

use bytes::Bytes;
use expertd_proto::{received_duration, v1};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tonic::Status;

use crate::array::Array;
use crate::element::Element;
use crate::errors::CallError;
use crate::input::Output;

/// Phase timings of one step, nanoseconds, of the slowest rank in each phase.
#[pyclass(frozen, get_all, module = "expertd")]
#[derive(Clone, Debug)]
pub(crate) struct StepTiming {
    step: u64,
    tokens: u32,
    copy_in_ns: u64,
    gate_ns: u64,
    prepare_ns: u64,
    dispatch_ns: u64,
    experts_ns: u64,
    combine_ns: u64,
    copy_out_ns: u64,
}

#[pymethods]
impl StepTiming {
    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

impl From<v1::StepTiming> for StepTiming {
    fn from(t: v1::StepTiming) -> StepTiming {
        StepTiming {
            step: t.step,
            tokens: t.tokens,
            copy_in_ns: t.copy_in_ns,
            gate_ns: t.gate_ns,
            prepare_ns: t.prepare_ns,
            dispatch_ns: t.dispatch_ns,
            experts_ns: t.experts_ns,
            combine_ns: t.combine_ns,
            copy_out_ns: t.copy_out_ns,
        }
    }
}

/// The record of how an answer was computed.
#[pyclass(frozen, module = "expertd")]
#[derive(Debug)]
pub(crate) struct Receipt {
    steps: Vec<u64>,
    #[pyo3(get)]
    generation: u64,
    #[pyo3(get)]
    weight_version: u64,
    #[pyo3(get)]
    weight_fingerprint: String,
    tokens_per_rank: Vec<u32>,
    timings: Vec<StepTiming>,
    topk_ids: Option<Py<Array>>,
    topk_weights: Option<Py<Array>>,
    #[pyo3(get)]
    queue_seconds: f64,
    #[pyo3(get)]
    step_seconds: f64,
}

#[pymethods]
impl Receipt {
    #[getter]
    fn steps<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.steps)
    }

    #[getter]
    fn tokens_per_rank<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.tokens_per_rank)
    }

    #[getter]
    fn timings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.timings.iter().cloned())
    }

    #[getter]
    fn topk_ids(&self, py: Python<'_>) -> Option<Py<Array>> {
        self.topk_ids.as_ref().map(|array| array.clone_ref(py))
    }

    #[getter]
    fn topk_weights(&self, py: Python<'_>) -> Option<Py<Array>> {
        self.topk_weights.as_ref().map(|array| array.clone_ref(py))
    }

    fn __repr__(&self) -> String {
        format!(
            "Receipt(steps={:?}, generation={}, weight_version={}, tokens_per_rank={:?}, step_seconds={})",
            self.steps, self.generation, self.weight_version, self.tokens_per_rank, self.step_seconds
        )
    }
}

/// A receipt whose arrays are not Python objects yet.
#[derive(Debug)]
pub(crate) struct Parts {
    message: v1::Receipt,
    topk_ids: Option<Array>,
    topk_weights: Option<Array>,
}

/// Copies ids and weights out of the message, whose memory they share with the rows.
pub(crate) fn from_message(mut message: v1::Receipt, tokens: usize) -> Parts {
    let take = |bytes: &mut Bytes, element: Element| {
        let bytes = std::mem::take(bytes);
        let k = bytes.len().checked_div(tokens * element.size()).unwrap_or(0);
        (k > 0).then(|| Array::new(Bytes::copy_from_slice(&bytes), element, vec![tokens, k])).flatten()
    };
    let topk_ids = take(&mut message.topk_ids, Element::I32);
    let topk_weights = take(&mut message.topk_weights, Element::F32);
    Parts { message, topk_ids, topk_weights }
}

fn seconds(duration: Option<prost_types::Duration>) -> f64 {
    duration.and_then(|duration| received_duration(&duration)).unwrap_or_default().as_secs_f64()
}

impl Parts {
    pub(crate) fn into_receipt(self, py: Python<'_>) -> PyResult<Receipt> {
        let Parts { message, topk_ids, topk_weights } = self;
        Ok(Receipt {
            steps: message.steps,
            generation: message.generation,
            weight_version: message.weight_version,
            weight_fingerprint: message.weight_fingerprint,
            tokens_per_rank: message.tokens_per_rank,
            timings: message.timings.into_iter().map(StepTiming::from).collect(),
            topk_ids: topk_ids.map(|array| Py::new(py, array)).transpose()?,
            topk_weights: topk_weights.map(|array| Py::new(py, array)).transpose()?,
            queue_seconds: seconds(message.queue_time),
            step_seconds: seconds(message.step_time),
        })
    }
}

/// The result of a call.
#[pyclass(frozen, get_all, module = "expertd")]
#[derive(Debug)]
pub(crate) struct Answer {
    /// An [`Array`], or the array that the caller passed as `out`.
    rows: Py<PyAny>,
    receipt: Py<Receipt>,
}

#[pymethods]
impl Answer {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let rows = self.rows.bind(py).repr()?;
        Ok(format!("Answer(rows={rows}, receipt={})", self.receipt.get().__repr__()))
    }
}

/// An answer that is not a Python object yet.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) rows: Rows,
    pub(crate) receipt: Parts,
}

/// The rows of an answer.
#[derive(Debug)]
pub(crate) enum Rows {
    /// In memory of their own.
    Own(Array),
    /// In the array that the caller passed.
    Given(Arc<Output>),
}

impl Received {
    /// Copies the rows into the caller's array, if there is one.
    ///
    /// # Errors
    /// INTERNAL if the answer has another size.
    pub(crate) fn placed(self, out: Option<Arc<Output>>) -> Result<Received, CallError> {
        match (self.rows, out) {
            (Rows::Own(array), Some(out)) => {
                out.fill(array.as_bytes())
                    .ok_or_else(|| Status::internal("the answer has another size than the rows"))?;
                Ok(Received { rows: Rows::Given(out), receipt: self.receipt })
            }
            (rows, _) => Ok(Received { rows, receipt: self.receipt }),
        }
    }
}

impl<'py> IntoPyObject<'py> for Received {
    type Target = Answer;
    type Output = Bound<'py, Answer>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, Answer>> {
        let receipt = Py::new(py, self.receipt.into_receipt(py)?)?;
        let rows = match self.rows {
            Rows::Own(array) => Py::new(py, array)?.into_any(),
            Rows::Given(out) => out.object(py),
        };
        Bound::new(py, Answer { rows, receipt })
    }
}
