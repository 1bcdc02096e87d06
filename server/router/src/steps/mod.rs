//! The step loop: admission, deadlines, step forming, fairness.

mod active;
mod driver;
mod plan;
mod queue;
mod rate;
mod service;

pub use service::{SchedulerConfig, Service, ServiceEnd, StartError};
