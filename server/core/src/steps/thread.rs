//! The step loop's thread.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::watch;

use super::config::ServiceEnd;
use super::driver;
use super::shared::Shared;
use crate::backend::ServiceState;
use crate::cluster::ClusterConfig;
use expertd_telemetry::progress;

/// Error for callers after the step loop ended without reporting why.
pub(super) const GONE: &str =
    "the step loop ended unexpectedly; this is a bug in expertd; restart the service";

/// Begins the step loop on a thread that lives as long as the service, because ranks die with the thread that started them. The receiver
/// of its end resolves also if it does not begin.
pub(super) fn begin(
    shared: Arc<Shared>,
    cluster: ClusterConfig,
    result: watch::Sender<Option<ServiceEnd>>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("steps".into()).spawn(move || {
        let needed = progress::need_thread("the step loop");
        let end = driver::run(Arc::clone(&shared), cluster);
        close(&shared, &end);
        result.send_replace(Some(end));
        needed.finish();
    })
}

/// Releases everything that waits for the step loop.
fn close(shared: &Shared, end: &ServiceEnd) {
    let (public, failed) = match end {
        ServiceEnd::Drained => ("the service has drained", None),
        ServiceEnd::LoadFailed(reason) | ServiceEnd::SetupFailed(reason) => {
            ("the service has failed and needs a restart", Some(reason))
        }
    };
    let mut front = shared.front();
    let dropped = front.inbox.close(public);
    front.has_ended = true;
    front.drain_waiters.clear();
    front.reloads.clear();
    let memories = std::mem::take(&mut front.memories);
    drop(front);
    // Dropping these fails their calls and releases their memory.
    drop((dropped, memories));
    if let Some(reason) = failed {
        shared.set_state(ServiceState::Failed, reason);
    }
}
