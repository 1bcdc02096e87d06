//! The context of a call, from its headers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http::HeaderMap;
use metrics::Counter;
use tokio_util::sync::CancellationToken;

use super::validate::Envelope;
use crate::api::access::Pass;
use crate::api::bytes::charges::Charges;
use crate::api::failure::Failure;
use crate::backend::{ClientKey, RequestId};
use crate::telemetry::{RequestTrace, TraceParent};

/// Longest time by which our DEADLINE_EXCEEDED precedes the caller's own timer.
const MAX_MARGIN: Duration = Duration::from_millis(10);

/// The context of a call, stored in the request's extensions.
#[derive(Clone)]
pub(in crate::api) struct Call {
    pub(in crate::api) client: ClientKey,
    /// Counts the tokens of a client that has a name.
    pub(in crate::api) client_tokens: Option<Counter>,
    /// Time at which the service answers DEADLINE_EXCEEDED.
    pub(in crate::api) deadline: Option<Instant>,
    pub(in crate::api) charges: Arc<Charges>,
    /// The token of a stream, which may be removed while the stream lasts.
    pub(in crate::api) pass: Option<Pass>,
    /// Cancelled when the service shuts down; streams then finish their requests in flight and end.
    pub(in crate::api) closing: CancellationToken,
    /// The caller's trace, which requests of a stream continue.
    pub(in crate::api) parent: Option<TraceParent>,
    /// The span of a unary call, if it is sampled.
    pub(in crate::api) trace: Option<Arc<RequestTrace>>,
}

impl Call {
    /// Counts the tokens of an admitted request for its client.
    pub(in crate::api) fn count_tokens(&self, tokens: u32) {
        if let Some(counter) = &self.client_tokens {
            counter.increment(u64::from(tokens));
        }
    }

    /// The context of the next request of this call.
    pub(in crate::api) fn envelope(&self, deadline: Option<Instant>) -> Envelope {
        Envelope { id: next_request_id(), client: self.client, deadline }
    }
}

/// The next number of a request.
pub(crate) fn next_request_id() -> RequestId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    RequestId(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Time at which the service answers DEADLINE_EXCEEDED, from the `grpc-timeout` header: a tenth of the time, at most 10 ms,
/// before the caller's own timer fires, so that the caller gets this status and not its transport's.
pub(in crate::api) fn deadline(headers: &HeaderMap, arrived: Instant) -> Result<Option<Instant>, Failure> {
    let Some(value) = headers.get("grpc-timeout") else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(parse_timeout).ok_or_else(|| {
        Failure::field(
            "grpc-timeout",
            format!("expected up to 8 digits and one of H, M, S, m, u, n; found {value:?}"),
        )
    })?;
    Ok(arrived.checked_add(timeout - (timeout / 10).min(MAX_MARGIN)))
}

/// The value of a `grpc-timeout` header, as gRPC's HTTP/2 mapping defines it.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn timeouts_parse_as_grpc_defines_them() {
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(parse_timeout("1n"), Some(Duration::from_nanos(1)));
        for bad in ["", "m", "5", "5x", "-5m", "+5m", "123456789m", "1 m", "5µ"] {
            assert_eq!(parse_timeout(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn our_answer_comes_before_the_callers_timer() {
        let now = Instant::now();
        let at = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            deadline(&headers, now)
        };
        assert_eq!(at("50m"), Ok(Some(now + Duration::from_millis(45))));
        assert_eq!(at("10S"), Ok(Some(now + Duration::from_millis(9990))));
        assert!(at("soon").is_err());
        assert_eq!(deadline(&HeaderMap::new(), now), Ok(None));
    }
}
