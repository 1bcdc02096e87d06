//! What the socket of a client carries: it opens a session, and its end is the session's end.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_session::socket;
use expertd_session::wire::{MAX_CLIENT_FRAME, frame};
use rustix::event::{PollFd, PollFlags, poll};

use super::Steps;
use super::listener::{Opening, Shared};
use super::open::OpenSession;
use super::registry::SessionRegistry;
use super::session::Opener;
use crate::steps::ClientMemory as _;

/// How long a client may take to open a session after it has connected.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// A session that has ended. It is listed, and its memory keeps its contents, until this is dropped.
pub(super) struct EndedSession {
    session: OpenSession,
    registry: Arc<SessionRegistry>,
    steps: Arc<dyn Steps>,
}

impl EndedSession {
    /// Waits until the client no longer uses the session's memory. It may still read answers that came before the end, and its GPU
    /// may have registered the memory. The client's socket closes when it is done, and when it dies.
    pub(super) fn wait_for_client(self, socket: UnixStream) {
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

impl Shared {
    /// Serves the connection of a user who may open sessions until its end, or that of its session. `opening` counts it until it has
    /// opened one, and is left as it is otherwise.
    pub(super) fn serve(
        self: &Arc<Self>,
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
                    self.refuse(socket, "protocol", &unreadable(&error));
                    return Err(error);
                }
            };
            match kind {
                frame::GET_MODEL => self.send_model(socket)?,
                frame::OPEN => {
                    return match self.open(socket, opener, &payload, opening) {
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

    /// Reads the socket of an open session until the client ends it or the session ends otherwise.
    fn follow_to_the_end(&self, socket: &UnixStream, session: OpenSession) -> EndedSession {
        let (registry, steps) = (Arc::clone(&self.registry), Arc::clone(&self.steps));
        // Ends the session also if this thread panics.
        let ended = EndedSession { session: session.clone(), registry, steps };
        let followed = match &session {
            OpenSession::Host(_) => self.follow(socket),
            OpenSession::Cuda(session) => self.follow_cuda(socket, session),
        };
        let was_open = session.begin_close();
        // Before the client is told, which takes a while if it does not read.
        self.steps.memory_ended(session.id());
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
        ErrorKind::InvalidData if error.to_string().contains("541676112") => {
            "an HTTP/2 (gRPC) client has connected to the session socket; use the address of --listen"
                .to_owned()
        }
        ErrorKind::UnexpectedEof => "the socket ended within a frame".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Mutex;

    use expertd_ipc::control::DeviceKind;
    use expertd_types::MemoryId;

    use super::*;
    use crate::backend::{ModelInfo, Request};
    use crate::sessions::open::tests::open_session;
    use crate::sessions::registry::SessionLimits;
    use crate::steps::{Caller, ClientMemory};

    /// Records the memories that have ended.
    #[derive(Default)]
    struct Ended(Mutex<Vec<MemoryId>>);

    impl Steps for Ended {
        fn model(&self) -> Arc<ModelInfo> {
            panic!("not asked for")
        }

        fn device(&self) -> DeviceKind {
            DeviceKind::Cpu
        }

        fn take_in(&self, _: Request, _: Box<dyn Caller>) {}

        fn memory_opened(&self, _: Box<dyn ClientMemory>) {}

        fn memory_ended(&self, memory: MemoryId) {
            self.0.lock().unwrap().push(memory);
        }
    }

    #[test]
    fn a_panic_of_a_sockets_thread_ends_the_session_and_frees_its_place() {
        let limits = SessionLimits { sessions: 1, bytes: 1 << 20, mappings: 1, several_users: false };
        let (session, client) = open_session();
        let (registry, steps) = (Arc::<SessionRegistry>::default(), Arc::<Ended>::default());
        registry.add(&limits, &session).unwrap();
        let (of_thread, listed) = (session.clone(), Arc::clone(&registry));
        let told = Arc::clone(&steps);
        let panicked = std::thread::spawn(move || {
            let _ended = EndedSession { session: of_thread, registry: listed, steps: told };
            panic!("planted");
        });
        assert!(panicked.join().is_err());
        assert!(session.session().is_closing() && registry.sessions().is_empty());
        assert_eq!(*steps.0.lock().unwrap(), [session.id()]);
        assert_eq!(socket::receive(&client, 4096).unwrap().unwrap().0, frame::ENDED);
    }
}
