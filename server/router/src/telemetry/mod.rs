//! Metrics, their endpoint, and logs.

mod endpoint;
mod handles;
mod logs;
pub mod names;
mod process;
mod recorder;

pub use endpoint::{MetricsEndpoint, Probe};
pub use handles::{RequestMetrics, StepMetrics};
pub use logs::{LogError, LogFormat, init_logs};
pub use process::{ResidentBytes, resident_bytes};
pub use recorder::{Recorder, install_recorder};
