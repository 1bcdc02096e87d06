//! A session of either kind, as the registry and the step loop hold it.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use expertd_core::backend::{Attachment, SessionStatus};
use expertd_core::steps::ClientMemory;
use expertd_ipc::control::MemoryKind;
use expertd_types::MemoryId;

use crate::cuda::CudaSession;
use crate::host::HostSession;
use crate::session::Session;

/// A session.
#[derive(Clone, Debug)]
pub(crate) enum OpenSession {
    /// Rows lie in host memory.
    Host(Arc<HostSession>),
    /// Rows lie in the memory of the client's GPU.
    Cuda(Arc<CudaSession>),
}

impl ClientMemory for OpenSession {
    fn id(&self) -> MemoryId {
        self.session().memory_id()
    }

    fn parts(&self) -> (MemoryKind, Vec<BorrowedFd<'_>>) {
        match self {
            OpenSession::Host(session) => session.parts(),
            OpenSession::Cuda(session) => session.parts(),
        }
    }

    fn set_attachment(&self, attachment: Attachment) {
        if let Some(reason) = self.session().set_attachment(attachment) {
            self.end(reason);
        }
    }

    fn end(&self, reason: String) {
        if !self.begin_close() {
            return;
        }
        let session = self.clone();
        let thread = std::thread::Builder::new().name("session-end".to_owned());
        if thread.spawn(move || session.finish_close(Some(&reason))).is_err() {
            self.finish_close(None);
        }
    }
}

impl OpenSession {
    /// The common part of both kinds.
    pub(crate) fn session(&self) -> &Session {
        match self {
            OpenSession::Host(session) => &session.session,
            OpenSession::Cuda(session) => &session.session,
        }
    }

    pub(crate) fn number(&self) -> u64 {
        self.session().number()
    }

    /// The name of its kind in logs.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            OpenSession::Host(_) => "session",
            OpenSession::Cuda(_) => "CUDA session",
        }
    }

    pub(crate) fn status(&self) -> SessionStatus {
        match self {
            OpenSession::Host(session) => session.status(),
            OpenSession::Cuda(session) => session.status(),
        }
    }

    /// Ends the session: no call enters any more, and calls in flight are cancelled. The client, if it still listens, is told
    /// `reason`.
    pub(crate) fn close(&self, reason: Option<&str>) {
        if self.begin_close() {
            self.finish_close(reason);
        }
    }

    /// Runs what takes the session's calls. A panic ends the session, so that its client does not wait for answers that nothing
    /// computes.
    pub(crate) fn end_if_it_panics(&self, take_calls: impl FnOnce()) {
        // What the panic leaves behind is closed here and not used otherwise.
        if catch_unwind(AssertUnwindSafe(take_calls)).is_err() {
            tracing::error!(session = self.number(), "the thread of a session panicked");
            self.close(Some(
                "the service's thread of this session panicked; open another session, and report this bug",
            ));
        }
    }

    /// Lets no call enter any more. Returns whether the session was open; then the caller [ends its socket](Self::finish_close).
    pub(crate) fn begin_close(&self) -> bool {
        match self {
            OpenSession::Host(session) => session.begin_close(),
            OpenSession::Cuda(session) => session.begin_close(),
        }
    }

    pub(crate) fn finish_close(&self, reason: Option<&str>) {
        match self {
            OpenSession::Host(session) => session.finish_close(reason),
            OpenSession::Cuda(session) => session.session.end_socket(reason),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use std::time::Duration;

    use expertd_session::memory::SessionMemory;
    use expertd_session::socket;

    use std::os::unix::net::UnixStream;

    use expertd_session::wire::frame;

    use super::*;
    use expertd_core::backend::ClientKey;
    use expertd_telemetry::RequestMetrics;

    use crate::limits::{RegionCharges, SessionLimits};
    use crate::release::HeldRegion;
    use crate::session::Opener;

    /// An open session and its client's socket.
    pub(crate) fn open_session() -> (OpenSession, UnixStream) {
        let limits = SessionLimits { sessions: 1, bytes: 1 << 20, mappings: 1, several_users: false };
        let (memory, rings) = SessionMemory::create(2, 4096).unwrap();
        let charge = RegionCharges::default().charge(&limits, 0, memory.region().len()).unwrap();
        let held = HeldRegion::new(memory.region(), None, charge);
        let (service, client) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let opener = Opener { user: 0, pid: 0, client: ClientKey(1) };
        let metrics = Arc::new(RequestMetrics::new("Session"));
        let common = Session::new(7, opener, service, metrics);
        (OpenSession::Host(HostSession::new(common, memory, rings.completions, held)), client)
    }

    #[test]
    fn a_session_is_opened_as_long_as_its_client_waits() {
        let (session, client) = open_session();
        let opened = {
            let session = session.clone();
            std::thread::spawn(move || session.session().wait_attached(|| "it is late"))
        };
        std::thread::sleep(Duration::from_millis(200));
        assert!(!opened.is_finished(), "the client waits");
        assert_eq!(session.session().set_attachment(Attachment::Attached), None);
        assert_eq!(opened.join().unwrap(), Ok(()));

        let (session, other) = open_session();
        other.shutdown(std::net::Shutdown::Write).unwrap();
        let refused = session.session().wait_attached(|| "it is late").unwrap_err();
        assert!(refused.ends_with("in time: it is late"), "{refused}");
        drop(client);
    }

    #[test]
    fn a_panic_of_a_sessions_thread_ends_the_session_with_a_reason() {
        let (session, client) = open_session();
        session.end_if_it_panics(|| {});
        assert!(!session.session().is_closing(), "a thread that ends as planned says nothing");
        session.end_if_it_panics(|| panic!("planted"));
        assert!(session.session().is_closing());
        let (kind, text) = socket::receive(&client, 4096).unwrap().unwrap();
        assert_eq!(kind, frame::ENDED);
        assert!(String::from_utf8(text).unwrap().contains("panicked; open another session"));
        assert!(socket::send(&client, frame::GET_MODEL, &[]).is_err(), "the service reads no more");
    }
}
