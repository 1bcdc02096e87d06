//! A session of either kind, as the registry and the step loop hold it.

use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use expertd_ipc::control::MemoryKind;
use expertd_session::wire::frame;
use expertd_types::MemoryId;

use super::cuda::CudaState;
use super::registry::SessionStatus;
use super::session::{RowsTravel, SessionState};

/// A session.
#[derive(Clone, Debug)]
pub(crate) enum OpenSession {
    /// Rows lie in host memory.
    Host(Arc<SessionState>),
    /// Rows lie in the memory of the client's GPU.
    Cuda(Arc<CudaState>),
}

impl OpenSession {
    pub(crate) fn number(&self) -> u64 {
        match self {
            OpenSession::Host(session) => session.number(),
            OpenSession::Cuda(session) => session.number(),
        }
    }

    /// The number under which ranks attach the memory.
    pub(crate) fn memory_id(&self) -> MemoryId {
        match self {
            OpenSession::Host(session) => session.memory_id(),
            OpenSession::Cuda(session) => session.memory_id(),
        }
    }

    /// Whether calls need ranks that have attached the memory: the router cannot copy their rows.
    pub(crate) const fn needs_ranks(&self) -> bool {
        matches!(self, OpenSession::Cuda(_))
    }

    /// The memory as ranks receive it, with its descriptors.
    pub(crate) fn memory(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>) {
        match self {
            OpenSession::Host(session) => {
                let region = session.region();
                (MemoryKind::Host { bytes: region.len() as u64 }, vec![region.as_fd()])
            }
            OpenSession::Cuda(session) => session.memory(),
        }
    }

    /// Sets how rows travel from now on.
    pub(crate) fn set_rows_travel(&self, rows_travel: RowsTravel) {
        match self {
            OpenSession::Host(session) => session.set_rows_travel(rows_travel),
            OpenSession::Cuda(session) => session.set_rows_travel(rows_travel),
        }
    }

    /// The user of the client's process.
    pub(super) fn user(&self) -> u32 {
        self.status().user
    }

    pub(super) fn status(&self) -> SessionStatus {
        match self {
            OpenSession::Host(session) => session.status(),
            OpenSession::Cuda(session) => session.status(),
        }
    }

    /// Ends the session: no call enters any more, and calls in flight are cancelled. The client, if it still listens, is told
    /// `reason`.
    pub(super) fn close(&self, reason: Option<&str>) {
        if self.begin_close() {
            self.finish_close(reason);
        }
    }

    /// As [`close`](Self::close), for a thread that must not wait for the client.
    pub(crate) fn close_apart(&self, reason: String) {
        if !self.begin_close() {
            return;
        }
        let session = self.clone();
        let thread = std::thread::Builder::new().name("session-end".to_owned());
        if thread.spawn(move || session.finish_close(Some(&reason))).is_err() {
            self.finish_close(None);
        }
    }

    /// Runs what takes the session's calls. A panic ends the session, so that its client does not wait for answers that nothing
    /// computes.
    pub(super) fn end_if_it_panics(&self, take_calls: impl FnOnce()) {
        // What the panic leaves behind is closed here and not used otherwise.
        if catch_unwind(AssertUnwindSafe(take_calls)).is_err() {
            tracing::error!(session = self.number(), "the thread of a session panicked");
            self.close(Some(
                "the service's thread of this session panicked; open another session, and report this bug",
            ));
        }
    }

    /// Lets no call enter any more. Returns whether the session was open; then the caller [ends its socket](Self::finish_close).
    pub(super) fn begin_close(&self) -> bool {
        match self {
            OpenSession::Host(session) => session.begin_close(),
            OpenSession::Cuda(session) => session.begin_close(),
        }
    }

    pub(super) fn finish_close(&self, reason: Option<&str>) {
        match self {
            OpenSession::Host(session) => session.finish_close(reason),
            OpenSession::Cuda(session) => session.finish_close(reason),
        }
    }
}

/// Tells the client why its session ends, and reads no more of its socket.
pub(super) fn end_socket(socket: &UnixStream, reason: Option<&str>) {
    // The socket has a time limit for writes; a client that does not read gets no reason.
    let told = reason
        .is_some_and(|reason| expertd_session::socket::send(socket, frame::ENDED, reason.as_bytes()).is_ok());
    // A client that was told closes the socket when it needs the session's memory no longer.
    let _ = socket.shutdown(if told { Shutdown::Read } else { Shutdown::Both });
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use expertd_session::memory::SessionMemory;
    use expertd_session::socket;

    use super::*;
    use crate::backend::ClientKey;
    use crate::sessions::registry::{SessionLimits, SessionRegistry};
    use crate::sessions::session::Opener;
    use crate::telemetry::RequestMetrics;

    #[test]
    fn a_panic_of_a_sessions_thread_ends_the_session_with_a_reason() {
        let limits = SessionLimits { sessions: 1, bytes: 1 << 20, mappings: 1, several_users: false };
        let registry = SessionRegistry::default();
        let (memory, rings) = SessionMemory::create(2, 4096).unwrap();
        let charge = registry.charge(&limits, 0, memory.region().len()).unwrap();
        let held = registry.hold(memory.region(), charge);
        let (service, client) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let opener = Opener { user: 0, pid: 0, client: ClientKey(1) };
        let metrics = Arc::new(RequestMetrics::new("Session"));
        let state = SessionState::new(7, opener, memory, rings.completions, service, metrics, held);
        let session = OpenSession::Host(Arc::clone(&state));
        session.end_if_it_panics(|| {});
        assert!(!state.is_closing(), "a thread that ends as planned says nothing");
        session.end_if_it_panics(|| panic!("planted"));
        assert!(state.is_closing());
        let (kind, text) = socket::receive(&client, 4096).unwrap().unwrap();
        assert_eq!(kind, frame::ENDED);
        assert!(String::from_utf8(text).unwrap().contains("panicked; open another session"));
        assert!(socket::send(&client, frame::GET_MODEL, &[]).is_err(), "the service reads no more");
    }
}
