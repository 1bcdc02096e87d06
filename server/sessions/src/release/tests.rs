//! Tests of `release`.

use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::OpenCuda;
use expertd_session::memory::SessionMemory;

use super::*;
use expertd_core::backend::ClientKey;
use expertd_shm::descriptors::send_fds;
use expertd_telemetry::RequestMetrics;
use expertd_test_seed::lingering;

use crate::cuda::CudaSession;
use crate::host::HostSession;
use crate::limits::{RegionCharges, SessionLimits};
use crate::session::{Opener, Session};

const LIMITS: SessionLimits =
    SessionLimits { sessions: 4, bytes: 8 << 20, mappings: 1, several_users: false };
const OPENER: Opener = Opener { user: 0, pid: 0, client: ClientKey(1) };

fn blocks(kept: &SharedRegion) -> i64 {
    rustix::fs::fstat(kept).unwrap().st_blocks
}

fn keep(region: &SharedRegion) -> Arc<SharedRegion> {
    SharedRegion::from_fd(region.try_clone_fd().unwrap(), region.len()).unwrap()
}

fn common(number: u64) -> Session {
    Session::new(number, OPENER, UnixStream::pair().unwrap().0, Arc::new(RequestMetrics::new("Session")))
}

/// A session of either kind, and its region as its client keeps it.
fn host(charges: &RegionCharges) -> (Arc<HostSession>, Arc<SharedRegion>) {
    let (memory, rings) = SessionMemory::create(2, 1 << 20).unwrap();
    let kept = keep(memory.region());
    let charge = charges.charge(&LIMITS, 0, kept.len()).unwrap();
    let held = HeldRegion::new(memory.region(), None, charge);
    (HostSession::new(common(1), memory, rings.completions, held), kept)
}

fn cuda(charges: &RegionCharges, memory: OwnedFd) -> (Arc<CudaSession>, Arc<SharedRegion>) {
    let control = ControlMemory::create(64, 16 << 10).unwrap();
    let kept = keep(control.region());
    let charge = charges.charge(&LIMITS, 0, kept.len()).unwrap();
    let held = HeldRegion::new(control.region(), Some(memory), charge);
    (CudaSession::new(common(2), control, OpenCuda::zeroed(), held), kept)
}

fn is_free(charges: &RegionCharges) -> bool {
    charges.charge(&LIMITS, 0, LIMITS.bytes).is_ok()
}

fn wait_until_free(charges: &RegionCharges) {
    let begun = Instant::now();
    while !is_free(charges) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the regions are charged for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_region_loses_its_pages_with_the_last_use_and_is_charged_until_then() {
    let charges = RegionCharges::default();
    let (host, kept_host) = host(&charges);
    let (cuda, kept_cuda) = cuda(&charges, UnixStream::pair().unwrap().0.into());
    let of_a_call = (Arc::clone(&host), Arc::clone(&cuda));
    drop((host, cuda));
    assert!(blocks(&kept_host) > 0 && blocks(&kept_cuda) > 0 && !is_free(&charges));
    drop(of_a_call);
    wait_until_free(&charges);
    assert_eq!((blocks(&kept_host), blocks(&kept_cuda)), (0, 0), "what is not charged has no pages");
}

#[test]
fn a_descriptor_that_closes_slowly_delays_no_other_thread() {
    let charges = RegionCharges::default();
    let (memory, peer) = lingering();
    let (cuda, _) = cuda(&charges, memory);
    let begun = Instant::now();
    drop(cuda);
    assert!(begun.elapsed() < Duration::from_secs(2), "the close was waited for");
    assert!(!is_free(&charges), "it is charged until it is closed");
    drop(peer);
    wait_until_free(&charges);

    // One that waits in the socket of a session.
    let (descriptor, peer) = lingering();
    let (service, client) = UnixStream::pair().unwrap();
    send_fds(&client, &[descriptor.as_fd()]).unwrap();
    drop(descriptor);
    drop(client);
    let (memory, rings) = SessionMemory::create(2, 1 << 20).unwrap();
    let charge = charges.charge(&LIMITS, 0, memory.region().len()).unwrap();
    let held = HeldRegion::new(memory.region(), None, charge);
    let common = Session::new(3, OPENER, service, Arc::new(RequestMetrics::new("Session")));
    let host = HostSession::new(common, memory, rings.completions, held);
    let begun = Instant::now();
    drop(host);
    assert!(begun.elapsed() < Duration::from_secs(2), "the close was waited for");
    assert!(!is_free(&charges), "it is charged until it is closed");
    drop(peer);
    wait_until_free(&charges);
}
