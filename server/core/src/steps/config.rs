//! Limits of the step loop, and the data for checks of a reload.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use expertd_ipc::control::{CheckpointSource, DeviceKind};
use expertd_scheduler::OnFault;
use expertd_types::ExpertPlacement;

/// How the service ended.
pub use expertd_scheduler::End as ServiceEnd;

/// Limits on steps and on the queue.
#[derive(Clone)]
pub struct SchedulerConfig {
    /// Largest number of rows of one step, all ranks together.
    pub max_tokens_per_step: usize,
    /// Largest number of waiting rows. An empty queue accepts a request of any size.
    pub max_queued_tokens: usize,
    /// How long the oldest request waits for others to join its step. `None`: for the connections of the last step, up to an eighth of
    /// its time.
    pub max_wait: Option<Duration>,
    /// Time that requests in flight have after a drain begins, unless the drain sets its own.
    pub drain_timeout: Duration,
    /// Whether requests without a complete answer are retried or failed after a fault of the EP group.
    pub on_fault: OnFault,
    /// Threads that copy the rows of large steps, the step loop's own included.
    pub copy_threads: usize,
    /// Whether rows per expert and layer are metrics.
    pub expert_metrics: bool,
    /// Checks a checkpoint that is to be loaded beside the present one.
    pub reload: ReloadPlanner,
}

/// Checks whether the checkpoint in a folder (`None`: that of the present one) can be loaded into the running service.
/// Returns the reason if it cannot. Must not read its weights by itself: a file that is truncated meanwhile ends the
/// process that reads it.
pub type ReloadPlanner =
    Arc<dyn Fn(&ReloadContext, Option<&Path>) -> Result<ReloadPlan, String> + Send + Sync>;

/// A checked reload.
#[derive(Clone, Debug)]
pub struct ReloadPlan {
    /// The checkpoint.
    pub source: CheckpointSource,
    /// Whether host memory has room for its weights beside the present ones, as far as that is known; loaders check device memory.
    pub has_room: bool,
}

/// The present checkpoint and machine, for the checks of a new checkpoint.
#[derive(Clone, Debug)]
pub struct ReloadContext {
    /// The checkpoint that serves, with the placement that the reload is to have.
    pub checkpoint: CheckpointSource,
    /// The placement that serves.
    pub serving_placement: Option<ExpertPlacement>,
    /// Description of its model.
    pub spec: serde_json::Value,
    /// `[ranks]`: devices of the expert ranks.
    pub devices: Vec<DeviceKind>,
    /// Host memory that packed weights may take, two versions of them together; `None` if only the machine limits it, in bytes.
    pub max_weight_bytes: Option<u64>,
}
