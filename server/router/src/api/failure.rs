//! Reasons why a request has no answer, and their gRPC statuses.
//!
//! | failure | status | details |
//! |---|---|---|
//! | [`Failure::Invalid`] | INVALID_ARGUMENT | BadRequest |
//! | [`Failure::UnknownModel`], [`Failure::UnknownLayer`], [`Failure::LayerNotHeld`] | NOT_FOUND | ResourceInfo |
//! | [`Failure::WeightVersion`], [`Failure::WeightFingerprint`], [`StepError::OtherWeights`] | FAILED_PRECONDITION | PreconditionFailure |
//! | [`Failure::NoRoom`], [`SubmitError::Overloaded`] | RESOURCE_EXHAUSTED | RetryInfo |
//! | [`Failure::DeadlineExceeded`], a deadline in queue or step | DEADLINE_EXCEEDED | |
//! | [`Failure::Unauthenticated`] | UNAUTHENTICATED | |
//! | [`Failure::NotAllowed`] | PERMISSION_DENIED | |
//! | draining, no group, faults | UNAVAILABLE | RetryInfo |
//! | [`StepError::Poisoned`] | INTERNAL | |
//!
//! Each status carries an ErrorInfo with a machine-readable reason.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use expertd_proto::v1::RequestStatus;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::backend::{StepError, SubmitError};
use expertd_types::{LayerRange, WeightFingerprint};

/// Domain of the ErrorInfo.
pub const ERROR_DOMAIN: &str = "expertd";
/// RetryInfo for a service that will not be back soon.
const RETRY_AFTER_DRAIN: Duration = Duration::from_secs(1);
/// RetryInfo for a lack of room for the caller's bytes.
const RETRY_WITHOUT_ROOM: Duration = Duration::from_millis(200);

/// An invalid field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(in crate::api) field: &'static str,
    pub(in crate::api) text: String,
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{}", violations.iter().map(|v| format!("{}: {}", v.field, v.text)).collect::<Vec<_>>().join("; "))]
    Invalid { violations: Vec<Violation> },
    #[error("there is no model {given:?}; {known:?} is loaded")]
    UnknownModel { given: String, known: String },
    #[error("there is no layer {layer}; the checkpoint has layers 0 to {}", num_layers.saturating_sub(1))]
    UnknownLayer { layer: u32, num_layers: usize },
    #[error("layer {layer} is not served here: this service holds layers {held} of the model")]
    LayerNotHeld { layer: u32, held: LayerRange },
    #[error("weight version {expected} is expected, {loaded} is loaded")]
    WeightVersion { expected: u64, loaded: u64 },
    #[error("weights with fingerprint {expected} are expected, {loaded} are loaded")]
    WeightFingerprint { expected: WeightFingerprint, loaded: WeightFingerprint },
    #[error("the service has no room for more request bytes (max_bytes_in_flight)")]
    NoRoom,
    #[error("this client already has {limit} connections, which is the limit; close some of them")]
    TooManyConnections { limit: usize },
    #[error("{0}")]
    Unauthenticated(&'static str),
    #[error("{0}")]
    NotAllowed(&'static str),
    #[error("the deadline passed before the answer was complete")]
    DeadlineExceeded,
    #[error("the service is shutting down")]
    ShuttingDown,
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error(transparent)]
    Step(#[from] StepError),
}

impl Failure {
    /// An invalid field.
    pub(crate) fn field(field: &'static str, text: impl Into<String>) -> Failure {
        Failure::Invalid { violations: vec![Violation { field, text: text.into() }] }
    }

    fn code(&self) -> Code {
        match self {
            Failure::Invalid { .. } => Code::InvalidArgument,
            Failure::UnknownModel { .. } | Failure::UnknownLayer { .. } | Failure::LayerNotHeld { .. } => {
                Code::NotFound
            }
            Failure::WeightVersion { .. }
            | Failure::WeightFingerprint { .. }
            | Failure::Step(StepError::OtherWeights { .. }) => Code::FailedPrecondition,
            Failure::NoRoom
            | Failure::TooManyConnections { .. }
            | Failure::Submit(SubmitError::Overloaded { .. }) => Code::ResourceExhausted,
            Failure::Unauthenticated(_) => Code::Unauthenticated,
            Failure::NotAllowed(_) => Code::PermissionDenied,
            Failure::DeadlineExceeded
            | Failure::Submit(SubmitError::DeadlineExceeded)
            | Failure::Step(StepError::DeadlineExceeded) => Code::DeadlineExceeded,
            Failure::ShuttingDown
            | Failure::Submit(SubmitError::Draining | SubmitError::NotReady { .. })
            | Failure::Step(StepError::Unavailable { .. }) => Code::Unavailable,
            Failure::Step(StepError::Poisoned { .. }) => Code::Internal,
        }
    }

    /// The reason in the ErrorInfo.
    fn reason(&self) -> &'static str {
        match self {
            Failure::Invalid { .. } => "INVALID_REQUEST",
            Failure::UnknownModel { .. } => "UNKNOWN_MODEL",
            Failure::UnknownLayer { .. } => "UNKNOWN_LAYER",
            Failure::LayerNotHeld { .. } => "LAYER_NOT_HELD",
            Failure::WeightVersion { .. }
            | Failure::WeightFingerprint { .. }
            | Failure::Step(StepError::OtherWeights { .. }) => "WEIGHT_VERSION_MISMATCH",
            Failure::NoRoom => "BYTES_IN_FLIGHT",
            Failure::TooManyConnections { .. } => "TOO_MANY_CONNECTIONS",
            Failure::Unauthenticated(_) => "UNAUTHENTICATED",
            Failure::NotAllowed(_) => "PERMISSION_DENIED",
            Failure::Submit(SubmitError::Overloaded { .. }) => "OVERLOADED",
            Failure::DeadlineExceeded
            | Failure::Submit(SubmitError::DeadlineExceeded)
            | Failure::Step(StepError::DeadlineExceeded) => "DEADLINE_EXCEEDED",
            Failure::ShuttingDown | Failure::Submit(SubmitError::Draining) => "DRAINING",
            Failure::Submit(SubmitError::NotReady { .. }) => "NOT_READY",
            Failure::Step(StepError::Unavailable { .. }) => "STEP_FAILED",
            Failure::Step(StepError::Poisoned { .. }) => "POISONED",
        }
    }

    /// When a retry can succeed, if one can.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Failure::NoRoom | Failure::TooManyConnections { .. } => Some(RETRY_WITHOUT_ROOM),
            Failure::ShuttingDown | Failure::Submit(SubmitError::Draining) => Some(RETRY_AFTER_DRAIN),
            Failure::Submit(
                SubmitError::Overloaded { retry_after, .. } | SubmitError::NotReady { retry_after, .. },
            )
            | Failure::Step(StepError::Unavailable { retry_after, .. }) => Some(*retry_after),
            _ => None,
        }
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Status {
        let mut details = ErrorDetails::with_error_info(failure.reason(), ERROR_DOMAIN, HashMap::new());
        if let Some(after) = failure.retry_after() {
            details.set_retry_info(Some(after));
        }
        match &failure {
            Failure::Invalid { violations } => {
                for violation in violations {
                    details.add_bad_request_violation(violation.field, one_line(&violation.text));
                }
            }
            Failure::UnknownModel { given, known } => {
                details.set_resource_info("model", given.clone(), "", format!("{known:?} is loaded"));
            }
            Failure::UnknownLayer { layer, num_layers } => {
                details.set_resource_info("layer", layer.to_string(), "", format!("{num_layers} layers"));
            }
            Failure::LayerNotHeld { layer, held } => {
                details.set_resource_info("layer", layer.to_string(), "", format!("layers {held} are held"));
            }
            Failure::WeightVersion { loaded, .. } => {
                details.add_precondition_failure_violation(
                    "WEIGHT_VERSION",
                    "expected_weight_version",
                    format!("{loaded} is loaded"),
                );
            }
            _ => {}
        }
        let text = match &failure {
            // These reasons come from the cluster, whose texts are for operators.
            Failure::Submit(_) | Failure::Step(_) => public_text(&failure.to_string()),
            _ => failure.to_string(),
        };
        Status::with_error_details(failure.code(), one_line(&text), details)
    }
}

/// Longest message of a status, in bytes. It is sent in a header, whose size clients limit.
const MAX_MESSAGE_BYTES: usize = 512;

/// Removes control characters from a message and shortens it.
fn one_line(text: &str) -> String {
    let longest = text.len().min(MAX_MESSAGE_BYTES);
    let end = (0..=longest).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    let cut = end < text.len();
    let mut line: String =
        text[..end].chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
    if cut {
        line.push('…');
    }
    line
}

/// Removes paths and process ids, which are for operators only, from a reason.
pub(crate) fn public_text(text: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let inner = word.trim_start_matches(['`', '"', '\'', '(', '[']);
        let after_process = words.last().is_some_and(|last| last == "process" || last == "pid");
        if after_process && inner.starts_with(|char: char| char.is_ascii_digit()) {
            // "rank 1, process 77, ended" becomes "rank 1, process, ended".
            let rest = inner.trim_start_matches(|char: char| char.is_ascii_digit());
            words.last_mut().iter_mut().for_each(|last| last.push_str(rest));
        } else if inner.len() > 1 && inner.starts_with('/') {
            words.push("(a file of the service)".to_owned());
        } else {
            words.push(word.to_owned());
        }
    }
    words.join(" ")
}

/// The same status as a message on a stream.
pub(in crate::api) fn request_status(status: &Status) -> RequestStatus {
    RequestStatus {
        code: status.code() as i32 as u32,
        message: status.message().to_owned(),
        details: Bytes::copy_from_slice(status.details()),
        retry_after: expertd_proto::retry_delay(status).and_then(|delay| delay.try_into().ok()),
    }
}

/// The code in gRPC's notation, such as `INVALID_ARGUMENT`, for metrics.
#[must_use]
pub const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_read_no_paths_and_no_process_ids() {
        for (text, public) in [
            ("rank 1, process 4711, ended (signal: 9)", "rank 1, process, ended (signal: 9)"),
            (
                "re-forming; killed process 7 does not end; killed process 8 does not end",
                "re-forming; killed process does not end; killed process does not end",
            ),
            ("rank 0: /models/m/model.safetensors: short", "rank 0: (a file of the service) short"),
            ("cannot open `/etc/x` (/tmp/y)", "cannot open (a file of the service) (a file of the service)"),
            ("7 of 8 steps and/or more", "7 of 8 steps and/or more"),
        ] {
            assert_eq!(public_text(text), public);
        }
    }

    #[test]
    fn a_status_is_one_short_line() {
        let text = format!("a\nb{}", "é".repeat(5000));
        let status = Status::from(Failure::field("model", text));
        assert!(status.message().len() <= MAX_MESSAGE_BYTES + 4 && !status.message().contains('\n'));
        // The message and the violation, each once.
        assert!(status.details().len() < 3 * MAX_MESSAGE_BYTES);
    }
}
