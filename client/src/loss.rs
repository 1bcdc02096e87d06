//! Statuses that the transport makes when a connection is lost.

use std::error::Error;
use std::io::{self, ErrorKind};

use tonic::{Code, Status};

/// Converts the status of a lost connection to UNAVAILABLE: one that broke during a call, or that closed before the
/// service took the call.
///
/// The transport reports these as UNKNOWN, CANCELLED or, for a call that meets the closing frame (GOAWAY) of its
/// connection, as INTERNAL, with its own error as the source; a status from the service has no source. The computation
/// is pure, so a retry is as safe as after any other UNAVAILABLE.
#[must_use]
pub fn connection_loss(status: Status) -> Status {
    if is_connection_loss(&status) && status.code() != Code::Unavailable {
        Status::unavailable(format!("the connection broke: {}", status.message()))
    } else {
        status
    }
}

/// What may be wrong with an address if its first call ends with this status, which the transport and not the service made.
#[must_use]
pub fn address_hint(status: &Status) -> &'static str {
    let Some(source) = status.source() else { return "" };
    if causes(source).any(says_that_nothing_answers) {
        return "";
    }
    "; the address accepts connections but did not answer as gRPC: is it the public address (`serve --listen`), and does it need \
     TLS (--tls-ca)?"
}

/// The status with [`address_hint`] behind its message.
#[must_use]
pub fn with_address_hint(status: Status) -> Status {
    match address_hint(&status) {
        "" => status,
        hint => Status::new(status.code(), format!("{}{hint}", status.message())),
    }
}

/// Whether the error says that no process listens at the address, or that none answers in time.
fn says_that_nothing_answers(error: &(dyn Error + 'static)) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    error.is::<tonic::TimeoutExpired>()
        || matches!(kind, Some(ErrorKind::ConnectionRefused | ErrorKind::NotFound | ErrorKind::TimedOut))
}

/// Whether the status says that the connection could not be made, or was lost before the answer.
pub(crate) fn is_connection_loss(status: &Status) -> bool {
    status.source().is_some_and(|source| match status.code() {
        Code::Unknown | Code::Unavailable => true,
        Code::Cancelled => !causes(source).any(|error| error.is::<tonic::TimeoutExpired>()),
        _ => causes(source).filter_map(|error| error.downcast_ref::<h2::Error>()).any(ends_connection),
    })
}

/// Whether the error ends a connection, and not one call only.
fn ends_connection(error: &h2::Error) -> bool {
    error.is_go_away() || error.is_io()
}

/// The error and its causes, the outermost first.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    let mut next = Some(error);
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}

#[cfg(test)]
mod tests;
