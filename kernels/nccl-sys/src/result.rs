//! Errors and versions.

use std::fmt;
use std::time::Duration;

use crate::sys::Code;

/// Version of an NCCL library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch level.
    pub patch: u32,
}

impl Version {
    /// The oldest version with symmetric windows.
    pub const OLDEST: Version = Version { major: 2, minor: 28, patch: 0 };

    /// Decodes `NCCL_VERSION_CODE`: `major * 10000 + minor * 100 + patch`; up to 2.8 the major version counts thousands.
    #[must_use]
    pub const fn from_code(code: u32) -> Version {
        let unit = if code < 10_000 { 1000 } else { 10_000 };
        Version { major: code / unit, minor: code % unit / 100, patch: code % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Errors of NCCL and of its windows.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library could not be opened.
    #[error(
        "cannot open NCCL from {tried}: {why}; install libnccl2 {} or newer, or set EXPERTD_NCCL to a libnccl.so.2",
        Version::OLDEST
    )]
    Open {
        /// The path or name, and its source.
        tried: String,
        /// The loader's message.
        why: String,
    },
    /// A function is missing in the library.
    #[error(
        "{tried} has no symbol {symbol}: NCCL {} or newer is needed; set EXPERTD_NCCL to such a libnccl.so.2",
        Version::OLDEST
    )]
    Symbol {
        /// The path or name, and its source.
        tried: String,
        /// The missing function.
        symbol: &'static str,
    },
    /// The library is too old.
    #[error(
        "{tried} is NCCL {found}; {} or newer is needed; set EXPERTD_NCCL to such a libnccl.so.2",
        Version::OLDEST
    )]
    TooOld {
        /// The path or name, and its source.
        tried: String,
        /// Version of the library.
        found: Version,
    },
    /// A call failed.
    #[error("{call} failed with NCCL code {code} ({text}){}", detail(.last))]
    Call {
        /// The C function.
        call: &'static str,
        /// The call's `ncclResult_t`.
        code: Code,
        /// Result of `ncclGetErrorString`.
        text: String,
        /// Result of `ncclGetLastError`, possibly empty.
        last: String,
    },
    /// Peers did not take part in time.
    #[error("{call} did not finish within {} s: a peer is missing or stuck", .waited.as_secs_f32())]
    Deadline {
        /// The C function.
        call: &'static str,
        /// Duration of the wait.
        waited: Duration,
    },
    /// Registration reported success but returned no window.
    #[error(
        "ncclCommWindowRegister reported success but returned no window within {} s: a peer is missing, or symmetric \
         memory is not supported between these devices (peer access over NVLink and CUDA VMM are needed, and \
         NCCL_CUMEM_ENABLE must not be 0)",
        .waited.as_secs_f32()
    )]
    NullWindow {
        /// Duration of the wait.
        waited: Duration,
    },
    /// The window's addresses are invalid.
    #[error("the window's addresses are invalid: {0}")]
    BadWindow(String),
    /// An argument that NCCL would reject with an obscure error, or hang on.
    #[error("{0}")]
    Argument(String),
}

fn detail(last: &str) -> String {
    if last.is_empty() { String::new() } else { format!(": {last}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_codes_of_both_schemes_are_decoded() {
        assert_eq!(Version::from_code(22809), Version { major: 2, minor: 28, patch: 9 });
        assert_eq!(Version::from_code(23007), Version { major: 2, minor: 30, patch: 7 });
        assert_eq!(Version::from_code(2708), Version { major: 2, minor: 7, patch: 8 });
        assert_eq!(Version::from_code(22803).to_string(), "2.28.3");
    }

    #[test]
    fn versions_are_ordered_by_number_not_by_text() {
        assert!(Version::from_code(21903) < Version::OLDEST);
        assert!(Version::from_code(22800) >= Version::OLDEST);
        assert!(Version::from_code(23203) > Version::OLDEST);
    }

    #[test]
    fn call_errors_carry_code_and_detail() {
        let error = Error::Call {
            call: "ncclCommInitRankConfig",
            code: 5,
            text: "invalid usage".into(),
            last: "Duplicate GPU detected".into(),
        };
        assert_eq!(
            error.to_string(),
            "ncclCommInitRankConfig failed with NCCL code 5 (invalid usage): Duplicate GPU detected"
        );
    }
}
