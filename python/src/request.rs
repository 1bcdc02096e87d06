//! The arguments of a call as a message, and the message's answer as Python objects.

use std::time::Duration;

use expertd_proto::v1::{ForwardRequest, ForwardResponse, Receipt};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tonic::Status;

use crate::array::Array;
use crate::element::Element;
use crate::errors::Failure;
use crate::input::Input;
use crate::receipt::{self, Received};
use crate::runtime::timeout;

/// Optional arguments of `forward`, as the Python classes pass them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Options<'py> {
    model: String,
    dtype: Option<String>,
    topk_ids: Option<Bound<'py, PyAny>>,
    topk_weights: Option<Bound<'py, PyAny>>,
    token_ids: Option<Bound<'py, PyAny>>,
    shared_experts: String,
    expected_weight_version: Option<u64>,
    return_routing: bool,
    return_timings: bool,
}

/// A call of `forward`: its message, its time limit, and the shape of its answer.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) message: ForwardRequest,
    pub(crate) timeout: Option<Duration>,
    pub(crate) shape: Shape,
}

impl Call {
    /// Builds a call from the arguments of a Python method.
    ///
    /// # Errors
    /// TypeError, ValueError or BufferError that name the argument.
    pub(crate) fn new(
        layer: u32,
        rows: &Bound<'_, PyAny>,
        seconds: Option<f64>,
        options: &Options<'_>,
    ) -> PyResult<Call> {
        let timeout = timeout(seconds, "timeout")?;
        let (message, shape) = build(layer, rows, options)?;
        Ok(Call { message, timeout, shape })
    }
}

/// The shape of a request's rows, which its answer must have.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    element: Element,
    tokens: usize,
    hidden: usize,
}

/// Builds the message of one call.
///
/// # Errors
/// TypeError, ValueError or BufferError that name the argument.
fn build(layer: u32, rows: &Bound<'_, PyAny>, options: &Options<'_>) -> PyResult<(ForwardRequest, Shape)> {
    let rows = Input::take(rows, "rows")?.rows(options.dtype.as_deref())?;
    let [tokens, hidden] = rows.shape[..] else {
        return Err(PyValueError::new_err("rows must have the shape [tokens, hidden]"));
    };
    let Some(dtype) = rows.element.row_type() else {
        return Err(PyValueError::new_err("rows must be bf16, f16 or f32"));
    };
    let count = u32::try_from(tokens).map_err(|_| {
        PyValueError::new_err(format!("rows has {tokens} tokens, more than a message can count"))
    })?;
    let shape = Shape { element: rows.element, tokens, hidden };
    let mut request =
        ForwardRequest::inline(layer, count, dtype, rows.bytes).with_model(options.model.clone());
    request = match (&options.topk_ids, &options.topk_weights) {
        (None, None) => request,
        (Some(ids), Some(weights)) => with_routing(request, ids, weights, tokens)?,
        _ => {
            return Err(PyValueError::new_err(
                "topk_ids and topk_weights belong together: pass both, or neither to let the service run the gate",
            ));
        }
    };
    if let Some(ids) = &options.token_ids {
        let ids = Input::take(ids, "token_ids")?.into_i32("token_ids", "[tokens]", 1)?;
        request = request.with_token_ids(ids.bytes);
    }
    match options.shared_experts.as_str() {
        "include" => {}
        "exclude" => request = request.without_shared_experts(),
        other => {
            return Err(PyValueError::new_err(format!(
                "shared_experts is {other:?}; expected \"include\" or \"exclude\""
            )));
        }
    }
    request.expected_weight_version = options.expected_weight_version;
    request.return_routing = options.return_routing;
    request.return_timings = options.return_timings;
    Ok((request, shape))
}

fn with_routing(
    request: ForwardRequest,
    ids: &Bound<'_, PyAny>,
    weights: &Bound<'_, PyAny>,
    tokens: usize,
) -> PyResult<ForwardRequest> {
    let ids = Input::take(ids, "topk_ids")?.into_i32("topk_ids", "[tokens, k]", 2)?;
    let weights = Input::take(weights, "topk_weights")?.into_f32("topk_weights", "[tokens, k]", 2)?;
    if ids.shape != weights.shape || ids.shape[0] != tokens {
        return Err(PyValueError::new_err(format!(
            "topk_ids has shape {:?} and topk_weights {:?}; expected [{tokens}, k] of both",
            ids.shape, weights.shape
        )));
    }
    let k = u32::try_from(ids.shape[1]).unwrap_or(u32::MAX);
    if k == 0 {
        return Err(PyValueError::new_err("topk_ids has no columns; expected at least one expert per token"));
    }
    Ok(request.with_routing(ids.bytes, weights.bytes, k))
}

impl Shape {
    /// Reads the answer to a request of this shape.
    ///
    /// # Errors
    /// INTERNAL if the message does not have as many bytes of rows as the request.
    pub(crate) fn read_answer(&self, response: ForwardResponse) -> Result<Received, Failure> {
        let ForwardResponse { rows, receipt } = response;
        let found = rows.len();
        // The receipt's arrays share the message's memory with the rows. They are copied and dropped first, so that the
        // rows' memory has one owner and is not copied.
        let receipt = receipt::from_message(receipt.unwrap_or_else(Receipt::default), self.tokens);
        let Some(rows) = Array::new(rows, self.element, vec![self.tokens, self.hidden]) else {
            return Err(Status::internal(format!(
                "the service answered with {found} bytes of rows; expected {} tokens of {} {}",
                self.tokens,
                self.hidden,
                self.element.name()
            ))
            .into());
        };
        Ok(Received { rows, receipt })
    }
}
