//! Entry points for fuzz targets of CUDA sessions; not part of the interface. No GPU is needed: the router never accesses a client's GPU.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytemuck::Zeroable as _;
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{ControlLayout, KIND_CUDA, OpenCuda, PreparedCall};
use expertd_session::socket;
use expertd_session::wire::{VERSION, frame};
use expertd_shm::SharedRegion;
use expertd_shm::descriptors::send_fds;
use expertd_telemetry::RequestMetrics;

use super::{Echo, LIMITS, connection, opener, wait_until_free};
use crate::cuda::CudaSession;
use crate::limits::RegionCharges;
use crate::open::OpenSession;
use crate::release::HeldRegion;
use crate::session::Session;

/// Bytes of the client's memory.
const MEMORY_BYTES: u64 = 64 << 10;
/// Most doorbells of a session under test.
const DOORBELLS: u32 = 4;
/// How often the client writes its control region anew.
const ROUNDS: usize = 3;

/// Prepared calls and a control region with arbitrary contents, as a hostile client writes them. The first byte gives the number of
/// doorbells, the second one the size of their routing areas, the third one the number of prepared calls. Returns how many calls were
/// admitted.
///
/// # Panics
/// If a call is admitted that breaks a promise, or if memory or calls are still accounted for at the end.
pub fn doorbells(data: &[u8]) -> usize {
    let Some((&[doorbells, routing, prepared], data)) = data.split_first_chunk::<3>() else { return 0 };
    let (doorbells, routing_bytes) = (1 + u32::from(doorbells) % DOORBELLS, u32::from(routing) * 4);
    let charges = RegionCharges::default();
    let layout = ControlLayout::new(doorbells, routing_bytes).expect("a small layout");
    let control = ControlMemory::create(doorbells, routing_bytes).expect("a small region");
    let charge = charges.charge(&LIMITS, 0, layout.bytes).expect("the first session fits");
    let memory = File::open("/dev/null").expect("a descriptor").into();
    let held = HeldRegion::new(control.region(), Some(memory), charge);
    let words = control.region().slice::<u64>(0, layout.bytes / 8).expect("the whole region");
    let (socket, _client) = UnixStream::pair().expect("a pair of sockets");
    let common = Session::new(1, opener(), socket, Arc::new(RequestMetrics::new("Session")));
    let open = OpenCuda { memory_bytes: MEMORY_BYTES, ..OpenCuda::zeroed() };
    let session = CudaSession::new(common, control, open, held);
    let echo = Echo::new(MEMORY_BYTES);
    let bytes = (usize::from(prepared) * size_of::<PreparedCall>()).min(data.len());
    let (records, mut contents) = data.split_at(bytes);
    for record in records.as_chunks::<{ size_of::<PreparedCall>() }>().0 {
        // One by one, so that refused calls do not refuse the others.
        let _ = session.prepare(&[bytemuck::pod_read_unaligned(record)], &*echo);
    }
    for _ in 0..ROUNDS {
        let (now, later) = contents.split_at(layout.bytes.min(contents.len()));
        for (word, bytes) in words.atomics().iter().zip(now.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        contents = later;
        session.poll(&*echo);
        assert!(
            session.status().calls_in_flight <= 2 * u64::from(doorbells),
            "more than two calls of a doorbell"
        );
    }
    OpenSession::Cuda(Arc::clone(&session)).close(Some("the test ends"));
    echo.fail_kept();
    assert_eq!(session.status().calls_in_flight, 0, "calls are left in flight");
    assert_eq!(Arc::strong_count(&session), 1, "a call is left");
    drop(session);
    wait_until_free(&charges);
    echo.admitted()
}

/// The socket of a CUDA session: an OPEN frame whose numbers the first bytes give, a descriptor, and arbitrary bytes.
///
/// # Panics
/// If a session or its memory is left.
pub fn socket(data: &[u8]) {
    let (fields, rest) = data.split_at(size_of::<OpenCuda>().min(data.len()));
    let Ok(open) = socket::record::<OpenCuda>(fields) else { return };
    let open = OpenCuda { version: VERSION, kind: KIND_CUDA, ..open };
    let memory = SharedRegion::create("fuzz", 4096).expect("a region");
    connection(open.memory_bytes, |client| {
        // The service may end the socket while it is written to.
        let _ = socket::send(client, frame::OPEN, bytemuck::bytes_of(&open))
            .and_then(|()| send_fds(client, &[memory.as_fd()]))
            .and_then(|()| client.write_all(rest));
    });
}
