//! What the socket of a client carries: it opens a session, and its end is the session's end.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_session::cuda::wire::KIND_CUDA;
use expertd_session::memory::SessionMemory;
use expertd_session::socket;
use expertd_session::wire::{KIND_HOST, MAX_CALLS, MAX_CLIENT_FRAME, Open, RegionLayout, VERSION, frame};
use metrics::counter;
use rustix::event::{PollFd, PollFlags, poll};

use super::listener::{Opening, Shared};
use super::open::OpenSession;
use super::registry::SessionRegistry;
use super::session::{Opener, SessionState, Spin};
use crate::telemetry::names;

/// How long a client may take to open a session after it has connected.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// A session that has ended. It is listed, and its memory keeps its contents, until this is dropped.
pub(super) struct EndedSession {
    session: OpenSession,
    registry: Arc<SessionRegistry>,
}

impl EndedSession {
    /// Waits until the client no longer uses the session's memory. It may still read answers that came before the end, and its GPU
    /// may have registered the memory. The client's socket closes when it is done, and when it dies.
    pub(super) fn wait_for_client(self, socket: &UnixStream) {
        loop {
            // Only the end of both directions is reported; bytes that the client still sends are not read.
            match poll(&mut [PollFd::new(socket, PollFlags::empty())], None) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(session = self.session.number(), %error, "cannot wait for the end of a client");
                    return;
                }
            }
        }
    }
}

impl Drop for EndedSession {
    fn drop(&mut self) {
        self.registry.remove(self.session.number());
    }
}

impl Shared {
    /// Serves the connection of a user who may open sessions until its end, or that of its session. `opening` counts it until it has
    /// opened one.
    pub(super) fn serve(
        self: &Arc<Self>,
        socket: &UnixStream,
        opener: Opener,
        opening: Option<Opening>,
    ) -> io::Result<Option<EndedSession>> {
        let deadline = Instant::now() + OPENING_TIMEOUT;
        loop {
            let (kind, payload) = match socket::receive_until(socket, MAX_CLIENT_FRAME, deadline) {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(None),
                Err(error) => {
                    self.refuse(socket, "protocol", &unreadable(&error));
                    return Err(error);
                }
            };
            match kind {
                frame::GET_MODEL => self.send_model(socket)?,
                frame::OPEN => {
                    let opened = kind_of(&payload).and_then(|kind| match kind {
                        KIND_CUDA => self.open_cuda(socket, opener, &payload, opening).map(OpenSession::Cuda),
                        _ => self.open(socket, opener, &payload, opening).map(OpenSession::Host),
                    });
                    return match opened {
                        Ok(session) => Ok(Some(self.follow_to_the_end(socket, session))),
                        Err(reason) => {
                            self.refuse(socket, "open", &reason);
                            Ok(None)
                        }
                    };
                }
                other => {
                    let text = format!(
                        "a frame of kind {other} before a session was opened; expected OPEN or GET_MODEL"
                    );
                    self.refuse(socket, "protocol", &text);
                    return Ok(None);
                }
            }
        }
    }

    pub(super) fn send_model(&self, socket: &UnixStream) -> io::Result<()> {
        socket::send(socket, frame::MODEL, &self.description.encoded(&self.steps.model()))
    }

    /// Makes a session and hands it to the client, which `opening` counts until the session does.
    fn open(
        self: &Arc<Self>,
        socket: &UnixStream,
        opener: Opener,
        payload: &[u8],
        opening: Option<Opening>,
    ) -> Result<Arc<SessionState>, String> {
        let open: Open = socket::record(payload).map_err(|error| error.to_string())?;
        if open.kind != KIND_HOST {
            return Err(format!(
                "sessions of kind {} are not served, only kinds {KIND_HOST} (host memory) and {KIND_CUDA} (a GPU's memory)",
                open.kind
            ));
        }
        if open.reserved != 0 {
            return Err(format!(
                "OPEN ends with {}, expected 0 in this version of the protocol",
                open.reserved
            ));
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
        let charge = self.registry.charge(&self.config.limits, opener.user, layout.bytes)?;
        let (memory, rings) = SessionMemory::create(calls, rows_bytes).map_err(|error| error.to_string())?;
        let number = self.next_number()?;
        let spin_us = u32::try_from(self.config.spin.as_micros()).unwrap_or(u32::MAX);
        let hidden = u32::try_from(self.steps.model().hidden).unwrap_or(u32::MAX);
        let opened = memory.opened(number, spin_us, hidden);
        let writing = socket.try_clone().map_err(|error| error.to_string())?;
        let metrics = Arc::clone(&self.metrics);
        let held = self.registry.hold(memory.region(), charge);
        let session = SessionState::new(number, opener, memory, rings.completions, writing, metrics, held);
        self.registry.add(&self.config.limits, &OpenSession::Host(Arc::clone(&session)))?;
        drop(opening);
        let sent = socket::send(socket, frame::OPENED, bytemuck::bytes_of(&opened))
            .and_then(|()| socket::send_region(socket, session.memory().region()))
            .and_then(|()| socket.set_read_timeout(None));
        let (of_thread, steps) = (Arc::clone(&session), Arc::clone(&self.steps));
        let spin = Spin { waiting: self.config.spin, answered: self.config.spin_between_steps };
        let thread = std::thread::Builder::new().name(format!("session-{number}"));
        let started = sent.and_then(|()| {
            let connected = self.connected_again();
            thread.spawn(move || {
                let session = OpenSession::Host(Arc::clone(&of_thread));
                session.end_if_it_panics(|| of_thread.take_requests(rings.requests, &*steps, spin));
                drop(session);
                // The memory is released before the thread counts as ended.
                drop(of_thread);
                drop(connected);
            })
        });
        if let Err(error) = started {
            // The socket stays open for the refusal.
            session.begin_close();
            self.registry.remove(number);
            return Err(error.to_string());
        }
        self.steps.session_opened(OpenSession::Host(Arc::clone(&session)));
        counter!(names::SESSIONS_OPENED_TOTAL).increment(1);
        tracing::info!(
            session = number,
            user = opener.user,
            pid = opener.pid,
            bytes = opened.region_bytes,
            calls,
            "session opened"
        );
        Ok(session)
    }

    /// Reads the socket of an open session until the client ends it or the session ends otherwise.
    fn follow_to_the_end(&self, socket: &UnixStream, session: OpenSession) -> EndedSession {
        let (name, followed) = match &session {
            OpenSession::Host(_) => ("session", self.follow(socket)),
            OpenSession::Cuda(session) => ("CUDA session", self.follow_cuda(socket, session)),
        };
        let was_open = session.begin_close();
        // Before the client is told, which takes a while if it does not read.
        self.steps.session_ended(session.memory_id());
        let reason =
            followed.map(|reason| reason.unwrap_or_else(|| "the client has ended the session".to_owned()));
        if let Err(error) = &reason {
            tracing::debug!(session = session.number(), %error, "the socket of a session broke");
        }
        if was_open {
            session.finish_close(reason.as_deref().ok());
        }
        let status = session.status();
        let (calls, rows) = (status.calls_total, status.rows_total);
        tracing::info!(session = session.number(), calls, rows, "{name} ended");
        EndedSession { session, registry: Arc::clone(&self.registry) }
    }

    /// Answers frames of an open host session until the socket ends; returns why the service ends it.
    fn follow(&self, socket: &UnixStream) -> io::Result<Option<String>> {
        loop {
            match socket::receive(socket, MAX_CLIENT_FRAME) {
                Ok(Some((frame::GET_MODEL, _))) => self.send_model(socket)?,
                Ok(Some((kind, _))) => {
                    return Ok(Some(format!(
                        "a frame of kind {kind} on the socket of an open session; expected GET_MODEL"
                    )));
                }
                Ok(None) => return Ok(None),
                Err(error) => return Ok(Some(unreadable(&error))),
            }
        }
    }
}

/// What a client is told whose bytes are no frame.
pub(super) fn unreadable(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            format!("no whole frame has come within {OPENING_TIMEOUT:?}; expected OPEN or GET_MODEL")
        }
        ErrorKind::UnexpectedEof => "the socket ended within a frame".to_owned(),
        _ => error.to_string(),
    }
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
