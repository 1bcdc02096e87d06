//! Sessions: clients on the same host that share memory with the service. `docs/sessions.md` has the protocol.
//!
//! [`SessionClient`] takes the messages of gRPC and copies their rows. Callers that avoid these copies use
//! [`Session`] itself, and write rows where the service reads them.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
pub use expertd_session::*;
use prost::Message as _;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{self, ForwardRequest, ForwardResponse, GetModelResponse, SharedExperts};

/// Domain of the ErrorInfo, as of the service.
const ERROR_DOMAIN: &str = "expertd";

/// A session that takes the messages of gRPC. Threads may share it.
#[derive(Debug)]
pub struct SessionClient {
    session: Session,
    model: GetModelResponse,
}

impl SessionClient {
    /// Opens a session on `address`, `unix:PATH`.
    ///
    /// # Errors
    /// As [`Session::open`], and if the service sent bytes that are no model.
    pub fn open(address: &str, options: &SessionOptions) -> Result<Self, SessionError> {
        Self::over(Session::open(address, options)?)
    }

    /// The client of an open session.
    ///
    /// # Errors
    /// If the service sent bytes that are no model.
    pub fn over(session: Session) -> Result<Self, SessionError> {
        let model = GetModelResponse::decode(session.model())
            .map_err(|error| SessionError::Protocol(format!("a model that cannot be decoded: {error}")))?;
        Ok(SessionClient { session, model })
    }

    /// The model that the service served when the session was opened.
    #[must_use]
    pub const fn model(&self) -> &GetModelResponse {
        &self.model
    }

    /// The session, for calls without copies.
    #[must_use]
    pub const fn session(&self) -> &Session {
        &self.session
    }

    /// Makes the call of a gRPC request: its rows are copied into the session's memory, and the answer out of it. Blocks
    /// for `timeout` at most, which is the call's deadline as well. The receipt names the first and the last step only; its
    /// timings are one entry, the sum over the steps, without the number of tokens.
    ///
    /// The protocol of sessions names no fingerprint of weights; an expected one is compared with the receipt, so that the
    /// answer of other weights becomes an error.
    ///
    /// # Errors
    /// As [`Session::submit`] and [`PendingCall::wait`]; if rows, routing or token ids have other lengths than the request's number of
    /// tokens needs; NOT_FOUND if the request names another model; and FAILED_PRECONDITION if other weights computed the answer than
    /// the request expects.
    pub fn forward(
        &self,
        request: &ForwardRequest,
        timeout: Duration,
    ) -> Result<ForwardResponse, SessionError> {
        let mut started = self.start(request, Some(timeout))?;
        started.try_wait(timeout)?.ok_or(SessionError::TimedOut { waited: timeout })
    }

    /// Starts the call of a gRPC request, whose deadline is `timeout`, as [`forward`](Self::forward) does.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward) that the request alone causes.
    pub fn start(
        &self,
        request: &ForwardRequest,
        timeout: Option<Duration>,
    ) -> Result<StartedCall, SessionError> {
        self.check_model(&request.model)?;
        let inline = match &request.payload {
            Some(Payload::Inline(inline)) => inline.clone(),
            None => Bytes::new(),
        };
        let Some(dtype) = u32::try_from(request.dtype).ok().and_then(DType::from_code) else {
            let code = request.dtype;
            return Err(SessionError::Protocol(format!(
                "element type {code}, which this client does not know"
            )));
        };
        let tokens = request.tokens as usize;
        let row_bytes = self.session.hidden().saturating_mul(dtype.size());
        let of_each = |what, bytes: &Bytes, each: usize| {
            let (found, needed) = (bytes.len(), tokens.saturating_mul(each));
            if found == needed { Ok(()) } else { Err(SessionError::BufferSize { what, found, needed }) }
        };
        of_each("rows", &inline, row_bytes)?;
        if let Some(routing) = &request.routing {
            let each = (routing.k as usize).saturating_mul(4);
            of_each("routing.topk_ids", &routing.topk_ids, each)?;
            of_each("routing.topk_weights", &routing.topk_weights, each)?;
        }
        if !request.token_ids.is_empty() {
            of_each("token_ids", &request.token_ids, 4)?;
        }
        let mut rows = self.session.buffer(inline.len())?;
        rows.as_mut_slice().copy_from_slice(&inline);
        let output = self.session.buffer(inline.len())?;
        let given = request.routing.as_ref().map(|routing| {
            let weights: Vec<f32> = words(&routing.topk_weights).map(f32::from_le_bytes).collect();
            (routing.k as usize, integers(&routing.topk_ids), weights)
        });
        let token_ids = (!request.token_ids.is_empty()).then(|| integers(&request.token_ids));
        let call = Call {
            layer: request.layer,
            tokens,
            dtype,
            routing: given.as_ref().map(|(k, ids, weights)| GivenRouting { k: *k, ids, weights }),
            token_ids: token_ids.as_deref(),
            shared_experts: request.shared_experts() != SharedExperts::Exclude,
            expected_weight_version: request.expected_weight_version,
            return_routing: request.return_routing.then(|| self.top_k(request.layer)),
            timeout,
        };
        Ok(StartedCall {
            pending: self.session.submit(&call, rows, output)?,
            weights: request.expected_weight_fingerprint.clone(),
            return_timings: request.return_timings,
        })
    }

    fn check_model(&self, name: &str) -> Result<(), SessionError> {
        let served = &self.model.name;
        if name.is_empty() || name == served {
            return Ok(());
        }
        Err(SessionError::Status {
            code: Code::NotFound as u32,
            message: format!("there is no model {name:?}; {served:?} is loaded"),
            retry_after: None,
            reason: "UNKNOWN_MODEL".to_owned(),
            fields: Vec::new(),
        })
    }

    /// Experts per token of a layer's gate; 1 for a layer that the service does not have, which it refuses.
    fn top_k(&self, layer: u32) -> usize {
        let found = self.model.moe_layers.iter().find(|moe| moe.layer == layer);
        found.map_or(1, |moe| moe.top_k as usize)
    }
}

/// A call of a gRPC request in flight. Dropping it forgets the answer.
#[derive(Debug)]
pub struct StartedCall {
    pending: PendingCall,
    /// The fingerprint that the request expects, or nothing.
    weights: String,
    return_timings: bool,
}

impl StartedCall {
    /// Waits for the answer; `None` if there is none within `timeout`. The call stays in flight then.
    ///
    /// # Errors
    /// As [`PendingCall::try_wait`], and FAILED_PRECONDITION if other weights computed the answer than the request expects.
    pub fn try_wait(&mut self, timeout: Duration) -> Result<Option<ForwardResponse>, SessionError> {
        let Some(answer) = self.pending.try_wait(timeout)? else { return Ok(None) };
        check_weights(&self.weights, &answer.receipt.weight_fingerprint)?;
        let rows = Bytes::copy_from_slice(answer.output.as_slice());
        let (topk_ids, topk_weights) = answer.routing.unwrap_or_default();
        let mut receipt = receipt(&answer.receipt, self.return_timings);
        (receipt.topk_ids, receipt.topk_weights) = (topk_ids.into(), topk_weights.into());
        Ok(Some(ForwardResponse { rows, receipt: Some(receipt) }))
    }
}

fn words(bytes: &Bytes) -> impl Iterator<Item = [u8; 4]> + '_ {
    bytes.as_chunks::<4>().0.iter().copied()
}

fn integers(bytes: &Bytes) -> Vec<i32> {
    words(bytes).map(i32::from_le_bytes).collect()
}

/// A receipt as gRPC has it: of several steps the first and the last one, and their timings as one entry, the sum over the
/// steps, without the number of tokens.
#[must_use]
pub fn receipt(receipt: &Receipt, timings: bool) -> v1::Receipt {
    let (first, last) = receipt.steps;
    let [copy_in, gate, prepare, dispatch, experts, combine, copy_out] =
        receipt.phases.map(|phase| u64::try_from(phase.as_nanos()).unwrap_or(u64::MAX));
    let timing = v1::StepTiming {
        step: last,
        tokens: 0,
        copy_in_ns: copy_in,
        gate_ns: gate,
        prepare_ns: prepare,
        dispatch_ns: dispatch,
        experts_ns: experts,
        combine_ns: combine,
        copy_out_ns: copy_out,
    };
    v1::Receipt {
        steps: if first == last { vec![first] } else { vec![first, last] },
        generation: receipt.generation,
        weight_version: receipt.weight_version,
        weight_fingerprint: receipt.weight_fingerprint.clone(),
        tokens_per_rank: receipt.tokens_per_rank.clone(),
        timings: if timings { vec![timing] } else { Vec::new() },
        queue_time: receipt.queue_time.try_into().ok(),
        step_time: receipt.step_time.try_into().ok(),
        ..v1::Receipt::default()
    }
}

/// The gRPC status of a session's error.
#[must_use]
pub fn status(error: SessionError) -> Status {
    let text = error.to_string();
    match error {
        SessionError::Status { code, message, retry_after, reason, fields } => {
            let mut details = ErrorDetails::new();
            details.set_retry_info(retry_after);
            if !reason.is_empty() {
                details.set_error_info(reason, ERROR_DOMAIN, HashMap::new());
            }
            for (field, problem) in violations(&message, &fields) {
                details.add_bad_request_violation(field, problem);
            }
            Status::with_error_details(Code::from_i32(code.cast_signed()), message, details)
        }
        SessionError::TimedOut { .. } => Status::deadline_exceeded(text),
        SessionError::TooManyCalls { .. } | SessionError::NoRoom { .. } => Status::resource_exhausted(text),
        SessionError::Ended { .. } | SessionError::Socket { .. } | SessionError::Refused { .. } => {
            Status::unavailable(text)
        }
        SessionError::BufferSize { .. }
        | SessionError::ForeignBuffer { .. }
        | SessionError::NoSuchCall { .. }
        | SessionError::Address(_)
        | SessionError::NotPrepared { .. } => Status::invalid_argument(text),
        SessionError::OtherProcess { .. }
        | SessionError::NoDriver
        | SessionError::Driver { .. }
        | SessionError::Device(_)
        | SessionError::Network(_) => Status::failed_precondition(text),
        SessionError::Protocol(_) | SessionError::Memory(_) | SessionError::Ring(_) => Status::internal(text),
    }
}

/// The problem of each invalid field. The message has them as `FIELD: PROBLEM`, one behind the other with `; ` between.
fn violations<'a>(message: &'a str, fields: &'a [String]) -> impl Iterator<Item = (&'a str, &'a str)> {
    fields.iter().enumerate().map(move |(index, field)| {
        let begin = format!("{field}: ");
        let rest = message.find(&begin).map_or(message, |at| &message[at + begin.len()..]);
        let next = fields.get(index + 1).and_then(|next| rest.find(&format!("; {next}: ")));
        (field.as_str(), next.map_or(rest, |end| &rest[..end]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_reason_and_the_fields_of_a_call() {
        let error = SessionError::Status {
            code: Code::InvalidArgument as u32,
            message: "tokens: must be 1; not 0; k: must be 4".to_owned(),
            retry_after: Some(Duration::from_millis(7)),
            reason: "INVALID_REQUEST".to_owned(),
            fields: vec!["tokens".to_owned(), "k".to_owned()],
        };
        let status = status(error);
        assert_eq!(status.get_details_error_info().unwrap().reason, "INVALID_REQUEST");
        let fields = status.get_details_bad_request().unwrap().field_violations;
        let fields: Vec<_> =
            fields.iter().map(|one| (one.field.as_str(), one.description.as_str())).collect();
        assert_eq!(fields, [("tokens", "must be 1; not 0"), ("k", "must be 4")]);
        assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(Duration::from_millis(7)));
    }

    #[test]
    fn an_answer_of_other_weights_is_an_error() {
        assert!(check_weights("", "sampled:01").is_ok());
        assert!(check_weights("sampled:01", "sampled:01").is_ok());
        let error = status(check_weights("sampled:01", "sampled:02").unwrap_err());
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(
            error.message().contains("sampled:01 are expected, sampled:02 are loaded"),
            "{}",
            error.message()
        );
    }
}
