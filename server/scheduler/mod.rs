//! Admission, deadlines, step forming, fairness.

mod active;
mod driver;
mod interface;
mod plan;
mod queue;
mod rate;
mod service;

pub use interface::*;
pub use service::{SchedulerConfig, Service, ServiceEnd, StartError};
