//! How the calls of a doorbell ended.

use std::time::{Duration, Instant};

use super::CudaSession;
use crate::client::{Receipt, SessionError};
use crate::cuda::control::Counts;
use crate::cuda::wire::StatusRecord;
use crate::wire::CompletionRecord;

/// How the calls of a doorbell ended.
#[derive(Clone, Debug)]
pub struct DoorbellStatus {
    /// Number of calls that ended.
    pub calls: u64,
    /// Number of calls that failed.
    pub failures: u64,
    /// How the last call was computed, if it was answered.
    pub last: Option<Receipt>,
    /// The error of the last call that failed.
    pub last_failure: Option<CallFailure>,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFailure {
    /// Number of the call, from 1, among the doorbell's calls.
    pub call: u64,
    /// Code of gRPC.
    pub code: u32,
    /// The service's sentence.
    pub message: String,
    /// When a retry can succeed, if the service said so.
    pub retry_after: Option<Duration>,
    /// The service's name for the cause; empty if it gave none.
    pub reason: String,
    /// Names of invalid fields.
    pub fields: Vec<String>,
}

impl CallFailure {
    pub(super) fn of(record: &CompletionRecord) -> Self {
        let after = Duration::from_nanos(record.retry_after_ns);
        let (reason, fields) = record.reason();
        CallFailure {
            call: record.call,
            code: record.code,
            message: record.text(),
            retry_after: (!after.is_zero()).then_some(after),
            reason,
            fields,
        }
    }
}

impl From<CallFailure> for SessionError {
    fn from(failure: CallFailure) -> Self {
        let CallFailure { code, message, retry_after, reason, fields, .. } = failure;
        SessionError::Status { code, message, retry_after, reason, fields }
    }
}

impl CudaSession {
    /// How the calls of a doorbell ended. A call that is in flight counts once its words are raised. The service writes the status
    /// of an answered call a few microseconds after a rank has raised its words; this waits for it.
    ///
    /// # Errors
    /// If the session has ended; calls that were in flight have no output then.
    pub fn status(&self, doorbell: u32) -> Result<DoorbellStatus, SessionError> {
        let record = self.record(doorbell)?;
        Ok(DoorbellStatus {
            calls: record.calls,
            failures: record.failures,
            last: (record.calls > 0 && record.last.code == 0).then(|| Receipt::from(&record.last)),
            last_failure: (record.failures > 0).then(|| CallFailure::of(&record.last_failure)),
        })
    }

    fn record(&self, doorbell: u32) -> Result<StatusRecord, SessionError> {
        self.shared.check()?;
        if doorbell >= self.opened.doorbells {
            return Err(SessionError::Device(format!("there is no doorbell {doorbell}")));
        }
        let control = &self.shared.control;
        let (ended, began) = (control.number(doorbell), Instant::now());
        loop {
            let record = control.status(doorbell);
            let record = record
                .ok_or_else(|| SessionError::Protocol("a status that changes without end".to_owned()))?;
            if record.calls >= ended {
                return Ok(record);
            }
            self.shared.check()?;
            let waited = began.elapsed();
            if waited > self.timeout {
                return Err(SessionError::TimedOut { waited });
            }
            std::hint::spin_loop();
        }
    }

    /// The [`status`](Self::status) in short, which copies no records in the usual case.
    pub(in crate::cuda) fn counts(&self, doorbell: u32) -> Result<Counts, SessionError> {
        self.shared.check()?;
        let control = &self.shared.control;
        let ended = control.number(doorbell);
        if let Some(counts) = control.counts(doorbell)
            && counts.calls >= ended
        {
            return Ok(counts);
        }
        let StatusRecord { calls, failures, moves, last, .. } = self.record(doorbell)?;
        Ok(Counts { calls, failures, weight_version: last.weight_version, moves })
    }

    /// Number of calls of a doorbell that failed, for a check after the GPU's work: once an event that was recorded after a call
    /// has passed, this counts the call if it failed. It is one load; `status` has the reason.
    ///
    /// # Errors
    /// If the session has ended, or there is no such doorbell. A stream is released only after this error is certain.
    pub fn failures(&self, doorbell: u32) -> Result<u64, SessionError> {
        self.shared.check()?;
        self.shared.failures(doorbell)
    }

    /// As [`failures`](Self::failures), also once the session has ended: the service fails calls before it ends a session.
    pub(in crate::cuda) fn failed(&self, doorbell: u32) -> u64 {
        self.shared.failures(doorbell).unwrap_or(0)
    }

    /// Number of calls of a doorbell that were released because the session had ended. Each of them is counted before its stream goes on.
    #[must_use]
    pub fn released(&self, doorbell: u32) -> u64 {
        self.shared.released(doorbell)
    }
}
