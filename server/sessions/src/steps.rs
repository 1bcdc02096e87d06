//! What takes the calls of sessions.

use std::sync::Arc;

use expertd_core::backend::{Backend, ModelInfo, Request};
use expertd_core::steps::{Caller, ClientMemory, Service};
use expertd_ipc::control::DeviceKind;
use expertd_types::MemoryId;

/// What takes the calls of sessions: the step loop, or a replacement in tests.
pub(crate) trait Steps: Send + Sync {
    /// The model that it serves.
    fn model(&self) -> Arc<ModelInfo>;

    /// The ranks' device.
    fn device(&self) -> DeviceKind;

    /// Takes in a request, whose `caller` gets its answer or its failure.
    fn take_in(&self, request: Request, caller: Box<dyn Caller>);

    /// Takes note of the memory of a new session.
    fn memory_opened(&self, memory: Box<dyn ClientMemory>);

    /// Takes note of the end of a session whose memory was opened.
    fn memory_ended(&self, memory: MemoryId);
}

impl Steps for Service {
    fn model(&self) -> Arc<ModelInfo> {
        Backend::model(self)
    }

    fn device(&self) -> DeviceKind {
        Service::device(self)
    }

    fn take_in(&self, request: Request, caller: Box<dyn Caller>) {
        Service::take_in(self, request, caller);
    }

    fn memory_opened(&self, memory: Box<dyn ClientMemory>) {
        Service::memory_opened(self, memory);
    }

    fn memory_ended(&self, memory: MemoryId) {
        Service::memory_ended(self, memory);
    }
}
