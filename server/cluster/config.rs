//! What every generation of a service has in common.

use std::path::PathBuf;
use std::time::Duration;

use crate::engine::control::DeviceKind;
use crate::shm::GroupShape;

/// What every generation of a service has in common.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Shared sizes.
    pub shape: GroupShape,
    /// The ranks' device.
    pub device: DeviceKind,
    /// Folder of the checkpoint.
    pub model: PathBuf,
    /// Cores of each rank.
    pub cores: Vec<Vec<usize>>,
    /// How long ranks and the router spin before they sleep; see [`SPIN`](crate::shm::wait::SPIN).
    pub spin: Duration,
    /// How long a rank waits for its peers within a step.
    pub peer_timeout: Duration,
    /// A rank that shows no life for this long is given up.
    pub liveness_timeout: Duration,
    /// A step that takes longer is given up.
    pub step_timeout: Duration,
    /// Environment that ranks need beside the router's.
    pub environment: Vec<(String, String)>,
}
