//! One attempt of a call on one service, and what its end says about the service.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::shared::{Link, TicketGuard};
use super::{Ended, receipt_has_content};
use crate::connection_loss;
use crate::loss::is_connection_loss;
use expertd_proto::retry_delay;
use expertd_proto::v1::{ForwardRequest, ForwardResponse};

/// The end of one attempt.
pub(super) enum Attempt {
    /// The call has this result; no other service would answer differently.
    Done(Result<Box<ForwardResponse>, Status>),
    /// Another service, or the same one later, may answer.
    Elsewhere(Status),
}

/// Sends the request over `link` and ends the ticket. `left` bounds the attempt.
pub(super) async fn attempt(
    mut guard: TicketGuard<'_>,
    link: Link,
    request: ForwardRequest,
    left: Option<Duration>,
) -> Attempt {
    let mut lost = link.lost.clone();
    let answer = tokio::select! {
        answer = link.send(request, left) => answer,
        _ = lost.wait_for(|lost| *lost) => {
            guard.end(Ended::Lost);
            return Attempt::Elsewhere(Status::unavailable(format!("{} stopped answering", link.address)));
        }
    };
    let (how, end) = match answer {
        Ok(response) => {
            let content = guard.ticket().map(|ticket| &ticket.content);
            let same = match (&response.receipt, content) {
                (Some(receipt), Some(content)) => receipt_has_content(receipt, content),
                _ => false,
            };
            if same {
                (Ended::Final, Attempt::Done(Ok(Box::new(response))))
            } else {
                let text = format!("{} has other weights than it said", link.address);
                (Ended::Changed, Attempt::Elsewhere(Status::unavailable(text)))
            }
        }
        Err(status) if is_connection_loss(&status) => {
            (Ended::Lost, Attempt::Elsewhere(connection_loss(status)))
        }
        Err(status) => match ended_by(&status) {
            Ended::Final => (Ended::Final, Attempt::Done(Err(status))),
            how => (how, Attempt::Elsewhere(status)),
        },
    };
    guard.end(how);
    end
}

/// How a status that is not a lost connection ends the attempt.
fn ended_by(status: &Status) -> Ended {
    let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
    match (status.code(), reason.as_str()) {
        (Code::Unavailable, "DRAINING") => Ended::NotServing,
        (Code::Unavailable | Code::ResourceExhausted, _) => Ended::Refused { after: retry_delay(status) },
        (Code::NotFound, "LAYER_NOT_HELD") => Ended::Changed,
        _ => Ended::Final,
    }
}
