//! How a CUDA session is opened, and what its socket carries.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{
    ControlLayout, MAX_DOORBELLS, MAX_PREPARE_FRAME, OpenCuda, PrepareReply, PreparedCall,
};
use expertd_session::socket;
use expertd_session::wire::frame;
use metrics::counter;

use super::super::connection::unreadable;
use super::super::listener::{Opening, Shared};
use super::super::open::OpenSession;
use super::super::session::Opener;
use super::state::{CudaState, SessionParts};
use crate::telemetry::names;

/// How long ranks may take to attach the memory of a session that is opened.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(8);

impl Shared {
    /// Makes a CUDA session and hands it to the client, which `opening` counts until ranks have attached its memory.
    pub(in crate::sessions) fn open_cuda(
        self: &Arc<Self>,
        socket: &UnixStream,
        opener: Opener,
        payload: &[u8],
        opening: Option<Opening>,
    ) -> Result<Arc<CudaState>, String> {
        let open: OpenCuda = socket::record(payload).map_err(|error| error.to_string())?;
        let memory =
            socket::receive_one(socket, "the client", "its memory").map_err(|error| error.to_string())?;
        if open.doorbells == 0 || open.doorbells > MAX_DOORBELLS || open.memory_bytes == 0 {
            return Err(format!(
                "a CUDA session needs 1 to {MAX_DOORBELLS} doorbells and at least one byte of memory; the client asks for {} \
                 doorbells and {} bytes",
                open.doorbells, open.memory_bytes
            ));
        }
        let bytes = usize::try_from(open.memory_bytes).map_err(|error| error.to_string())?;
        let layout =
            ControlLayout::new(open.doorbells, open.routing_bytes).map_err(|error| error.to_string())?;
        let charge =
            self.registry.charge(&self.config.limits, opener.user, bytes.saturating_add(layout.bytes))?;
        let control = ControlMemory::create(open.doorbells, open.routing_bytes);
        let control = control.map_err(|error| error.to_string())?;
        let held = self.registry.hold(control.region(), charge);
        let number = self.next_number()?;
        let session = CudaState::new(SessionParts {
            number,
            opener,
            control,
            memory,
            open,
            socket: socket.try_clone().map_err(|error| error.to_string())?,
            metrics: Arc::clone(&self.metrics),
            held,
        });
        let opened = OpenSession::Cuda(Arc::clone(&session));
        self.registry.add(&self.config.limits, &opened)?;
        self.steps.session_opened(opened);
        let attached = session.wait_attached(Instant::now() + ATTACH_TIMEOUT);
        drop(opening);
        let started =
            attached.and_then(|()| self.begin_cuda(socket, &session).map_err(|error| error.to_string()));
        if let Err(reason) = started {
            // The socket stays open for the refusal.
            session.begin_close();
            self.registry.remove(number);
            self.steps.session_ended(session.memory_id());
            return Err(reason);
        }
        counter!(names::SESSIONS_OPENED_TOTAL).increment(1);
        tracing::info!(
            session = number,
            user = opener.user,
            pid = opener.pid,
            bytes = open.memory_bytes,
            doorbells = open.doorbells,
            "CUDA session opened"
        );
        Ok(session)
    }

    /// Sends the control region and starts the thread of the doorbells.
    fn begin_cuda(self: &Arc<Self>, socket: &UnixStream, session: &Arc<CudaState>) -> io::Result<()> {
        let hidden = u32::try_from(self.steps.model().hidden).unwrap_or(u32::MAX);
        let opened = session.control().opened(session.number(), hidden);
        socket::send(socket, frame::OPENED_CUDA, bytemuck::bytes_of(&opened))?;
        socket::send_region(socket, session.control().region())?;
        socket.set_read_timeout(None)?;
        let (of_thread, steps) = (Arc::clone(session), Arc::clone(&self.steps));
        let has_spare_cores = !self.config.spin.is_zero();
        let connected = self.connected_again();
        let thread = std::thread::Builder::new().name(format!("doorbells-{}", session.number()));
        thread.spawn(move || {
            let session = OpenSession::Cuda(Arc::clone(&of_thread));
            session.end_if_it_panics(|| of_thread.take_rings(&*steps, has_spare_cores));
            drop(session);
            // The session is released before the thread counts as ended.
            drop(of_thread);
            drop(connected);
        })?;
        Ok(())
    }

    /// Answers frames of an open CUDA session until the socket ends; returns why the service ends it.
    pub(in crate::sessions) fn follow_cuda(
        &self,
        socket: &UnixStream,
        session: &CudaState,
    ) -> io::Result<Option<String>> {
        loop {
            match socket::receive(socket, MAX_PREPARE_FRAME) {
                Ok(Some((frame::GET_MODEL, _))) => self.send_model(socket)?,
                Ok(Some((frame::PREPARE, payload))) => {
                    let reply = match self.prepare(session, &payload) {
                        Ok(reply) => bytemuck::bytes_of(&reply).to_vec(),
                        Err(reason) => {
                            let mut reply = bytemuck::bytes_of(&PrepareReply { first: 0, count: 0 }).to_vec();
                            reply.extend_from_slice(reason.as_bytes());
                            reply
                        }
                    };
                    socket::send(socket, frame::PREPARED, &reply)?;
                }
                Ok(Some((kind, _))) => {
                    return Ok(Some(format!(
                        "a frame of kind {kind} on the socket of an open CUDA session; expected PREPARE or GET_MODEL"
                    )));
                }
                Ok(None) => return Ok(None),
                Err(error) => return Ok(Some(unreadable(&error))),
            }
        }
    }

    fn prepare(&self, session: &CudaState, payload: &[u8]) -> Result<PrepareReply, String> {
        let (records, rest) = payload.as_chunks::<{ size_of::<PreparedCall>() }>();
        if !rest.is_empty() || records.is_empty() {
            return Err(format!(
                "a frame of {} bytes, expected one or more records of {} bytes",
                payload.len(),
                size_of::<PreparedCall>()
            ));
        }
        let calls: Vec<PreparedCall> =
            records.iter().map(|record| bytemuck::pod_read_unaligned(record)).collect();
        let first = session.prepare(&calls, &*self.steps)?;
        Ok(PrepareReply { first, count: calls.len() as u32 })
    }

    /// The number of a new session.
    ///
    /// # Errors
    /// The sentence with which the session is refused.
    pub(in crate::sessions) fn next_number(&self) -> Result<u64, String> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if u32::try_from(number).is_err() {
            return Err(
                "the service has opened 2^32 sessions and has no number for another one; restart it".into()
            );
        }
        Ok(number)
    }
}
