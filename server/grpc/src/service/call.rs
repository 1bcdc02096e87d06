//! The context of a call, from its headers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;
use metrics::Counter;
use tokio_util::sync::CancellationToken;

use crate::access::Pass;
use crate::bytes::budget::Charges;
use expertd_core::backend::{ClientKey, ConnectionKey, RequestId};
use expertd_core::failure::Failure;
use expertd_core::validate::Envelope;
use expertd_telemetry::{RequestTrace, TraceParent};

/// Longest time by which our DEADLINE_EXCEEDED precedes the caller's own timer.
const MAX_MARGIN: Duration = Duration::from_millis(10);

/// The context of a call, stored in the request's extensions.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) client: ClientKey,
    pub(crate) connection: ConnectionKey,
    /// Counts the tokens of a client that has a name.
    pub(crate) client_tokens: Option<Counter>,
    /// Time at which the service answers DEADLINE_EXCEEDED.
    pub(crate) deadline: Option<Instant>,
    pub(crate) charges: Arc<Charges>,
    /// The token of a stream, which may be removed while the stream lasts.
    pub(crate) pass: Option<Pass>,
    /// Cancelled when the service shuts down; streams then finish their requests in flight and end.
    pub(crate) closing: CancellationToken,
    /// The caller's trace, which requests of a stream continue.
    pub(crate) parent: Option<TraceParent>,
    /// The span of a unary call, if it is sampled.
    pub(crate) trace: Option<Arc<RequestTrace>>,
}

impl Call {
    /// Counts the tokens of an admitted request for its client.
    pub(crate) fn count_tokens(&self, tokens: u32) {
        if let Some(counter) = &self.client_tokens {
            counter.increment(u64::from(tokens));
        }
    }

    /// The context of the next request of this call.
    pub(crate) fn envelope(&self, deadline: Option<Instant>) -> Envelope {
        Envelope { id: RequestId::next(), client: self.client, connection: self.connection, deadline }
    }
}

/// Time at which the service answers DEADLINE_EXCEEDED, from the `grpc-timeout` header: a tenth of the time, at most 10 ms,
/// before the caller's own timer fires, so that the caller gets this status and not its transport's.
pub(crate) fn deadline(headers: &HeaderMap, arrived: Instant) -> Result<Option<Instant>, Failure> {
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
