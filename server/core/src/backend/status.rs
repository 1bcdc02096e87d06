//! The state of the service, its group and its ranks.

use std::path::PathBuf;
use std::time::Duration;

pub use expertd_scheduler::Attachment;
use expertd_scheduler::ServiceState;
use expertd_types::{DeviceUsage, Rank};

use super::TierStatus;

/// State of the service, its group and its ranks.
#[derive(Clone, Debug, Default)]
pub struct ServiceStatus {
    /// Current state.
    pub state: ServiceState,
    /// Why it is not serving, or why the last generation ended; may be empty.
    pub reason: String,
    /// Current generation; 0 before the first.
    pub generation: u64,
    /// Steps completed.
    pub steps_total: u64,
    /// Requests that are in a step.
    pub requests_in_flight: u64,
    /// Requests that wait for a step.
    pub requests_queued: u64,
    /// Tokens of the requests that wait.
    pub tokens_queued: u64,
    /// Time since the process started.
    pub uptime: Duration,
    /// One entry per rank.
    pub ranks: Vec<RankStatus>,
    /// Bytes loaded and bytes to load of a reload that is under way.
    pub reload: Option<(u64, u64)>,
    /// Rows and copies of a mixed group; `None` in other groups.
    pub tier: Option<TierStatus>,
    /// One entry per open session.
    pub sessions: Vec<SessionStatus>,
    /// Folder of the loaded weights; for operators only.
    pub weight_folder: PathBuf,
}

/// One rank's process, device and progress of loading.
#[derive(Clone, Debug)]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// Process id; 0 if it has ended.
    pub pid: u32,
    /// Its device in words.
    pub device: String,
    /// The state of its process.
    pub state: RankState,
    /// Weight bytes loaded so far.
    pub weight_bytes_loaded: u64,
    /// Weight bytes of its share.
    pub weight_bytes_total: u64,
    /// Usage of its device; `None` for devices that report none (CPUs, parts of a GPU), and before the first report.
    pub usage: Option<DeviceUsage>,
}

/// The state of a rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// It reads and packs its weights, or joins the group.
    Loading,
    /// It runs steps.
    Ready,
    /// It has ended.
    Gone,
}

/// One session as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    /// Number of the session.
    pub session: u64,
    /// User of the client's process.
    pub user: u32,
    /// The client's process, if the system names it; 0 otherwise.
    pub pid: u32,
    /// Since the session was opened.
    pub age: Duration,
    /// Bytes of its region, or of the client's memory on its GPU.
    pub bytes: u64,
    /// Calls that ended.
    pub calls_total: u64,
    /// Rows of the calls that were answered.
    pub rows_total: u64,
    /// Calls in flight.
    pub calls_in_flight: u64,
    /// Whether ranks have attached its memory.
    pub attachment: Attachment,
    /// UUID of the client's GPU; `None` if the rows lie in host memory.
    pub device: Option<[u8; 16]>,
}
