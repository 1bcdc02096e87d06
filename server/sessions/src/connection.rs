//! What the socket of a client carries: it opens a session, and its end is the session's end.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_core::steps::{ClientMemory as _, Steps};
use expertd_session::cuda::wire::MAX_PREPARE_FRAME;
use expertd_session::socket;
use expertd_session::wire::{MAX_CLIENT_FRAME, frame};
use rustix::event::{PollFd, PollFlags, poll};

use crate::open::OpenSession;
use crate::opening::open;
use crate::registry::SessionRegistry;
use crate::session::Opener;
use crate::shared::{Opening, Shared};

/// How long one write to a client's socket may take.
pub(crate) const SOCKET_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to open a session after it has connected.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// A session that has ended. It is listed, and its memory keeps its contents, until this is dropped.
pub(crate) struct EndedSession {
    session: OpenSession,
    registry: Arc<SessionRegistry>,
    steps: Arc<dyn Steps>,
}

impl EndedSession {
    /// Waits until the client no longer uses the session's memory. It may still read answers that came before the end, and its GPU
    /// may have registered the memory. The client's socket closes when it is done, and when it dies.
    pub(crate) fn wait_for_client(self, socket: UnixStream) {
        loop {
            // Only the end of both directions is reported; bytes that the client still sends are not read.
            match poll(&mut [PollFd::new(&socket, PollFlags::empty())], None) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!(session = self.session.number(), %error, "cannot wait for the end of a client");
                    break;
                }
            }
        }
        // Closed here while the session is charged; its release closes the last handle.
        drop(socket);
    }
}

impl Drop for EndedSession {
    fn drop(&mut self) {
        // Has no effect unless the thread of the socket panicked.
        self.session.close(Some(
            "the service's thread of this session panicked; open another session, and report this bug",
        ));
        self.steps.memory_ended(self.session.id());
        self.registry.remove(self.session.number());
    }
}

/// Starts the thread that serves a client's socket. `opening` counts the client.
pub(crate) fn serve_apart(shared: &Arc<Shared>, socket: UnixStream, opener: Opener, opening: Opening) {
    let connected = shared.connected_again();
    let (user, mut opening) = (opener.user, Some(opening));
    let thread = std::thread::Builder::new().name("session".to_owned());
    let started = thread.spawn(move || {
        let served = serve(connected.shared(), &socket, opener, &mut opening);
        // A client that keeps its socket does not delay the end of the service.
        drop(connected);
        match served {
            Ok(Some(ended)) => ended.wait_for_client(socket),
            Ok(None) => drop(socket),
            Err(error) => {
                tracing::debug!(user, %error, "the socket of a client broke");
                drop(socket);
            }
        }
        // A client counts until its socket is closed, which can take as long as it likes.
        drop(opening);
    });
    if let Err(error) = started {
        tracing::warn!(%error, "cannot start the thread of a session");
    }
}

/// Serves the connection of a user who may open sessions, until the connection or its session ends. `opening` counts the connection among
/// those without a session; it is taken and dropped once a session is open.
pub(crate) fn serve(
    shared: &Arc<Shared>,
    socket: &UnixStream,
    opener: Opener,
    opening: &mut Option<Opening>,
) -> io::Result<Option<EndedSession>> {
    let deadline = Instant::now() + OPENING_TIMEOUT;
    loop {
        let (kind, payload) = match socket::receive_until(socket, MAX_CLIENT_FRAME, deadline) {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(None),
            Err(error) => {
                shared.refuse(socket, "protocol", &unreadable(&error));
                return Err(error);
            }
        };
        match kind {
            frame::GET_MODEL => send_model(shared, socket)?,
            frame::OPEN => match open(shared, socket, opener, &payload, opening) {
                Ok(session) => return Ok(Some(follow_to_the_end(shared, socket, session))),
                Err(reason) => {
                    shared.refuse(socket, "open", &reason);
                    return Ok(None);
                }
            },
            other => {
                let text = format!(
                    "a frame of kind {other} before a session was opened; expected OPEN or GET_MODEL"
                );
                shared.refuse(socket, "protocol", &text);
                return Ok(None);
            }
        }
    }
}

fn send_model(shared: &Shared, socket: &UnixStream) -> io::Result<()> {
    socket::send(socket, frame::MODEL, &(shared.describe)(&shared.steps.model()))
}

/// Reads the socket of an open session until the client ends it or the session ends otherwise.
fn follow_to_the_end(shared: &Shared, socket: &UnixStream, session: OpenSession) -> EndedSession {
    let (registry, steps) = (Arc::clone(&shared.registry), Arc::clone(&shared.steps));
    // Ends the session also if this thread panics.
    let ended = EndedSession { session: session.clone(), registry, steps };
    let followed = follow(shared, socket, &session);
    let was_open = session.begin_close();
    // Before the client is told, which takes a while if it does not read.
    shared.steps.memory_ended(session.id());
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
    tracing::info!(session = session.number(), calls, rows, "{} ended", session.kind());
    ended
}

/// Answers frames of an open session until the socket ends; returns why the service ends it.
fn follow(shared: &Shared, socket: &UnixStream, session: &OpenSession) -> io::Result<Option<String>> {
    let (limit, expected) = match session {
        OpenSession::Host(_) => (MAX_CLIENT_FRAME, "GET_MODEL"),
        OpenSession::Cuda(_) => (MAX_PREPARE_FRAME, "PREPARE or GET_MODEL"),
    };
    loop {
        match (socket::receive(socket, limit), session) {
            (Ok(Some((frame::GET_MODEL, _))), _) => send_model(shared, socket)?,
            (Ok(Some((frame::PREPARE, payload))), OpenSession::Cuda(session)) => {
                socket::send(socket, frame::PREPARED, &session.prepare_frame(&payload, &*shared.steps))?;
            }
            (Ok(Some((kind, _))), _) => {
                let of = session.kind();
                return Ok(Some(format!(
                    "a frame of kind {kind} on the socket of an open {of}; expected {expected}"
                )));
            }
            (Ok(None), _) => return Ok(None),
            (Err(error), _) => return Ok(Some(unreadable(&error))),
        }
    }
}

/// The message for a client whose bytes are no frame.
fn unreadable(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            format!("no whole frame has come within {OPENING_TIMEOUT:?}; expected OPEN or GET_MODEL")
        }
        ErrorKind::UnexpectedEof => "the socket ended within a frame".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Mutex;

    use expertd_core::backend::{ModelInfo, Request, ServiceState};
    use expertd_core::steps::{Caller, ClientMemory};
    use expertd_ipc::control::DeviceKind;
    use expertd_types::MemoryId;

    use super::*;
    use crate::limits::SessionLimits;
    use crate::open::tests::open_session;

    /// A service that takes no call, and records the memories that have ended.
    pub(crate) struct Idle {
        device: DeviceKind,
        ended: Mutex<Vec<MemoryId>>,
    }

    impl Idle {
        pub(crate) fn with(device: DeviceKind) -> Arc<Idle> {
            Arc::new(Idle { device, ended: Mutex::default() })
        }
    }

    impl Steps for Idle {
        fn model(&self) -> Arc<ModelInfo> {
            panic!("not asked for")
        }

        fn device(&self) -> DeviceKind {
            self.device
        }

        fn state(&self) -> ServiceState {
            ServiceState::Serving
        }

        fn take_in(&self, _: Request, _: Box<dyn Caller>) {}

        fn memory_opened(&self, _: Box<dyn ClientMemory>) {}

        fn memory_ended(&self, memory: MemoryId) {
            self.ended.lock().unwrap().push(memory);
        }
    }

    #[test]
    fn a_panic_of_a_sockets_thread_ends_the_session_and_frees_its_place() {
        let limits = SessionLimits { sessions: 1, bytes: 1 << 20, mappings: 1, several_users: false };
        let (session, client) = open_session();
        let (registry, steps) = (Arc::<SessionRegistry>::default(), Idle::with(DeviceKind::Cpu));
        registry.add(&limits, &session).unwrap();
        let (of_thread, listed) = (session.clone(), Arc::clone(&registry));
        let told = Arc::clone(&steps) as Arc<dyn Steps>;
        let panicked = std::thread::spawn(move || {
            let _ended = EndedSession { session: of_thread, registry: listed, steps: told };
            panic!("planted");
        });
        assert!(panicked.join().is_err());
        assert!(session.session().is_closing() && registry.sessions().is_empty());
        assert_eq!(*steps.ended.lock().unwrap(), [session.id()]);
        assert_eq!(socket::receive(&client, 4096).unwrap().unwrap().0, frame::ENDED);
    }
}
