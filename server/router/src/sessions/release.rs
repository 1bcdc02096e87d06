//! The release of the regions that the service made for clients.
//!
//! A client may keep the descriptor or its mapping of a region for ever. Its pages count for the container that touched them first,
//! which is the service's, so the service frees them itself: once its own threads and all ranks have let go of the region, and the
//! client has closed its socket. A thread of its own does so, because freeing a GiB takes a large part of a second.

use std::io;
use std::mem::take;
use std::sync::{Arc, OnceLock, mpsc};

use expertd_shm::SharedRegion;

use super::registry::Charge;

/// A region that the service made for a client. When it is dropped, its pages are freed, and then it is charged no more. Its owner
/// drops it once the client may not use it any more, and after its own views of it.
#[derive(Debug)]
pub(super) struct HeldRegion {
    spent: Option<Spent>,
    releaser: Releaser,
}

/// A region that nothing in the service uses.
#[derive(Debug)]
struct Spent {
    region: Arc<SharedRegion>,
    charge: Charge,
}

impl Spent {
    fn release(self) {
        let Spent { region, charge } = self;
        // Before the mapping ends, because a mapping without pages ends at once.
        if let Err(error) = region.free_pages() {
            tracing::error!(%error, "the pages of a session's memory stay as long as its client keeps them");
        }
        drop(region);
        drop(charge);
    }
}

impl HeldRegion {
    pub(super) fn new(region: &Arc<SharedRegion>, charge: Charge, releaser: &Releaser) -> Self {
        let region = Arc::clone(region);
        HeldRegion { spent: Some(Spent { region, charge }), releaser: releaser.clone() }
    }
}

impl Drop for HeldRegion {
    fn drop(&mut self) {
        if let Some(spent) = take(&mut self.spent) {
            self.releaser.release(spent);
        }
    }
}

/// Hands regions to the thread that releases them. Without such a thread they are released at once.
#[derive(Clone, Debug, Default)]
pub(super) struct Releaser {
    queue: Arc<OnceLock<mpsc::Sender<Spent>>>,
}

impl Releaser {
    /// Starts the thread, which ends with the last handle. Regions in its queue are still charged, so the limit on sessions' bytes
    /// bounds it.
    pub(super) fn start(&self) -> io::Result<()> {
        let (sender, queue) = mpsc::channel::<Spent>();
        std::thread::Builder::new()
            .name("session-pages".to_owned())
            .spawn(move || queue.into_iter().for_each(Spent::release))?;
        // A second thread would find its queue closed and end.
        let _ = self.queue.set(sender);
        Ok(())
    }

    fn release(&self, spent: Spent) {
        let unsent = match self.queue.get() {
            Some(queue) => queue.send(spent).err().map(|mpsc::SendError(spent)| spent),
            None => Some(spent),
        };
        if let Some(spent) = unsent {
            spent.release();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use bytemuck::Zeroable as _;
    use expertd_session::cuda::control::ControlMemory;
    use expertd_session::cuda::wire::OpenCuda;
    use expertd_session::memory::SessionMemory;

    use super::*;
    use crate::backend::ClientKey;
    use crate::sessions::cuda::{CudaState, SessionParts};
    use crate::sessions::registry::{SessionLimits, SessionRegistry};
    use crate::sessions::session::{Opener, SessionState};
    use crate::telemetry::RequestMetrics;

    const LIMITS: SessionLimits =
        SessionLimits { sessions: 4, bytes: 8 << 20, mappings: 1, several_users: false };
    const OPENER: Opener = Opener { user: 0, pid: 0, client: ClientKey(1) };

    fn blocks(kept: &SharedRegion) -> i64 {
        rustix::fs::fstat(kept).unwrap().st_blocks
    }

    fn keep(region: &SharedRegion) -> Arc<SharedRegion> {
        SharedRegion::from_fd(region.try_clone_fd().unwrap(), region.len()).unwrap()
    }

    /// A session of either kind, and its region as its client keeps it.
    fn host(registry: &SessionRegistry) -> (Arc<SessionState>, Arc<SharedRegion>) {
        let (memory, rings) = SessionMemory::create(2, 1 << 20).unwrap();
        let kept = keep(memory.region());
        let charge = registry.charge(&LIMITS, 0, kept.len()).unwrap();
        let held = registry.hold(memory.region(), charge);
        let (socket, metrics) = (UnixStream::pair().unwrap().0, Arc::new(RequestMetrics::new("Session")));
        (SessionState::new(1, OPENER, memory, rings.completions, socket, metrics, held), kept)
    }

    fn cuda(registry: &SessionRegistry) -> (Arc<CudaState>, Arc<SharedRegion>) {
        let control = ControlMemory::create(64, 16 << 10).unwrap();
        let kept = keep(control.region());
        let charge = registry.charge(&LIMITS, 0, kept.len()).unwrap();
        let held = registry.hold(control.region(), charge);
        let (socket, memory) = UnixStream::pair().unwrap();
        let session = CudaState::new(SessionParts {
            number: 2,
            opener: OPENER,
            control,
            memory: OwnedFd::from(memory),
            open: OpenCuda::zeroed(),
            socket,
            metrics: Arc::new(RequestMetrics::new("Session")),
            held,
        });
        (session, kept)
    }

    #[test]
    fn a_region_loses_its_pages_with_the_last_use_and_is_charged_until_then() {
        let registry = SessionRegistry::default();
        let (host, kept_host) = host(&registry);
        let (cuda, kept_cuda) = cuda(&registry);
        let is_free = || registry.charge(&LIMITS, 0, LIMITS.bytes).is_ok();
        let of_a_call = (Arc::clone(&host), Arc::clone(&cuda));
        drop((host, cuda));
        assert!(blocks(&kept_host) > 0 && blocks(&kept_cuda) > 0 && !is_free());
        drop(of_a_call);
        assert_eq!((blocks(&kept_host), blocks(&kept_cuda)), (0, 0));
        assert!(is_free());
    }

    #[test]
    fn a_thread_of_its_own_frees_the_pages() {
        let registry = SessionRegistry::default();
        registry.start_releasing().unwrap();
        let kept: Vec<_> = (0..4).map(|_| host(&registry).1).collect();
        let begun = Instant::now();
        while registry.charge(&LIMITS, 0, LIMITS.bytes).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the regions are charged for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(kept.iter().all(|kept| blocks(kept) == 0), "what is not charged has no pages");
    }
}
