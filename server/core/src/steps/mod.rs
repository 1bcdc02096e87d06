//! The step loop: the thread that drives the state machine of [`expertd_scheduler`], and the service in front of it.

mod active;
mod activity;
mod caller;
mod config;
mod driver;
mod service;
mod shared;
mod thread;

pub use caller::{Caller, ClientMemory, Raising, Steps};
pub use config::{ReloadContext, ReloadPlan, ReloadPlanner, SchedulerConfig, ServiceEnd};
pub use expertd_scheduler::OnFault;
pub use service::{Service, StartError};
