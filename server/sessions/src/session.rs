//! What the two kinds of sessions have in common: who opened one, whether ranks have attached its memory, counts, its end.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use expertd_core::backend::{
    Attachment, ClientKey, ConnectionKey, RequestId, SessionStatus, next_connection,
};
use expertd_core::validate::Envelope;
use expertd_session::wire::{CompletionRecord, frame};
use expertd_telemetry::{RequestMetrics, code_name};
use expertd_types::MemoryId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Interval at which an opening session checks whether its client still waits.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Who opened a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opener {
    pub(crate) user: u32,
    pub(crate) pid: u32,
    pub(crate) client: ClientKey,
}

/// The common part of a session.
#[derive(Debug)]
pub(crate) struct Session {
    number: u64,
    connection: ConnectionKey,
    opener: Opener,
    socket: Arc<UnixStream>,
    opened: Instant,
    /// Whether the client was told that the session is open.
    is_open: AtomicBool,
    is_closing: AtomicBool,
    attachment: Mutex<Attachment>,
    attachment_changed: Condvar,
    calls_total: AtomicU64,
    rows_total: AtomicU64,
    metrics: Arc<RequestMetrics>,
}

impl Session {
    pub(crate) fn new(number: u64, opener: Opener, socket: UnixStream, metrics: Arc<RequestMetrics>) -> Self {
        Session {
            number,
            connection: next_connection(),
            opener,
            socket: Arc::new(socket),
            opened: Instant::now(),
            is_open: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            attachment: Mutex::default(),
            attachment_changed: Condvar::new(),
            calls_total: AtomicU64::new(0),
            rows_total: AtomicU64::new(0),
            metrics,
        }
    }

    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    /// The client's socket.
    pub(crate) const fn socket(&self) -> &Arc<UnixStream> {
        &self.socket
    }

    pub(crate) const fn user(&self) -> u32 {
        self.opener.user
    }

    /// The number under which ranks attach the memory.
    pub(crate) const fn memory_id(&self) -> MemoryId {
        // Sessions are numbered from 1, and a session whose number exceeds 32 bits is not opened.
        MemoryId(self.number as u32)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    fn attachment(&self) -> MutexGuard<'_, Attachment> {
        self.attachment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what ranks have of the memory. Returns why the session must end: it is open, and a rank of a new generation refuses its memory.
    pub(crate) fn set_attachment(&self, attachment: Attachment) -> Option<String> {
        let mut own = self.attachment();
        *own = attachment;
        let reason = match &*own {
            Attachment::Refused(reason) if self.is_open.load(Ordering::Acquire) => {
                Some(format!("the ranks of a new generation cannot use the session's memory: {reason}"))
            }
            _ => None,
        };
        drop(own);
        self.attachment_changed.notify_all();
        reason
    }

    /// Waits until every rank has attached the memory, or the client no longer waits. The session counts as open then.
    ///
    /// # Errors
    /// Why the session is refused. `late` gives the cause if ranks have not answered in time for the client.
    pub(crate) fn wait_attached(&self, late: impl Fn() -> &'static str) -> Result<(), String> {
        let mut attachment = self.attachment();
        loop {
            match &*attachment {
                Attachment::Attached => break,
                Attachment::Refused(reason) => return Err(reason.clone()),
                Attachment::Awaited => {}
            }
            if self.is_closing() {
                return Err("the service ends".into());
            }
            // A client whose deadline has passed ends its half of the socket.
            let mut ends = [PollFd::new(&self.socket, PollFlags::RDHUP)];
            if !matches!(poll(&mut ends, Some(&Timespec::default())), Ok(0) | Err(Errno::INTR)) {
                return Err(format!("the ranks have not attached the memory in time: {}", late()));
            }
            let waited = self.attachment_changed.wait_timeout(attachment, LOOK_INTERVAL);
            attachment = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        // Under the lock, so that a refusal that follows ends the session.
        self.is_open.store(true, Ordering::Release);
        Ok(())
    }

    /// Notes that the session ends. Returns whether it was open until now.
    pub(crate) fn begin_close(&self) -> bool {
        self.attachment_changed.notify_all();
        !self.is_closing.swap(true, Ordering::AcqRel)
    }

    /// Tells the client why the session ends, and reads no more of its socket.
    pub(crate) fn end_socket(&self, reason: Option<&str>) {
        // The socket has a time limit for writes; a client that does not read gets no reason.
        let send = |text: &str| expertd_session::socket::send(&self.socket, frame::ENDED, text.as_bytes());
        let told = reason.is_some_and(|reason| send(reason).is_ok());
        // A client that was told closes the socket when it needs the session's memory no longer.
        let _ = self.socket.shutdown(if told { Shutdown::Read } else { Shutdown::Both });
    }

    /// The parts of a new call that its record does not hold. `timeout_us` is 0 for a call without a deadline.
    pub(crate) fn envelope(&self, began: Instant, timeout_us: u64) -> Envelope {
        let timeout = (timeout_us > 0).then(|| Duration::from_micros(timeout_us));
        let deadline = timeout.and_then(|timeout| began.checked_add(timeout));
        Envelope { id: RequestId::next(), client: self.opener.client, connection: self.connection, deadline }
    }

    /// Counts a call that was admitted.
    pub(crate) fn admitted(&self, tokens: usize) {
        self.metrics.admitted(tokens);
    }

    /// Counts a call that has ended, before its client learns of it.
    pub(crate) fn ended(&self, record: &CompletionRecord, tokens: usize) {
        self.calls_total.fetch_add(1, Ordering::Relaxed);
        if record.code == 0 {
            self.rows_total.fetch_add(tokens as u64, Ordering::Relaxed);
        }
    }

    /// Records the metrics of a call that has ended. The client does not wait for it.
    pub(crate) fn record(&self, record: &CompletionRecord, elapsed: Duration) {
        self.metrics.answered(code_name(record.code), elapsed);
    }

    /// The session as operators see it. `device` is the UUID of the client's GPU.
    pub(crate) fn status(&self, bytes: u64, calls_in_flight: u64, device: Option<[u8; 16]>) -> SessionStatus {
        SessionStatus {
            session: self.number,
            user: self.opener.user,
            pid: self.opener.pid,
            age: self.opened.elapsed(),
            bytes,
            calls_total: self.calls_total.load(Ordering::Relaxed),
            rows_total: self.rows_total.load(Ordering::Relaxed),
            calls_in_flight,
            attachment: self.attachment().clone(),
            device,
        }
    }
}
