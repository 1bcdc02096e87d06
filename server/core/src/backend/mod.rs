//! What callers and the step loop pass to each other: validated requests, answers, receipts, and the [`Backend`] trait, which tests
//! implement as well.

mod model;
mod request;
mod status;
mod traced;

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

pub use expertd_scheduler::{ClientKey, ConnectionKey, ServiceState};
use expertd_types::{ExpertPlacement, WeightFingerprint, WeightVersion};
use tokio::sync::{oneshot, watch};

pub use self::model::{Limits, MAX_NAME_BYTES, ModelInfo, MoeLayerInfo, RankPlacement, owned_ranges};
pub use self::request::{
    Answer, GivenRouting, Receipt, Request, RequestId, StepTiming, client_key, next_connection,
};
pub use self::status::{Attachment, RankState, RankStatus, ServiceStatus, SessionStatus};
pub use crate::expert_rows::{ExpertRows, LayerRows};
use crate::failure::Failure;
pub use crate::tier_rows::{TierRows, TierStatus};

/// The future result of a submitted request. Dropping it cancels the request: it leaves the queue, or its rows are discarded
/// when their step completes.
pub type Pending = oneshot::Receiver<Result<Answer, Failure>>;

/// The future of a drain.
pub type DrainFuture = Pin<Box<dyn Future<Output = DrainReport> + Send + 'static>>;

/// The service below the API: the step loop, or a replacement in tests.
pub trait Backend: Send + Sync + 'static {
    /// Description of the loaded model. Called for every request, so it must be cheap.
    fn model(&self) -> Arc<ModelInfo>;

    /// Submits a validated request without blocking.
    ///
    /// # Errors
    /// Why it is not admitted.
    fn submit(&self, request: Request) -> Result<Pending, Failure>;

    /// State of the service, its group and its ranks.
    fn status(&self) -> ServiceStatus;

    /// Why no call is answered although the service serves.
    fn standstill(&self) -> Option<String> {
        None
    }

    /// Follows the state of the service, for health checks.
    fn watch_state(&self) -> watch::Receiver<ServiceState>;

    /// Stops admitting requests at once. The future resolves when no request is queued or in flight, at the latest after
    /// `timeout` (`None`: the service's own limit); the remaining requests then fail with [`Failure::Unavailable`]. The process
    /// ends with exit code 0 afterwards.
    fn drain(&self, timeout: Option<Duration>) -> DrainFuture;

    /// The rows that experts have computed since the service started. Empty if the backend does not count them.
    fn expert_rows(&self) -> ExpertRows {
        ExpertRows::default()
    }

    /// Loads weights, or the present ones with another placement, and lets them serve. The future resolves when they serve, or
    /// with the reason why the earlier weights go on.
    fn reload(&self, request: ReloadRequest) -> ReloadFuture;
}

/// The weights and placement that a reload loads.
#[derive(Clone, Debug, Default)]
pub struct ReloadRequest {
    /// Folder of the checkpoint; `None`: the one that serves.
    pub folder: Option<PathBuf>,
    /// The ranks that are to own the experts.
    pub placement: PlacementChange,
}

/// The placement that a reload asks for.
#[derive(Clone, Debug, Default)]
pub enum PlacementChange {
    /// The present one.
    #[default]
    Keep,
    /// Contiguous ranges.
    Contiguous,
    /// Another one.
    Given(ExpertPlacement),
}

/// The future of a reload.
pub type ReloadFuture = Pin<Box<dyn Future<Output = Result<ReloadReport, String>> + Send + 'static>>;

/// The end of a reload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReloadReport {
    /// Number of the weights that serve now.
    pub weight_version: WeightVersion,
    /// Their fingerprint.
    pub weight_fingerprint: WeightFingerprint,
    /// From the start of the loaders until the weights were packed.
    pub load_time: Duration,
    /// From the end of the last generation with the earlier weights until the first one with these served.
    pub pause: Duration,
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// Number of requests that failed because the time ran out.
    pub requests_dropped: u64,
}
