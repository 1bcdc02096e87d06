//! Reasons why a request has no answer, and their statuses, which are gRPC's whichever way the request came.
//!
//! | failure | status | details |
//! |---|---|---|
//! | [`Failure::Invalid`] | INVALID_ARGUMENT | BadRequest |
//! | [`Failure::UnknownModel`], [`Failure::UnknownLayer`], [`Failure::LayerNotHeld`] | NOT_FOUND | ResourceInfo |
//! | [`Failure::WeightVersion`], [`Failure::WeightFingerprint`], [`Failure::OtherWeights`] | FAILED_PRECONDITION | PreconditionFailure |
//! | [`Failure::NoRoom`], [`Failure::TooManyConnections`], [`Failure::Overloaded`] | RESOURCE_EXHAUSTED | RetryInfo |
//! | [`Failure::DeadlineExceeded`] | DEADLINE_EXCEEDED | |
//! | [`Failure::Unauthenticated`] | UNAUTHENTICATED | |
//! | [`Failure::NotAllowed`] | PERMISSION_DENIED | |
//! | [`Failure::Draining`], [`Failure::NotReady`], [`Failure::Unavailable`] | UNAVAILABLE | RetryInfo |
//! | [`Failure::Poisoned`] | INTERNAL | |
//!
//! Each status carries an ErrorInfo with a machine-readable reason.

use std::time::Duration;

use expertd_scheduler as scheduler;
use expertd_types::{LayerRange, WeightFingerprint, WeightVersion};

/// RetryInfo for a service that will not be back soon.
const RETRY_AFTER_DRAIN: Duration = Duration::from_secs(1);
/// RetryInfo for a lack of room for the caller's bytes.
const RETRY_WITHOUT_ROOM: Duration = Duration::from_millis(200);

/// An invalid field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Its name.
    pub field: &'static str,
    /// What was found and what is expected; may hold what the caller sent.
    pub text: String,
}

impl Violation {
    /// A field and what is wrong with it.
    pub fn new(field: &'static str, text: impl Into<String>) -> Violation {
        Violation { field, text: text.into() }
    }
}

/// A status code of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are gRPC's")]
pub enum Code {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Failure {
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
    #[error("{reason}; retry after {} ms", retry_after.as_millis())]
    Overloaded { reason: String, retry_after: Duration },
    #[error("the service is draining and admits no new requests")]
    Draining,
    /// No EP group can run steps: it is loading, re-forming or failed.
    #[error("{reason}")]
    NotReady { reason: String, retry_after: Duration },
    /// A fault of the request's step or generation, or a drain that ran out of time. Retrying is safe.
    #[error("{reason}")]
    Unavailable { reason: String, retry_after: Duration },
    #[error("the call expects weight version {expected}, and version {loaded} was loaded while it waited")]
    OtherWeights { expected: WeightVersion, loaded: WeightVersion },
    /// Retrying is harmful.
    #[error(
        "{lost_steps} steps with this request ended the EP group, and no other request was in the last one; it will not be retried"
    )]
    Poisoned { lost_steps: u32 },
}

impl Failure {
    /// An invalid field.
    pub fn field(field: &'static str, text: impl Into<String>) -> Failure {
        Failure::Invalid { violations: vec![Violation::new(field, text)] }
    }

    /// The status.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.code_and_reason().0
    }

    /// The reason in the ErrorInfo.
    pub const fn reason(&self) -> &'static str {
        self.code_and_reason().1
    }

    const fn code_and_reason(&self) -> (Code, &'static str) {
        match self {
            Failure::Invalid { .. } => (Code::InvalidArgument, "INVALID_REQUEST"),
            Failure::UnknownModel { .. } => (Code::NotFound, "UNKNOWN_MODEL"),
            Failure::UnknownLayer { .. } => (Code::NotFound, "UNKNOWN_LAYER"),
            Failure::LayerNotHeld { .. } => (Code::NotFound, "LAYER_NOT_HELD"),
            Failure::WeightVersion { .. }
            | Failure::WeightFingerprint { .. }
            | Failure::OtherWeights { .. } => (Code::FailedPrecondition, "WEIGHT_VERSION_MISMATCH"),
            Failure::NoRoom => (Code::ResourceExhausted, "BYTES_IN_FLIGHT"),
            Failure::TooManyConnections { .. } => (Code::ResourceExhausted, "TOO_MANY_CONNECTIONS"),
            Failure::Overloaded { .. } => (Code::ResourceExhausted, "OVERLOADED"),
            Failure::Unauthenticated(_) => (Code::Unauthenticated, "UNAUTHENTICATED"),
            Failure::NotAllowed(_) => (Code::PermissionDenied, "PERMISSION_DENIED"),
            Failure::DeadlineExceeded => (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
            Failure::Draining => (Code::Unavailable, "DRAINING"),
            Failure::NotReady { .. } => (Code::Unavailable, "NOT_READY"),
            Failure::Unavailable { .. } => (Code::Unavailable, "STEP_FAILED"),
            Failure::Poisoned { .. } => (Code::Internal, "POISONED"),
        }
    }

    /// The invalid fields.
    pub fn violations(&self) -> &[Violation] {
        match self {
            Failure::Invalid { violations } => violations,
            _ => &[],
        }
    }

    /// The message for the caller: one short line without paths and process ids.
    pub fn message(&self) -> String {
        one_line(&match self {
            // These reasons come from the cluster, whose texts are for operators.
            Failure::NotReady { reason, .. } | Failure::Unavailable { reason, .. } => public_text(reason),
            _ => self.to_string(),
        })
    }

    /// When a retry can succeed, if one can.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Failure::NoRoom | Failure::TooManyConnections { .. } => Some(RETRY_WITHOUT_ROOM),
            Failure::Draining => Some(RETRY_AFTER_DRAIN),
            Failure::Overloaded { retry_after, .. }
            | Failure::NotReady { retry_after, .. }
            | Failure::Unavailable { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }
}

impl From<scheduler::Refusal> for Failure {
    fn from(refusal: scheduler::Refusal) -> Self {
        match refusal {
            scheduler::Refusal::Overloaded { queued_tokens, max_queued_tokens, retry_after } => {
                let reason = format!(
                    "{queued_tokens} tokens wait for a step already, and this request would exceed max-queued-tokens = \
                     {max_queued_tokens}"
                );
                Failure::Overloaded { reason, retry_after }
            }
            scheduler::Refusal::Draining => Failure::Draining,
            scheduler::Refusal::NotReady { reason, retry_after } => {
                Failure::NotReady { reason: reason.as_ref().to_owned(), retry_after }
            }
            scheduler::Refusal::DeadlineExceeded => Failure::DeadlineExceeded,
        }
    }
}

/// Longest message of a status, in bytes. It is sent in a header, whose size clients limit.
const MAX_MESSAGE_BYTES: usize = 512;

/// Removes control characters from a message and shortens it.
#[must_use]
pub fn one_line(text: &str) -> String {
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
#[must_use]
pub fn public_text(text: &str) -> String {
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
}
