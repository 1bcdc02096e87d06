//! Entry points for fuzz targets of sessions; not part of the interface.

pub mod cuda;

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_core::backend::{Attachment, ClientKey, ModelInfo, Request, ServiceState};
use expertd_core::failure::Failure;
use expertd_core::fuzzing::{check_request, model, receipt};
use expertd_core::steps::{Caller, ClientMemory, Steps};
use expertd_ipc::RowSource;
use expertd_ipc::control::DeviceKind;
use expertd_session::memory::SessionMemory;
use expertd_telemetry::RequestMetrics;
use expertd_types::MemoryId;

use crate::connection::serve;
use crate::host::HostSession;
use crate::limits::{RegionCharges, SessionLimits};
use crate::open::OpenSession;
use crate::registry::SessionRegistry;
use crate::release::HeldRegion;
use crate::session::{Opener, Session};
use crate::shared::{SessionConfig, Shared};

/// Whether an agent would be started for this request.
#[must_use]
pub fn accepts(request: &crate::NetworkRequest) -> bool {
    request.check().is_ok()
}

/// Calls in flight of the sessions under test.
const CALLS: u32 = 4;
/// Bytes of their row areas.
const ROWS_BYTES: usize = 8 << 10;
pub(super) const LIMITS: SessionLimits =
    SessionLimits { sessions: 2, bytes: 1 << 20, mappings: 1, several_users: false };

/// Checks every call that is admitted, answers some at once, refuses some, and keeps the others.
pub(super) struct Echo {
    model: Arc<ModelInfo>,
    /// Size of the memory in which rows lie.
    memory_bytes: u64,
    kept: Mutex<Vec<Box<dyn Caller>>>,
    admitted: AtomicUsize,
}

impl Echo {
    pub(super) fn new(memory_bytes: u64) -> Arc<Echo> {
        let (kept, admitted) = Default::default();
        Arc::new(Echo { model: Arc::new(model()), memory_bytes, kept, admitted })
    }

    /// Number of calls that were handed over.
    pub(super) fn admitted(&self) -> usize {
        self.admitted.load(Ordering::Relaxed)
    }

    /// Fails the calls that were kept, as a fault does.
    pub(super) fn fail_kept(&self) {
        let error = || {
            let (reason, retry_after) = ("a rank ended".to_owned(), Duration::from_millis(5));
            Failure::Unavailable { reason, retry_after }
        };
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        kept.into_iter().for_each(|caller| caller.fail(error()));
    }
}

/// Who opens the sessions under test.
pub(super) const fn opener() -> Opener {
    Opener { user: 0, pid: 0, client: ClientKey(1) }
}

/// The state that threads of connections share.
pub(super) fn shared(echo: Arc<Echo>, registry: &Arc<SessionRegistry>) -> Arc<Shared> {
    let config = SessionConfig {
        listen: None,
        users: vec![0],
        limits: LIMITS,
        spin: Duration::ZERO,
        spin_after_request: Duration::ZERO,
        spin_between_steps: Duration::ZERO,
    };
    Arc::new(Shared::new(config, echo, Arc::clone(registry), Box::new(|_| Bytes::new())))
}

impl Steps for Echo {
    fn model(&self) -> Arc<ModelInfo> {
        Arc::clone(&self.model)
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn state(&self) -> ServiceState {
        ServiceState::Serving
    }

    fn take_in(&self, request: Request, caller: Box<dyn Caller>) {
        check_request(&self.model, &request);
        self.admitted.fetch_add(1, Ordering::Relaxed);
        let bytes = request.tokens * self.model.hidden * request.dtype.size();
        let RowSource::Attached(rows) = caller.rows(0..bytes) else {
            panic!("rows outside of the session's memory")
        };
        let end = |start: u64| start.checked_add(bytes as u64).expect("the end of rows");
        let memory = self.memory_bytes;
        assert!(end(rows.input) <= memory && end(rows.output) <= memory, "{rows:?}");
        assert!(end(rows.input) <= rows.output || end(rows.output) <= rows.input, "{rows:?} overlap");
        match request.tokens % 4 {
            0 => caller.fail(Failure::Draining),
            1 => self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(caller),
            _ => caller.answer(Bytes::new(), receipt(&request), false),
        }
    }

    fn memory_opened(&self, memory: Box<dyn ClientMemory>) {
        memory.set_attachment(Attachment::Attached);
    }

    fn memory_ended(&self, _: MemoryId) {}
}

/// Rings and row area of a session with arbitrary contents, as a hostile client writes them.
///
/// # Panics
/// If a request is admitted that breaks a promise, if the service takes more requests than the ring holds, or if memory or
/// calls are still accounted for at the end.
pub fn records(data: &[u8]) {
    let charges = RegionCharges::default();
    let Ok((memory, mut rings)) = SessionMemory::create(CALLS, ROWS_BYTES) else { return };
    let Ok(words) = memory.region().slice::<u64>(0, memory.region().len() / 8) else { return };
    for (word, bytes) in words.atomics().iter().zip(data.as_chunks::<8>().0) {
        word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
    }
    let charge = charges.charge(&LIMITS, 0, memory.region().len()).expect("the first session fits");
    let echo = Echo::new(memory.region().len() as u64);
    let held = HeldRegion::new(memory.region(), None, charge);
    let (socket, _client) = UnixStream::pair().expect("a pair of sockets");
    let common = Session::new(1, opener(), socket, Arc::new(RequestMetrics::new("Session")));
    let session = HostSession::new(common, memory, rings.completions, held);
    let mut taken = 0;
    while let Ok(Some(record)) = rings.requests.try_pop() {
        taken += 1;
        assert!(taken <= CALLS, "more requests than the ring holds");
        if session.take(&record, &*echo).is_err() {
            break;
        }
    }
    OpenSession::Host(Arc::clone(&session)).close(Some("the test ends"));
    echo.fail_kept();
    assert_eq!(session.status().calls_in_flight, 0, "calls are left in flight");
    assert_eq!(Arc::strong_count(&session), 1, "a call is left");
    drop(session);
    wait_until_free(&charges);
}

/// Waits until no memory is charged. A thread of its own releases each session's memory.
///
/// # Panics
/// If memory is still charged after a while.
pub(super) fn wait_until_free(charges: &RegionCharges) {
    let begun = Instant::now();
    while charges.charge(&LIMITS, 0, LIMITS.bytes).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(30), "memory is still charged");
        std::thread::yield_now();
    }
}

/// The bytes that a client sends over the session socket: the service answers or refuses, and releases everything at the
/// end.
///
/// # Panics
/// If a session or its memory is left.
pub fn socket(data: &[u8]) {
    connection(u64::MAX, |client| {
        let _ = client.write_all(data);
    });
}

/// Serves a connection on which `send` sends what a client sends, and checks that nothing is left at its end. Rows lie in memory of
/// `memory_bytes` bytes.
fn connection(memory_bytes: u64, send: impl FnOnce(&mut UnixStream)) {
    let (service, mut client) = UnixStream::pair().expect("a pair of sockets");
    let registry = Arc::new(SessionRegistry::default());
    let shared = shared(Echo::new(memory_bytes), &registry);
    let serving = std::thread::spawn({
        let shared = Arc::clone(&shared);
        move || drop(serve(&shared, &service, opener(), &mut None))
    });
    let mut reading = client.try_clone().expect("a descriptor");
    // The descriptor of the region arrives with a byte that is read without it, and is closed.
    let reading = std::thread::spawn(move || drop(reading.read_to_end(&mut Vec::new())));
    send(&mut client);
    let _ = client.shutdown(Shutdown::Write);
    assert!(serving.join().is_ok(), "the thread of the connection panicked");
    while shared.threads() > 0 {
        std::thread::yield_now();
    }
    assert!(reading.join().is_ok() && registry.status().is_empty(), "a session is left");
    wait_until_free(&registry.charges);
}
