//! What operators see of the router rank: metrics, traces and logs, and the progress of threads without which it is useless.

#![forbid(unsafe_code)]

mod build;
mod codes;
mod handles;
mod logs;
pub mod names;
mod process;
pub mod progress;
mod rarely;
mod recorder;
mod traces;

pub use build::{build, set_build};
pub use codes::code_name;
pub use handles::{RequestMetrics, StepMetrics};
pub use logs::{LogError, LogFormat, flush_logs, init_logs, tell};
pub use process::{ResidentBytes, resident_bytes};
pub use rarely::Rarely;
pub use recorder::{Recorder, install_recorder};
pub use traces::{RequestTrace, TraceError, TraceParent, flush_traces, start_traces};
