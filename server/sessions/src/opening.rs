//! How a session of either kind is opened.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use expertd_core::backend::ServiceState;
use expertd_core::steps::ClientMemory as _;
use expertd_ipc::control::DeviceKind;
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{ControlLayout, KIND_CUDA, MAX_DOORBELLS, OpenCuda};
use expertd_session::memory::SessionMemory;
use expertd_session::socket;
use expertd_session::wire::{KIND_HOST, MAX_CALLS, Open, RegionLayout, VERSION, frame};
use expertd_shm::SharedRegion;
use expertd_telemetry::names;
use metrics::counter;

use crate::cuda::CudaSession;
use crate::host::{HostSession, Spin};
use crate::open::OpenSession;
use crate::release::HeldRegion;
use crate::session::{Opener, Session};
use crate::shared::{Opening, Shared};

/// A session that is about to be opened.
struct Prepared {
    session: OpenSession,
    /// The frame that tells the client of it, with the region that follows.
    frame: (u32, Vec<u8>),
    region: Arc<SharedRegion>,
    /// Name of the thread that takes calls, and what it runs.
    thread: (String, Box<dyn FnOnce() + Send>),
}

/// Opens the session that an OPEN frame asks for. `opening` counts the client until its session counts among all sessions: ranks may take
/// minutes to attach the memory, and other clients may connect meanwhile.
///
/// # Errors
/// The error message for the client.
pub(crate) fn open(
    shared: &Arc<Shared>,
    socket: &UnixStream,
    opener: Opener,
    payload: &[u8],
    opening: &mut Option<Opening>,
) -> Result<OpenSession, String> {
    let Prepared { session, frame, region, thread } = match kind_of(payload)? {
        KIND_CUDA => prepare_cuda(shared, socket, opener, payload)?,
        _ => prepare_host(shared, socket, opener, payload)?,
    };
    shared.registry.add(&shared.config.limits, &session)?;
    *opening = None;
    shared.steps.memory_opened(Box::new(session.clone()));
    let attached = session.session().wait_attached(|| cause_of(shared.steps.state()));
    let started = attached.and_then(|()| {
        socket::send(socket, frame.0, &frame.1)
            .and_then(|()| socket::send_region(socket, &region))
            .and_then(|()| socket.set_read_timeout(None))
            .and_then(|()| {
                let (name, body) = thread;
                let (of_thread, connected) = (session.clone(), shared.connected_again());
                std::thread::Builder::new().name(name).spawn(move || {
                    of_thread.end_if_it_panics(body);
                    // The memory is released before the thread counts as ended.
                    drop(of_thread);
                    drop(connected);
                })
            })
            .map_err(|error| error.to_string())
    });
    if let Err(reason) = started {
        // The socket stays open for the refusal.
        session.begin_close();
        shared.registry.remove(session.number());
        shared.steps.memory_ended(session.id());
        return Err(reason);
    }
    counter!(names::SESSIONS_OPENED_TOTAL).increment(1);
    let (number, bytes) = (session.number(), session.status().bytes);
    tracing::info!(
        session = number,
        user = opener.user,
        pid = opener.pid,
        bytes,
        "{} opened",
        session.kind()
    );
    Ok(session)
}

fn prepare_host(
    shared: &Shared,
    socket: &UnixStream,
    opener: Opener,
    payload: &[u8],
) -> Result<Prepared, String> {
    let open: Open = socket::record(payload).map_err(|error| error.to_string())?;
    if open.kind != KIND_HOST {
        return Err(format!(
            "sessions of kind {} are not served, only kinds {KIND_HOST} (host memory) and {KIND_CUDA} (a GPU's memory)",
            open.kind
        ));
    }
    if open.reserved != 0 {
        return Err(format!("OPEN ends with {}, expected 0 in this version of the protocol", open.reserved));
    }
    if open.calls == 0 || open.calls > MAX_CALLS || open.rows_bytes == 0 {
        return Err(format!(
            "a session needs 1 to {MAX_CALLS} calls and at least one byte of rows; the client asks for {} calls and {} bytes",
            open.calls, open.rows_bytes
        ));
    }
    let calls = open.calls.next_power_of_two();
    let rows_bytes = usize::try_from(open.rows_bytes).map_err(|error| error.to_string())?;
    let layout = RegionLayout::new(calls, rows_bytes).map_err(|error| error.to_string())?;
    let charge = shared.registry.charges.charge(&shared.config.limits, opener.user, layout.bytes)?;
    let (memory, rings) = SessionMemory::create(calls, rows_bytes).map_err(|error| error.to_string())?;
    let common = new_session(shared, socket, opener)?;
    let spin_us = u32::try_from(shared.config.spin.as_micros()).unwrap_or(u32::MAX);
    let opened = memory.opened(common.number(), spin_us, hidden(shared));
    let (region, name) = (Arc::clone(memory.region()), format!("session-{}", common.number()));
    let held = HeldRegion::new(&region, None, charge);
    let session = HostSession::new(common, memory, rings.completions, held);
    let (of_thread, steps) = (Arc::clone(&session), Arc::clone(&shared.steps));
    let spin = Spin { waiting: shared.config.spin_after_request, answered: shared.config.spin_between_steps };
    let body = move || of_thread.take_requests(rings.requests, &*steps, spin);
    Ok(Prepared {
        session: OpenSession::Host(session),
        frame: (frame::OPENED, bytemuck::bytes_of(&opened).to_vec()),
        region,
        thread: (name, Box::new(body)),
    })
}

fn prepare_cuda(
    shared: &Shared,
    socket: &UnixStream,
    opener: Opener,
    payload: &[u8],
) -> Result<Prepared, String> {
    let open: OpenCuda = socket::record(payload).map_err(|error| error.to_string())?;
    if open.doorbells == 0 || open.doorbells > MAX_DOORBELLS || open.memory_bytes == 0 {
        return Err(format!(
            "a CUDA session needs 1 to {MAX_DOORBELLS} doorbells and at least one byte of memory; the client asks for {} \
             doorbells and {} bytes",
            open.doorbells, open.memory_bytes
        ));
    }
    if shared.steps.device() != DeviceKind::Cuda {
        let text = "the service's CPU ranks cannot access the memory of a GPU; open a host session";
        return Err(text.to_owned());
    }
    // After all checks, so that no descriptor is taken for a session that is refused.
    let memory =
        socket::receive_one(socket, "the client", "its memory").map_err(|error| error.to_string())?;
    prepare_device(shared, socket, opener, open, memory)
}

fn prepare_device(
    shared: &Shared,
    socket: &UnixStream,
    opener: Opener,
    open: OpenCuda,
    memory: OwnedFd,
) -> Result<Prepared, String> {
    let bytes = usize::try_from(open.memory_bytes).map_err(|error| error.to_string())?;
    let layout = ControlLayout::new(open.doorbells, open.routing_bytes).map_err(|error| error.to_string())?;
    let charged = bytes.saturating_add(layout.bytes);
    let charge = shared.registry.charges.charge(&shared.config.limits, opener.user, charged)?;
    let control = ControlMemory::create(open.doorbells, open.routing_bytes);
    let control = control.map_err(|error| error.to_string())?;
    let common = new_session(shared, socket, opener)?;
    let opened = control.opened(common.number(), hidden(shared));
    let (region, name) = (Arc::clone(control.region()), format!("doorbells-{}", common.number()));
    let held = HeldRegion::new(&region, Some(memory), charge);
    let session = CudaSession::new(common, control, open, held);
    let (of_thread, steps) = (Arc::clone(&session), Arc::clone(&shared.steps));
    let has_spare_cores = !shared.config.spin.is_zero();
    let body = move || of_thread.take_rings(&*steps, has_spare_cores);
    Ok(Prepared {
        session: OpenSession::Cuda(session),
        frame: (frame::OPENED_CUDA, bytemuck::bytes_of(&opened).to_vec()),
        region,
        thread: (name, Box::new(body)),
    })
}

/// The common part of a new session.
fn new_session(shared: &Shared, socket: &UnixStream, opener: Opener) -> Result<Session, String> {
    let number = shared.next.fetch_add(1, Ordering::Relaxed);
    if u32::try_from(number).is_err() {
        return Err(
            "the service has opened 2^32 sessions and has no number for another one; restart it".into()
        );
    }
    let socket = socket.try_clone().map_err(|error| error.to_string())?;
    Ok(Session::new(number, opener, socket, Arc::clone(&shared.metrics)))
}

/// Why ranks have not attached a memory.
const fn cause_of(state: ServiceState) -> &'static str {
    match state {
        ServiceState::Loading => "the weights are being loaded",
        ServiceState::Reforming => "the EP group is re-forming after a fault or for other weights",
        ServiceState::Serving | ServiceState::Draining => {
            "they are busy with a step or with the memory of other sessions"
        }
        ServiceState::Failed => "the service has failed and needs a restart",
    }
}

/// Elements of a row.
fn hidden(shared: &Shared) -> u32 {
    u32::try_from(shared.steps.model().hidden).unwrap_or(u32::MAX)
}

/// The kind of session that an OPEN frame asks for. The version comes first, so that clients of other versions are told so whatever
/// else they send.
fn kind_of(payload: &[u8]) -> Result<u32, String> {
    let word = |at: usize| payload.get(at..at + 4)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    let version = word(0);
    if version != Some(VERSION) {
        let found = version.map_or_else(|| "none".to_owned(), |version| version.to_string());
        return Err(format!(
            "the client speaks version {found} of the session protocol, this service version {VERSION}; use client and service of \
             the same release"
        ));
    }
    word(4).ok_or_else(|| format!("an OPEN frame of {} bytes has no kind of session", payload.len()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write as _;
    use std::os::fd::AsFd as _;

    use bytes::Bytes;
    use expertd_core::backend::{ClientKey, ModelInfo};
    use expertd_shm::descriptors::send_fds;

    use std::time::Duration;

    use super::*;
    use crate::connection::tests::Idle;
    use crate::limits::SessionLimits;
    use crate::shared::SessionConfig;

    #[test]
    fn a_client_passes_exactly_one_descriptor() {
        let config = SessionConfig {
            listen: None,
            users: vec![0],
            limits: SessionLimits { sessions: 1, bytes: 1 << 20, mappings: 1, several_users: false },
            spin: Duration::ZERO,
            spin_after_request: Duration::ZERO,
            spin_between_steps: Duration::ZERO,
        };
        let describe = Box::new(|_: &Arc<ModelInfo>| Bytes::new());
        let shared = Shared::new(config, Idle::with(DeviceKind::Cuda), Arc::default(), describe);
        let opener = Opener { user: 0, pid: 0, client: ClientKey(1) };
        let open = OpenCuda {
            version: VERSION,
            kind: KIND_CUDA,
            memory_bytes: 4096,
            doorbells: 1,
            routing_bytes: 0,
            device: [1; 16],
        };
        for count in [0, 2] {
            let (service, mut client) = UnixStream::pair().unwrap();
            match count {
                0 => client.write_all(b"F").unwrap(),
                _ => send_fds(&client, &[service.as_fd(), service.as_fd()]).unwrap(),
            }
            let refused = prepare_cuda(&shared, &service, opener, bytemuck::bytes_of(&open));
            let text = refused.err().unwrap();
            assert!(text.contains(&format!("{count} descriptors")), "{text}");
        }
    }
}
