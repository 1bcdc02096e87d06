//! The arguments of a call as a message, and the message's answer as Python objects.

use std::sync::Arc;
use std::time::Duration;

use expertd_proto::v1::{ForwardRequest, ForwardResponse, Receipt};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tonic::Status;

use crate::array::Array;
use crate::element::Element;
use crate::errors::CallError;
use crate::input::{Input, Output};
use crate::receipt::{self, Received, Rows};
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

/// The arguments of `forward`, checked as far as this side can.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) model: String,
    pub(crate) layer: u32,
    /// `[tokens, hidden]`
    pub(crate) rows: Input,
    pub(crate) routing: Option<GivenRouting>,
    /// int32 `[tokens]`
    pub(crate) token_ids: Option<Input>,
    pub(crate) shared_experts: bool,
    pub(crate) expected_weight_version: Option<u64>,
    /// Fingerprint of the weights that must compute the answer.
    pub(crate) weights: Option<Arc<str>>,
    pub(crate) return_routing: bool,
    pub(crate) return_timings: bool,
    pub(crate) timeout: Option<Duration>,
    /// The array that receives the answer's rows, if the caller gave one.
    pub(crate) out: Option<Arc<Output>>,
}

/// Routing that the caller chose.
#[derive(Debug)]
pub(crate) struct GivenRouting {
    /// int32 `[tokens, k]`
    pub(crate) ids: Input,
    /// f32 `[tokens, k]`
    pub(crate) weights: Input,
}

impl GivenRouting {
    /// Experts per token.
    pub(crate) fn k(&self) -> usize {
        self.ids.shape[1]
    }
}

/// A call of `forward` over gRPC: its message, its time limit, and the shape of its answer.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) message: ForwardRequest,
    pub(crate) timeout: Option<Duration>,
    pub(crate) shape: Shape,
}

/// The shape of a request's rows, which its answer must have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) element: Element,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
}

impl Arguments {
    /// Reads the arguments of a Python method. `weights` are those that its client expects.
    ///
    /// # Errors
    /// TypeError, ValueError or BufferError that name the argument.
    pub(crate) fn new(
        layer: u32,
        rows: &Bound<'_, PyAny>,
        seconds: Option<f64>,
        options: Options<'_>,
        out: Option<&Bound<'_, PyAny>>,
        weights: Option<&Arc<str>>,
    ) -> PyResult<Arguments> {
        let timeout = timeout(seconds, "timeout")?;
        let rows = Input::take(rows, "rows")?.rows(options.dtype.as_deref())?;
        let out =
            out.map(|out| Output::take(out, &rows, options.dtype.as_deref()).map(Arc::new)).transpose()?;
        let tokens = rows.shape[0];
        if u32::try_from(tokens).is_err() {
            return Err(PyValueError::new_err(format!(
                "rows has {tokens} tokens, more than a message can count"
            )));
        }
        let routing = match (&options.topk_ids, &options.topk_weights) {
            (None, None) => None,
            (Some(ids), Some(weights)) => Some(given_routing(ids, weights, tokens)?),
            _ => {
                return Err(PyValueError::new_err(
                    "topk_ids and topk_weights belong together: pass both, or neither to let the service run the gate",
                ));
            }
        };
        let token_ids = options
            .token_ids
            .as_ref()
            .map(|ids| Input::take(ids, "token_ids")?.into_i32("token_ids", "[tokens]", 1));
        let shared_experts = match options.shared_experts.as_str() {
            "include" => true,
            "exclude" => false,
            other => {
                return Err(PyValueError::new_err(format!(
                    "shared_experts is {other:?}; expected \"include\" or \"exclude\""
                )));
            }
        };
        Ok(Arguments {
            model: options.model,
            layer,
            rows,
            routing,
            token_ids: token_ids.transpose()?,
            shared_experts,
            expected_weight_version: options.expected_weight_version,
            weights: weights.cloned(),
            return_routing: options.return_routing,
            return_timings: options.return_timings,
            timeout,
            out,
        })
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape { element: self.rows.element, tokens: self.rows.shape[0], hidden: self.rows.shape[1] }
    }

    /// The call as a message.
    pub(crate) fn into_call(self) -> Call {
        let shape = self.shape();
        let dtype = shape.element.row_type().unwrap_or_default();
        let tokens = u32::try_from(shape.tokens).unwrap_or(u32::MAX);
        let mut message =
            ForwardRequest::inline(self.layer, tokens, dtype, self.rows.into_bytes()).with_model(self.model);
        if let Some(routing) = self.routing {
            let k = u32::try_from(routing.k()).unwrap_or(u32::MAX);
            message = message.with_routing(routing.ids.into_bytes(), routing.weights.into_bytes(), k);
        }
        if let Some(ids) = self.token_ids {
            message = message.with_token_ids(ids.into_bytes());
        }
        if !self.shared_experts {
            message = message.without_shared_experts();
        }
        message.expected_weight_version = self.expected_weight_version;
        message.expected_weight_fingerprint = self.weights.as_deref().unwrap_or_default().to_owned();
        message.return_routing = self.return_routing;
        message.return_timings = self.return_timings;
        Call { message, timeout: self.timeout, shape }
    }
}

fn given_routing(
    ids: &Bound<'_, PyAny>,
    weights: &Bound<'_, PyAny>,
    tokens: usize,
) -> PyResult<GivenRouting> {
    let ids = Input::take(ids, "topk_ids")?.into_i32("topk_ids", "[tokens, k]", 2)?;
    let weights = Input::take(weights, "topk_weights")?.into_f32("topk_weights", "[tokens, k]", 2)?;
    if ids.shape != weights.shape || ids.shape[0] != tokens {
        return Err(PyValueError::new_err(format!(
            "topk_ids has shape {:?} and topk_weights {:?}; expected [{tokens}, k] of both",
            ids.shape, weights.shape
        )));
    }
    if ids.shape[1] == 0 {
        return Err(PyValueError::new_err("topk_ids has no columns; expected at least one expert per token"));
    }
    Ok(GivenRouting { ids, weights })
}

impl Shape {
    /// Reads the answer to a request of this shape.
    ///
    /// # Errors
    /// INTERNAL if the message does not have as many bytes of rows as the request.
    pub(crate) fn read_answer(&self, response: ForwardResponse) -> Result<Received, CallError> {
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
        Ok(Received { rows: Rows::Own(rows), receipt })
    }
}
