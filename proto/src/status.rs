//! Statuses on the wire.

use std::time::Duration;

use prost::Message as _;
use tonic::{Code, Status};

use crate::duration::received_duration;
use crate::v1::RequestStatus;

impl From<RequestStatus> for Status {
    fn from(status: RequestStatus) -> Status {
        let code = i32::try_from(status.code).map_or(Code::Unknown, Code::from_i32);
        Status::with_details(code, status.message, status.details)
    }
}

/// The delay in the service's RetryInfo, if the status carries one.
#[must_use]
pub fn retry_delay(status: &Status) -> Option<Duration> {
    let details = tonic_types::Status::decode(status.details()).ok()?.details;
    let info = details.iter().find(|detail| detail.type_url.ends_with("/google.rpc.RetryInfo"))?;
    let info = tonic_types::pb::RetryInfo::decode(&*info.value).ok()?;
    received_duration(&info.retry_delay?)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tonic_types::{ErrorDetails, StatusExt as _};

    use super::*;

    #[test]
    fn a_stream_status_keeps_its_details() {
        let details = ErrorDetails::with_retry_info(Some(Duration::from_millis(7)));
        let original = Status::with_error_details(Code::ResourceExhausted, "busy", details);
        let sent = RequestStatus {
            code: 8,
            message: "busy".to_owned(),
            details: Bytes::copy_from_slice(original.details()),
            retry_after: None,
        };
        let status = Status::from(sent);
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(retry_delay(&status), Some(Duration::from_millis(7)));
    }
}
