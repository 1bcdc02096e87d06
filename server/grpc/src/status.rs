//! A failure as a gRPC status.

use std::collections::HashMap;

use bytes::Bytes;
use expertd_core::failure::{Failure, one_line};
use expertd_proto::v1::RequestStatus;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Domain of the ErrorInfo.
pub const ERROR_DOMAIN: &str = "expertd";

/// The status of a failure, with its details.
pub(crate) fn status_of(failure: Failure) -> Status {
    let mut details = ErrorDetails::with_error_info(failure.reason(), ERROR_DOMAIN, HashMap::new());
    if let Some(after) = failure.retry_after() {
        details.set_retry_info(Some(after));
    }
    for violation in failure.violations() {
        details.add_bad_request_violation(violation.field, one_line(&violation.text));
    }
    match &failure {
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
    Status::with_error_details(Code::from_i32(failure.code() as i32), failure.message(), details)
}

/// The same status as a message on a stream.
pub(crate) fn request_status(status: &Status) -> RequestStatus {
    RequestStatus {
        code: status.code() as i32 as u32,
        message: status.message().to_owned(),
        details: Bytes::copy_from_slice(status.details()),
        retry_after: expertd_proto::retry_delay(status).and_then(|delay| delay.try_into().ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_one_short_line() {
        let text = format!("a\nb{}", "é".repeat(5000));
        let status = status_of(Failure::field("model", text));
        assert!(status.message().len() <= 516 && !status.message().contains('\n'));
        // The message and the violation, each once.
        assert!(status.details().len() < 3 * 512);
    }
}
