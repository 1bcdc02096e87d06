//! Names of gRPC's status codes, for metrics and spans.

const NAMES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// The name of a code in gRPC's notation, such as `INVALID_ARGUMENT`.
#[must_use]
pub fn code_name(code: u32) -> &'static str {
    NAMES.get(code as usize).copied().unwrap_or("UNKNOWN")
}
