//! The step loop: the thread that drives the state machine of [`expertd_scheduler`], and the service in front of it.

mod active;
mod activity;
mod caller;
mod driver;
mod service;
mod shared;
mod thread;

pub use caller::Attachment;
pub(crate) use caller::{CallError, Caller, ClientMemory, Raising};
pub use expertd_scheduler::OnFault;
pub use service::{
    ReloadContext, ReloadPlan, ReloadPlanner, SchedulerConfig, Service, ServiceEnd, StartError,
};
