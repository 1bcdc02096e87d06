//! The step loop's thread, and the clean-up after its panic.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::watch;

use super::driver::Driver;
use super::service::{SchedulerConfig, ServiceEnd};
use super::shared::Shared;
use crate::backend::ServiceState;
use crate::cluster::ClusterConfig;
use crate::{telemetry, watchdog};

/// Error for callers after the step loop ended without reporting why.
pub(super) const GONE: &str =
    "the step loop ended unexpectedly; this is a bug in expertd; restart the service";

/// A step loop that has not begun. If it is dropped, the receiver of its result resolves.
pub(super) struct StepLoop {
    pub(super) shared: Arc<Shared>,
    pub(super) cluster: ClusterConfig,
    pub(super) config: SchedulerConfig,
    pub(super) seed: u64,
    pub(super) result: watch::Sender<Option<ServiceEnd>>,
}

impl StepLoop {
    /// Begins on a thread that lives as long as the service, because ranks die with the thread that started them.
    pub(super) fn begin(self) -> io::Result<JoinHandle<()>> {
        let StepLoop { shared, cluster, config, seed, result } = self;
        let of_driver = Arc::clone(&shared);
        guarded(shared, result, move || Driver::new(of_driver, cluster, config, seed).run())
    }
}

/// Runs `body` on a thread. The sender of its result is dropped with the thread, so the receiver always resolves. After a
/// panic, all waiting callers are released.
fn guarded(
    shared: Arc<Shared>,
    result: watch::Sender<Option<ServiceEnd>>,
    body: impl FnOnce() -> ServiceEnd + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("steps".into()).spawn(move || {
        let heartbeat = watchdog::watch_thread("the step loop");
        // A panic drops the driver: its group kills and reaps every rank, and callers in flight get UNAVAILABLE.
        // Nothing uses the driver afterwards; the state shared with callers is behind locks that ignore poison.
        let end = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
            let message = format!("the step loop panicked: {}", text(&*panic));
            // Standard error may be blocked, and callers that wait for the step loop must not wait for it.
            telemetry::tell(&format!("expertd: {message}"));
            ServiceEnd::SetupFailed(message)
        });
        close(&shared, &end);
        result.send_replace(Some(end));
        heartbeat.finish();
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

fn text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use expertd_scheduler::{Inbox, Refusal};

    use super::*;
    use crate::steps::service::tests::{shared, submission};

    #[tokio::test]
    async fn a_panic_ends_the_service_and_leaves_nothing_waiting() {
        let shared = shared();
        let (report, reported) = tokio::sync::oneshot::channel();
        shared.front().drain_waiters.push(report);
        let state = shared.state.subscribe();
        let (result, mut end) = watch::channel(None);
        let thread = guarded(Arc::clone(&shared), result, || panic!("planted")).unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(10), end.wait_for(Option::is_some)).await;
        let ended = ended.expect("the end is known").unwrap().clone();
        assert_eq!(ended, Some(ServiceEnd::SetupFailed("the step loop panicked: planted".into())));
        thread.join().unwrap();
        assert_eq!(*state.borrow(), ServiceState::Failed);
        assert!(reported.await.is_err(), "the drain must not wait");
        let now = shared.time(std::time::Instant::now());
        let front = &mut shared.front();
        let inbox: &mut Inbox<_> = &mut front.inbox;
        assert!(matches!(inbox.refuse(now, &submission()), Some(Refusal::NotReady { .. })));
    }

    #[tokio::test]
    async fn the_end_is_known_even_if_the_thread_says_nothing() {
        let (sender, receiver) = watch::channel(None);
        let service = crate::steps::service::tests::service(receiver);
        drop(sender);
        assert_eq!(service.ended().await, ServiceEnd::SetupFailed(GONE.into()));
    }
}
