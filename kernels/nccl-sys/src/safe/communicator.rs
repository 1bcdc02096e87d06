//! The id of a group, and a rank's membership in the group.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Library, record};
use crate::result::Error;
use crate::sys::{self, Code, Comm, Config, RawUniqueId, WindowHandle};

/// Interval at which a non-blocking call's state is polled.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The id of a communicator: made by one rank and sent to all others.
#[derive(Clone, Copy)]
pub struct UniqueId(RawUniqueId);

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl UniqueId {
    /// Makes a new id, which opens a listening socket in this process.
    ///
    /// # Errors
    /// If NCCL finds no usable network interface (loopback suffices).
    pub fn create(library: &Arc<Library>) -> Result<UniqueId, Error> {
        let mut raw = RawUniqueId { internal: [0; sys::UNIQUE_ID_BYTES] };
        // SAFETY: `raw` is valid for writes.
        let code = unsafe { (library.functions.get_unique_id)(&raw mut raw) };
        library.check("ncclGetUniqueId", code, ptr::null_mut())?;
        Ok(UniqueId(raw))
    }

    /// Bytes of the id, for the other ranks.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; sys::UNIQUE_ID_BYTES] {
        self.0.internal.map(|byte| byte.to_ne_bytes()[0])
    }

    /// Makes an id from the bytes that another rank sent.
    ///
    /// # Errors
    /// If all bytes are zero: NCCL would wait for ever on an id that was never written.
    pub fn from_bytes(bytes: &[u8; sys::UNIQUE_ID_BYTES]) -> Result<UniqueId, Error> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Err(Error::Argument(
                "the NCCL id is all zeros: the rank that makes it has failed or has not sent it".into(),
            ));
        }
        Ok(UniqueId(RawUniqueId { internal: bytes.map(|byte| std::ffi::c_char::from_ne_bytes([byte])) }))
    }
}

/// One rank's membership in a group. The communicator is non-blocking, so that every wait has a deadline. Dropping it aborts
/// the communicator, which does not wait for peers; [`Communicator::finish`] leaves the group in order.
pub struct Communicator {
    pub(super) library: Arc<Library>,
    pub(super) raw: Comm,
    ranks: u32,
    rank: u32,
}

// SAFETY: NCCL allows calls on a communicator from any thread, one at a time. The type is not `Sync`, so only the thread
// that owns it calls NCCL.
unsafe impl Send for Communicator {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator").field("rank", &self.rank).field("ranks", &self.ranks).finish()
    }
}

impl Communicator {
    /// Joins the group of `ranks` members as `rank`, with the CUDA device that is current on this thread. Returns when
    /// all members have joined.
    ///
    /// # Errors
    /// NCCL's errors, and [`Error::Deadline`] if other members do not join in time.
    pub fn join(
        library: &Arc<Library>,
        id: &UniqueId,
        ranks: u32,
        rank: u32,
        deadline: Duration,
    ) -> Result<Communicator, Error> {
        let (Ok(count), Ok(mine)) = (c_int::try_from(ranks), c_int::try_from(rank)) else {
            return Err(Error::Argument(format!("rank {rank} of {ranks} does not fit a C int")));
        };
        if rank >= ranks {
            return Err(Error::Argument(format!(
                "rank is {rank}, expected less than {ranks}, the group's size"
            )));
        }
        let mut config = Config::new();
        config.blocking = 0;
        let mut communicator =
            Communicator { library: Arc::clone(library), raw: ptr::null_mut(), ranks, rank };
        // SAFETY: all pointers are valid during the call, and NCCL copies the config.
        let code = unsafe {
            (library.functions.comm_init)(&raw mut communicator.raw, count, id.0, mine, &raw mut config)
        };
        communicator.settle("ncclCommInitRankConfig", code, deadline)?;
        Ok(communicator)
    }

    /// Number of members.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Rank of this member.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Checks NCCL's asynchronous state.
    ///
    /// # Errors
    /// The asynchronous error.
    pub fn health(&self) -> Result<(), Error> {
        match self.state()? {
            sys::IN_PROGRESS => Ok(()),
            code => self.library.check("ncclCommGetAsyncError", code, self.raw),
        }
    }

    fn state(&self) -> Result<Code, Error> {
        let mut state = sys::SUCCESS;
        // SAFETY: the communicator exists (checked by callers or by `join`), and `state` is valid for writes.
        let code = unsafe { (self.library.functions.async_error)(self.raw, &raw mut state) };
        self.library.check("ncclCommGetAsyncError", code, self.raw)?;
        Ok(state)
    }

    /// Waits until a non-blocking call ends.
    fn settle(&self, call: &'static str, code: Code, deadline: Duration) -> Result<(), Error> {
        let start = Instant::now();
        let mut state = code;
        while state == sys::IN_PROGRESS {
            if start.elapsed() > deadline {
                return Err(Error::Deadline { call, waited: deadline });
            }
            thread::sleep(POLL_INTERVAL);
            state = self.state()?;
        }
        self.library.check(call, state, self.raw)
    }

    /// Waits for a window. The state alone is not sufficient: NCCL 2.28 reports success while a registration still runs in
    /// the background, so this also waits until the handle is written.
    pub(super) fn await_window(
        &self,
        code: Code,
        handle: &WindowHandle,
        deadline: Duration,
    ) -> Result<(), Error> {
        let start = Instant::now();
        if code != sys::IN_PROGRESS {
            self.library.check("ncclCommWindowRegister", code, self.raw)?;
        }
        loop {
            let state = self.state()?;
            // SAFETY: the handle is valid memory, which a thread of the library writes.
            let written = unsafe { ptr::read_volatile(handle) };
            if state != sys::IN_PROGRESS {
                self.library.check("ncclCommWindowRegister", state, self.raw)?;
                if !written.is_null() {
                    return Ok(());
                }
            }
            if start.elapsed() > deadline {
                return Err(if state == sys::IN_PROGRESS {
                    Error::Deadline { call: "ncclCommWindowRegister", waited: deadline }
                } else {
                    Error::NullWindow { waited: deadline }
                });
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Leaves the group in order: waits until all members finish, then destroys the communicator.
    ///
    /// # Errors
    /// NCCL's errors, and [`Error::Deadline`] if peers do not finish in time. The communicator is then aborted.
    pub fn finish(mut self, deadline: Duration) -> Result<(), Error> {
        // SAFETY: the communicator lives until its handle is cleared below.
        let code = unsafe { (self.library.functions.comm_finalize)(self.raw) };
        self.settle("ncclCommFinalize", code, deadline)?;
        let raw = std::mem::replace(&mut self.raw, ptr::null_mut());
        // SAFETY: the communicator is finalised and is not used again.
        let code = unsafe { (self.library.functions.comm_destroy)(raw) };
        self.library.check("ncclCommDestroy", code, ptr::null_mut())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the communicator is alive, and its handle is not used again.
            let code = unsafe { (self.library.functions.comm_abort)(self.raw) };
            if code != sys::IN_PROGRESS {
                record(self.library.check("ncclCommAbort", code, ptr::null_mut()));
            }
        }
    }
}
