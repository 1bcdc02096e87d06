//! The step loop's thread, and what is left in order when it panics.

use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::watch;

use super::driver::Driver;
use super::service::{SchedulerConfig, ServiceEnd, Shared};
use crate::backend::ServiceState;
use crate::cluster::ClusterConfig;

/// What callers are told when the step loop has ended without a word.
pub(super) const GONE: &str = "the step loop ended unexpectedly; this is a fault of expertd, restart it";

/// The thread and the receiver of how it ended.
type Started = (JoinHandle<()>, watch::Receiver<Option<ServiceEnd>>);

/// Starts the step loop on a thread of its own, for the whole life of the service: ranks die with the thread that
/// started them.
pub(super) fn start(
    shared: Arc<Shared>,
    cluster: ClusterConfig,
    config: SchedulerConfig,
    seed: u64,
) -> io::Result<Started> {
    let (sender, receiver) = watch::channel(None);
    let thread = std::thread::Builder::new().name("steps".into()).spawn(move || {
        let driver = Driver::new(Arc::clone(&shared), cluster, config, seed);
        // A panic drops the driver: its group kills and reaps every rank, and callers in flight get UNAVAILABLE.
        // Nothing of the driver is used afterwards; what callers share with it is behind locks that ignore poison.
        let end = catch_unwind(AssertUnwindSafe(|| driver.run())).unwrap_or_else(|panic| {
            let end = ServiceEnd::SetupFailed(format!("the step loop panicked: {}", text(&*panic)));
            // Logging may be what panicked: this line goes out directly, or not at all.
            let _ = writeln!(io::stderr(), "expertd: {end:?}");
            end
        });
        close(&shared, &end);
        sender.send_replace(Some(end));
    })?;
    Ok((thread, receiver))
}

/// Leaves nothing that waits for the step loop.
fn close(shared: &Shared, end: &ServiceEnd) {
    let mut front = shared.front();
    let (ServiceEnd::LoadFailed(reason) | ServiceEnd::SetupFailed(reason)) = end else { return };
    // Callers whose requests are dropped here learn that they were given up.
    drop(front.inbox.close(reason));
    front.drain_waiters.clear();
    drop(front);
    shared.set_state(ServiceState::Failed, reason);
}

fn text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
