//! Why generations end or cannot be formed.

use expertd_ipc::ChannelError;
use expertd_scheduler::{Fault, FaultKind};

/// The fault of a generation whose shared memory is broken.
pub(crate) fn channel_fault(error: ChannelError) -> Fault {
    Fault { kind: FaultKind::Channel, message: error.to_string() }
}

/// The fault of a generation that cannot be formed.
pub(crate) fn setup_fault(message: String) -> Fault {
    Fault { kind: FaultKind::Setup, message }
}
