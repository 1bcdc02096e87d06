//! The client of a session.

mod arena;
mod call;
mod calls;
pub(crate) mod error;
mod link;
mod opening;
mod parts;

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_shm::region::SharedSlice;

use self::arena::Arena;
pub use self::arena::Buffer;
pub use self::call::{Call, GivenRouting, Receipt};
use self::calls::{CallBuffers, CallTable};
pub use self::error::{SessionError, check_weights};
pub(crate) use self::link::Link;
pub(crate) use self::opening::Opening;
pub use self::parts::SessionParts;
use crate::socket;
use crate::wire::{CompletionRecord, MAX_SERVICE_FRAME, Opened, RequestRecord, frame};

/// How a session is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Size of the row area in bytes.
    pub rows_bytes: usize,
    /// Largest number of calls in flight.
    pub calls: u32,
    /// How long waiting threads spin before they sleep; `None` follows the service's advice.
    pub spin: Option<Duration>,
    /// How long opening may take.
    pub timeout: Duration,
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions { rows_bytes: 32 << 20, calls: 64, spin: None, timeout: Duration::from_secs(10) }
    }
}

/// A complete answer, with the buffers of its call.
#[derive(Debug)]
pub struct Answer {
    /// The rows of the call, unchanged.
    pub rows: Buffer,
    /// The output rows.
    pub output: Buffer,
    /// How the answer was computed.
    pub receipt: Receipt,
    /// Applied ids `[tokens, k]` int32 and weights `[tokens, k]` float32, if the call asked for them.
    pub routing: Option<(Vec<u8>, Vec<u8>)>,
}

/// A call in flight. Dropping it forgets the answer.
#[derive(Debug)]
pub struct PendingCall {
    shared: Arc<CallTable>,
    call: u64,
    is_waited: bool,
    /// Bytes of ids, if the call returns routing.
    returned: Option<usize>,
}

impl PendingCall {
    /// Waits for the answer, at most for `timeout`.
    ///
    /// # Errors
    /// The call's status, [`SessionError::TimedOut`], or [`SessionError::Ended`].
    pub fn wait(mut self, timeout: Duration) -> Result<Answer, SessionError> {
        self.wait_once(timeout)
    }

    /// Waits for the answer like [`wait`](Self::wait); `None` if there is none within `timeout`. The call stays in flight
    /// then and can be waited for again.
    ///
    /// # Errors
    /// The call's status, [`SessionError::Ended`], or [`SessionError::NoSuchCall`] after an answer or a status.
    pub fn try_wait(&mut self, timeout: Duration) -> Result<Option<Answer>, SessionError> {
        match self.wait_once(timeout) {
            Ok(answer) => Ok(Some(answer)),
            Err(SessionError::TimedOut { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn wait_once(&mut self, timeout: Duration) -> Result<Answer, SessionError> {
        let (buffers, record) = self.shared.wait(self.call, timeout)?;
        self.is_waited = true;
        if record.code != 0 {
            return Err(SessionError::of_call(&record));
        }
        let missing = || SessionError::Protocol("a completion of a call without buffers".to_owned());
        let CallBuffers { rows, output, routing, .. } = buffers.ok_or_else(missing)?;
        let routing = routing.as_ref().zip(self.returned).map(|(routing, bytes)| {
            let (ids, rest) = routing.as_slice().split_at(bytes);
            (ids.to_vec(), rest[rest.len() - bytes..].to_vec())
        });
        Ok(Answer { rows, output, receipt: Receipt::from(&record), routing })
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if !self.is_waited {
            self.shared.abandon(self.call);
        }
    }
}

/// An open session. Threads may share it; dropping it ends it. Buffers and answers keep their bytes afterwards. It belongs to the
/// process that opened it: in a fork every call of its methods that reaches the service fails with [`SessionError::OtherProcess`].
#[derive(Debug)]
pub struct Session {
    table: Arc<CallTable>,
    link: Arc<Link>,
    watcher: Option<JoinHandle<()>>,
    rows: SharedSlice<u8>,
    arena: Arc<Mutex<Arena>>,
    model: Vec<u8>,
    opened: Opened,
}

/// Asks the service at `address`, `unix:PATH`, for its model without opening a session: an encoded
/// `expertd.v1.GetModelResponse`, which comes within `timeout`.
///
/// # Errors
/// If the service cannot be reached, refuses this user, or sends no model.
pub fn fetch_model(address: &str, timeout: Duration) -> Result<Vec<u8>, SessionError> {
    let mut opening = Opening::connect(address, timeout)?;
    opening.send(frame::GET_MODEL, &[]);
    opening.expect(frame::MODEL, "MODEL")
}

impl Session {
    /// Opens a session on `address`, `unix:PATH`.
    ///
    /// # Errors
    /// If the service cannot be reached, refuses the session, or sends what is no session of this protocol.
    pub fn open(address: &str, options: &SessionOptions) -> Result<Session, SessionError> {
        let parts = SessionParts::begin(Opening::connect(address, options.timeout)?, options)?;
        Session::of(parts, address, options)
    }

    /// Opens a session over a connected socket, which errors call `name`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn over(socket: UnixStream, name: &str, options: &SessionOptions) -> Result<Session, SessionError> {
        Session::of(SessionParts::open(socket, name, options)?, name, options)
    }

    fn of(parts: SessionParts, name: &str, options: &SessionOptions) -> Result<Session, SessionError> {
        let SessionParts { opened, model, rows, requests, completions, service_bell, client_bell, socket } =
            parts;
        let spin = options.spin.unwrap_or(Duration::from_micros(opened.spin_us.into()));
        let bells = (service_bell, client_bell);
        let table = Arc::new(CallTable::new(requests, completions, bells, opened.calls, spin));
        let failed = |source| SessionError::Socket { address: name.to_owned(), source };
        let (watched, of_watcher) = (socket.try_clone().map_err(failed)?, Arc::clone(&table));
        let watcher = std::thread::Builder::new()
            .name("expertd-session".to_owned())
            .spawn(move || of_watcher.end(&watch(&watched)))
            .map_err(failed)?;
        Ok(Session {
            table,
            link: Arc::new(Link::new(socket)),
            watcher: Some(watcher),
            arena: Arc::new(Mutex::new(Arena::new(rows.len()))),
            rows,
            model,
            opened,
        })
    }

    /// The model when the session was opened: an encoded `expertd.v1.GetModelResponse`.
    #[must_use]
    pub fn model(&self) -> &[u8] {
        &self.model
    }

    /// Elements of a row.
    #[must_use]
    pub const fn hidden(&self) -> usize {
        self.opened.hidden as usize
    }

    /// Number of the session in the service's logs.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.opened.session
    }

    /// Largest number of calls in flight.
    #[must_use]
    pub const fn calls(&self) -> u32 {
        self.opened.calls
    }

    /// A buffer of `bytes` bytes in the row area. Its contents are undefined.
    ///
    /// # Errors
    /// [`SessionError::NoRoom`].
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, SessionError> {
        self.link.check_process()?;
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(range) = arena.take(bytes) else {
            return Err(SessionError::NoRoom { bytes, largest: arena.largest() });
        };
        drop(arena);
        let view = self.rows.part(range.start, bytes)?;
        Ok(Buffer { arena: Arc::clone(&self.arena), range, bytes: view, _link: Arc::clone(&self.link) })
    }

    /// Starts a call of `rows` (`[tokens, hidden]` in the call's dtype), whose answer is written to `output`, of the same
    /// size. Longer buffers are allowed; the call leaves what is behind its rows as it is.
    ///
    /// # Errors
    /// If a buffer is too small or of another session, ids, weights or token ids are too many or too few, the session has no room
    /// for them, too many calls are in flight, or it has ended. The buffers are dropped then.
    pub fn submit(&self, call: &Call<'_>, rows: Buffer, output: Buffer) -> Result<PendingCall, SessionError> {
        let needed = call.tokens.saturating_mul(self.hidden()).saturating_mul(call.dtype.size());
        for (what, buffer) in [("rows", &rows), ("output", &output)] {
            if !Arc::ptr_eq(&buffer.arena, &self.arena) {
                return Err(SessionError::ForeignBuffer { what });
            }
            let found = buffer.len();
            if found < needed {
                return Err(SessionError::BufferSize { what, found, needed });
            }
        }
        let mut record = RequestRecord {
            rows: rows.offset() as u64,
            output: output.offset() as u64,
            timeout_us: call
                .timeout
                .map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1)),
            layer: call.layer,
            tokens: u32::try_from(call.tokens).unwrap_or(u32::MAX),
            dtype: call.dtype as u32,
            ..RequestRecord::zeroed()
        };
        if !call.shared_experts {
            record.flags |= RequestRecord::EXCLUDE_SHARED;
        }
        if let Some(version) = call.expected_weight_version {
            record.flags |= RequestRecord::EXPECT_WEIGHT_VERSION;
            record.weight_version = version;
        }
        let mut returned = None;
        let mut routing = None;
        if let Some(k) = call.routing.map(|given| given.k).or(call.return_routing) {
            let bytes = call.tokens.saturating_mul(k).saturating_mul(4);
            let weights_at = bytes.next_multiple_of(crate::wire::ALIGN);
            let mut buffer = self.buffer(weights_at + bytes)?;
            if let Some(given) = call.routing {
                expect_bytes("routing.ids", size_of_val(given.ids), bytes)?;
                expect_bytes("routing.weights", size_of_val(given.weights), bytes)?;
                let to = buffer.as_mut_slice();
                to[..bytes].copy_from_slice(bytemuck::cast_slice(given.ids));
                to[weights_at..].copy_from_slice(bytemuck::cast_slice(given.weights));
                record.flags |= RequestRecord::GIVEN_ROUTING;
            }
            if call.return_routing.is_some() {
                record.flags |= RequestRecord::RETURN_ROUTING;
                returned = Some(bytes);
            }
            record.k = u32::try_from(k).unwrap_or(u32::MAX);
            record.ids = buffer.offset() as u64;
            record.weights = (buffer.offset() + weights_at) as u64;
            routing = Some(buffer);
        }
        let mut token_ids = None;
        if let Some(ids) = call.token_ids {
            expect_bytes("token_ids", size_of_val(ids), call.tokens.saturating_mul(4))?;
            let mut buffer = self.buffer(size_of_val(ids))?;
            buffer.as_mut_slice().copy_from_slice(bytemuck::cast_slice(ids));
            record.flags |= RequestRecord::TOKEN_IDS;
            record.token_ids = buffer.offset() as u64;
            token_ids = Some(buffer);
        }
        let buffers = CallBuffers { rows, output, routing, token_ids };
        let call = self.table.submit(record, Some(buffers))?;
        Ok(PendingCall { shared: Arc::clone(&self.table), call, is_waited: false, returned })
    }
}

impl Session {
    /// The whole row area, for callers that place rows themselves. Once the session and all its buffers are dropped, its bytes
    /// are zero.
    #[must_use]
    pub const fn rows(&self) -> &SharedSlice<u8> {
        &self.rows
    }

    /// Starts a call whose places the caller chooses; its number, which replaces `record.call`, names it to
    /// [`wait_places`](Self::wait_places).
    ///
    /// # Safety
    /// The places belong to no [`Buffer`], and no reference to what the service writes exists until the completion.
    ///
    /// # Errors
    /// If too many calls are in flight, or the session has ended.
    #[allow(unsafe_code, reason = "the caller vouches for the places")]
    pub unsafe fn submit_places(&self, record: RequestRecord) -> Result<u64, SessionError> {
        self.table.submit(record, None)
    }

    /// Waits for a call of [`submit_places`](Self::submit_places), at most for `timeout`; its completion, whatever the code.
    ///
    /// # Errors
    /// [`SessionError::TimedOut`], after which the call can be waited for again, [`SessionError::NoSuchCall`], or
    /// [`SessionError::Ended`].
    pub fn wait_places(&self, call: u64, timeout: Duration) -> Result<CompletionRecord, SessionError> {
        self.table.wait(call, timeout).map(|(_, record)| record)
    }

    /// Forgets a call of [`submit_places`](Self::submit_places), which no thread may wait for any more. Its places stay the service's
    /// until the session is dropped.
    pub fn forget_places(&self, call: u64) {
        self.table.abandon(call);
    }
}

fn expect_bytes(what: &'static str, found: usize, needed: usize) -> Result<(), SessionError> {
    if found != needed { Err(SessionError::BufferSize { what, found, needed }) } else { Ok(()) }
}

/// Reads the socket until the session ends; returns why.
fn watch(socket: &UnixStream) -> String {
    loop {
        match socket::receive(socket, MAX_SERVICE_FRAME) {
            Ok(Some((frame::ENDED | frame::REFUSED, text))) => {
                return String::from_utf8_lossy(&text).into_owned();
            }
            Ok(Some(_)) => {}
            Ok(None) => return "the service closed the session's socket".to_owned(),
            Err(error) => return format!("the session's socket broke: {error}"),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let watcher = self.watcher.take();
        if !self.link.is_own() {
            // The watcher does not exist in a fork.
            std::mem::forget(watcher);
            return;
        }
        self.table.close();
        if Arc::strong_count(&self.link) > 1 {
            // Buffers or answers still exist. The watcher ends with the service's answer, or when the last of them is dropped.
            self.link.end_session();
            return;
        }
        self.link.close();
        if let Some(watcher) = watcher {
            let _ = watcher.join();
        }
    }
}

#[cfg(test)]
mod tests;
