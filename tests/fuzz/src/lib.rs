//! Fuzz targets for everything that expertd parses and did not write itself.
//!
//! A target takes arbitrary bytes and panics if a promise is broken; errors that the parsers return are expected.
//! `scripts/fuzz.sh` runs targets under libFuzzer; the test of this crate runs every seed, every recorded regression and
//! some mutations of them with the ordinary compiler.

pub mod api;
mod echo;
pub mod files;
pub mod ipc;
pub mod network;
pub mod seeds;

/// A named fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name on the command line, and of the folders with seeds and regressions.
    pub name: &'static str,
    /// Binary that contains the target. Each binary instruments only the crates that its targets use.
    pub binary: &'static str,
    /// Runs one input.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "header", binary: "fuzz-files", run: files::header },
    Target { name: "index", binary: "fuzz-files", run: files::index },
    Target { name: "checkpoint", binary: "fuzz-files", run: files::checkpoint },
    Target { name: "control", binary: "fuzz-ipc", run: ipc::control },
    Target { name: "ring", binary: "fuzz-ipc", run: ipc::ring },
    Target { name: "segments", binary: "fuzz-ipc", run: ipc::segments },
    Target { name: "request", binary: "fuzz-api", run: api::request },
    Target { name: "texts", binary: "fuzz-api", run: api::texts },
    Target { name: "session", binary: "fuzz-api", run: api::session },
    Target { name: "records", binary: "fuzz-api", run: api::records },
    Target { name: "doorbells", binary: "fuzz-api", run: api::doorbells },
    Target { name: "cuda-session", binary: "fuzz-api", run: api::cuda_session },
    Target { name: "connection", binary: "fuzz-api", run: api::connection },
    Target { name: "network-messages", binary: "fuzz-ipc", run: network::messages },
    Target { name: "network-control", binary: "fuzz-ipc", run: network::control },
    Target { name: "network-handshake", binary: "fuzz-api", run: network::handshake },
];

/// Environment variable that selects the target of a fuzzer.
pub const TARGET: &str = "EXPERTD_FUZZ_TARGET";

/// The target that [`TARGET`] selects.
///
/// # Panics
/// If the variable does not name a target.
#[must_use]
pub fn selected() -> &'static Target {
    let name = std::env::var(TARGET).unwrap_or_default();
    let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
    TARGETS
        .iter()
        .find(|target| target.name == name)
        .unwrap_or_else(|| panic!("{TARGET}={name:?} is not a target; expected one of {names:?}"))
}

/// Splits `data` at its first zero byte pair, which cannot occur in text.
fn split_text(data: &[u8]) -> (&[u8], &[u8]) {
    match data.windows(2).position(|pair| pair == [0, 0]) {
        Some(at) => (&data[..at], &data[at + 2..]),
        None => (data, &[]),
    }
}
