//! Failures of calls as exceptions of the package (`expertd/_errors.py`).

use expertd_client::{ClientError, address_hint};
use expertd_proto::retry_delay;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tonic::Status;
use tonic_types::StatusExt as _;

/// What may be wrong with an address that accepts connections but does not answer as gRPC.
const OTHER_LISTENER: &str = "the address accepts connections but did not answer as gRPC: a service with TLS needs \
    credentials=expertd.Credentials(ca=…), the address of `serve --session-listen` session=\"host\" or \"cuda\"; Admin and metrics have \
    addresses of their own";

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The service or the transport returned a status.
    Status(Box<Status>),
    /// There is no connection.
    Connect(String),
    /// Something that the call needs is missing.
    Unsupported(String),
}

impl From<Status> for CallError {
    fn from(status: Status) -> CallError {
        CallError::Status(Box::new(status))
    }
}

impl From<Box<Status>> for CallError {
    fn from(status: Box<Status>) -> CallError {
        CallError::Status(status)
    }
}

impl From<ClientError> for CallError {
    fn from(error: ClientError) -> CallError {
        match error {
            ClientError::Model(status) if !address_hint(&status).is_empty() => {
                CallError::Connect(format!("{}; {OTHER_LISTENER}", status.message()))
            }
            ClientError::Model(status) => status.into(),
            ClientError::Connect(error) => CallError::Connect(error.to_string()),
        }
    }
}

impl CallError {
    /// Makes the exception of the failure's cause. If importing or constructing it raises an exception, returns that one instead.
    pub(crate) fn into_exception(self, py: Python<'_>) -> PyErr {
        self.exception(py).unwrap_or_else(|error| error)
    }

    fn exception(self, py: Python<'_>) -> PyResult<PyErr> {
        let errors = py.import(intern!(py, "expertd._errors"))?;
        let exception = match self {
            CallError::Connect(message) => errors.call_method1(intern!(py, "connect_error"), (message,))?,
            CallError::Unsupported(message) => {
                errors.getattr(intern!(py, "UnsupportedError"))?.call1((message,))?
            }
            CallError::Status(status) => {
                let details = PyDict::new(py);
                details.set_item("retry_after", retry_delay(&status).map(|delay| delay.as_secs_f64()))?;
                details.set_item("reason", status.get_details_error_info().map(|info| info.reason))?;
                let fields: Vec<(String, String)> = status
                    .get_details_bad_request()
                    .map(|bad| bad.field_violations)
                    .unwrap_or_default()
                    .into_iter()
                    .map(|violation| (violation.field, violation.description))
                    .collect();
                details.set_item("fields", fields)?;
                let code = status.code() as i32;
                errors.call_method(intern!(py, "from_status"), (code, status.message()), Some(&details))?
            }
        };
        Ok(PyErr::from_value(exception))
    }
}
