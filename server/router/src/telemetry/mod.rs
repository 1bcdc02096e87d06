//! Metrics, their endpoint with the status page, traces, and logs.

mod endpoint;
mod handles;
mod host;
mod logs;
pub mod names;
mod page;
mod process;
mod ranks;
mod rarely;
mod recorder;
mod traces;

pub use endpoint::{MetricsEndpoint, Probe};
pub use handles::{RequestMetrics, StepMetrics};
pub use logs::{LogError, LogFormat, flush_logs, init_logs, tell};
pub use process::{ResidentBytes, resident_bytes};
pub(crate) use rarely::Rarely;
pub use recorder::{Recorder, install_recorder};
pub(crate) use traces::{RequestTrace, TraceParent};
pub use traces::{TraceError, flush_traces, start_traces};
