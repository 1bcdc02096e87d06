//! Entry points for fuzz targets; not part of the interface.

use std::time::Instant;

use expertd_core::backend::{ClientKey, ConnectionKey, RequestId};
use expertd_core::fuzzing::{check_request, model};
use expertd_core::listen::Address;
use expertd_core::validate::Envelope;
use expertd_proto::v1::ForwardRequest;
use http::{HeaderMap, HeaderValue};
use prost::Message as _;

use crate::access::tokens;
use crate::service::call::deadline;
use crate::service::forward::validate;
use crate::status::status_of;

/// Decodes and validates a `ForwardRequest`.
///
/// # Panics
/// If an accepted request breaks a promise of [`Request`](expertd_core::backend::Request).
pub fn request(data: &[u8]) {
    if let Ok(message) = ForwardRequest::decode(data) {
        check(message);
    }
}

fn check(message: ForwardRequest) {
    let model = model();
    let envelope =
        Envelope { id: RequestId(1), client: ClientKey(1), connection: ConnectionKey(1), deadline: None };
    let request = match validate(&model, message, envelope) {
        Ok(Some(request)) => request,
        Ok(None) => return,
        Err(failure) => {
            let status = status_of(failure);
            assert!(status.message().len() <= 4096, "a status message of {} bytes", status.message().len());
            return;
        }
    };
    assert_eq!(request.rows.len(), request.tokens * model.hidden * request.dtype.size());
    check_request(&model, &request);
}

/// Parses a text as a `grpc-timeout`, an address and a token file.
///
/// # Panics
/// If a deadline lies in the past, or an address changes when it is printed and parsed again.
pub fn texts(data: &[u8]) {
    if let Ok(value) = HeaderValue::from_bytes(data) {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", value);
        let now = Instant::now();
        if let Ok(Some(at)) = deadline(&headers, now) {
            assert!(at >= now, "a deadline before the call");
        }
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(address) = text.parse::<Address>() {
        let again = address.to_string().parse::<Address>();
        assert_eq!(again.ok(), Some(address), "{text:?} changes when it is printed");
    }
    let _ = tokens::parse(text);
}
