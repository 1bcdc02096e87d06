//! Errors of sessions.

use std::io;
use std::time::Duration;

use expertd_shm::region::RegionError;
use expertd_shm::ring::RingError;

use crate::wire::CompletionRecord;

/// Code of gRPC.
const FAILED_PRECONDITION: u32 = 9;

impl SessionError {
    /// The error of a call that failed.
    #[must_use]
    pub fn of_call(record: &CompletionRecord) -> SessionError {
        let after = Duration::from_nanos(record.retry_after_ns);
        let (reason, fields) = record.reason();
        SessionError::Status {
            code: record.code,
            message: record.text(),
            retry_after: (!after.is_zero()).then_some(after),
            reason,
            fields,
        }
    }
}

/// Compares the fingerprint of the weights that a caller expects, if any, with that of the weights that computed an answer.
///
/// # Errors
/// FAILED_PRECONDITION with both.
pub fn check_weights(expected: &str, found: &str) -> Result<(), SessionError> {
    if expected.is_empty() || expected == found {
        return Ok(());
    }
    Err(other_weights(format!("weights with fingerprint {expected} are expected, {found} are loaded")))
}

/// The error of a call that may have been computed with other weights than it expects.
pub(crate) fn other_weights(message: String) -> SessionError {
    SessionError::Status {
        code: FAILED_PRECONDITION,
        message,
        retry_after: None,
        reason: "WEIGHT_VERSION_MISMATCH".to_owned(),
        fields: Vec::new(),
    }
}

/// Why a session cannot be opened or a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The address is not that of a Unix socket.
    #[error(
        "`{0}` is not the address of a session socket; use unix:PATH, as given to `expertd serve --session-listen`"
    )]
    Address(String),
    /// The socket cannot be used.
    #[error("session socket {address}: {source}")]
    Socket {
        /// The address.
        address: String,
        /// The error.
        source: io::Error,
    },
    /// The service refuses the session.
    #[error("the service refuses the session: {reason}")]
    Refused {
        /// The service's sentence.
        reason: String,
    },
    /// What the service sent is not a session of this protocol.
    #[error("the service sent {0}")]
    Protocol(String),
    /// The memory that the service sent cannot be used.
    #[error("the session's memory cannot be used: {0}")]
    Memory(#[from] RegionError),
    /// A ring of the memory cannot be used.
    #[error("the session's memory cannot be used: {0}")]
    Ring(#[from] RingError),
    /// The row area has no room.
    #[error(
        "the session's row area has no {bytes} consecutive free bytes (at most {largest}); drop buffers or open the \
         session with more"
    )]
    NoRoom {
        /// The bytes that were wanted.
        bytes: usize,
        /// The largest free range.
        largest: usize,
    },
    /// A part of a call has another size than the call needs.
    #[error("{what} has {found} bytes, but the call needs {needed}")]
    BufferSize {
        /// `rows`, `output` or another part of the call.
        what: &'static str,
        /// Its bytes.
        found: usize,
        /// Bytes that are needed.
        needed: usize,
    },
    /// A buffer belongs to another session, whose memory this one does not use.
    #[error("{what} is a buffer of another session; take buffers from the session that makes the call")]
    ForeignBuffer {
        /// `rows` or `output`.
        what: &'static str,
    },
    /// A fork uses the session of its parent.
    #[error(
        "the session was opened in process {opened} and is used in process {found}; open a session in each process"
    )]
    OtherProcess {
        /// The process that opened the session.
        opened: u32,
        /// The process that uses it.
        found: u32,
    },
    /// No call has this number: it was never started, or its end was taken or forgotten.
    #[error("the session has no call {call} to wait for; its end was taken before, or it was never started")]
    NoSuchCall {
        /// The number.
        call: u64,
    },
    /// As many calls as the session allows are in flight.
    #[error("{calls} calls of this session are in flight, and no more are allowed; wait for one of them")]
    TooManyCalls {
        /// The limit.
        calls: u64,
    },
    /// The call ended with a status.
    #[error("code {code}: {message}")]
    Status {
        /// Code of gRPC.
        code: u32,
        /// The service's sentence.
        message: String,
        /// When a retry can succeed, if the service said so.
        retry_after: Option<Duration>,
        /// The service's name for the cause, as in gRPC's ErrorInfo; empty if it gave none.
        reason: String,
        /// Names of invalid fields. `message` has a sentence for each, `NAME: SENTENCE`.
        fields: Vec<String>,
    },
    /// No completion came in time. The call keeps its buffers until it comes.
    #[error("no completion within {waited:?}")]
    TimedOut {
        /// The time limit.
        waited: Duration,
    },
    /// The machine has no CUDA driver.
    #[error("the CUDA driver (libcuda.so.1) was not found; CUDA sessions need NVIDIA's driver")]
    NoDriver,
    /// A call of the CUDA driver failed.
    #[error("{call} failed: {error}")]
    Driver {
        /// Name of the call.
        call: &'static str,
        /// The driver's error.
        error: String,
    },
    /// Memory of a GPU that cannot be used for a session.
    #[error("{0}")]
    Device(String),
    /// A session over the network cannot be opened.
    #[error("{0}")]
    Network(String),
    /// The service refuses calls that were to be prepared.
    #[error("the service refuses to prepare the calls: {reason}")]
    NotPrepared {
        /// The service's sentence.
        reason: String,
    },
    /// The session has ended.
    #[error("the session has ended: {reason}")]
    Ended {
        /// Why.
        reason: String,
    },
}
