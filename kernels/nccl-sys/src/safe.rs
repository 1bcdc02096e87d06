//! Owners of what NCCL hands out. Drops never panic and never wait for peers; what goes wrong in them is recorded.
#![allow(unsafe_code, reason = "calls C functions through resolved pointers")]

use std::env;
use std::ffi::{CStr, OsString, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::result::{Error, Version};
use crate::sys::{self, Code, Comm, Config, Functions, RawUniqueId, WindowHandle, WindowTable};

/// Environment variable with the path of the library.
pub const LIBRARY_VARIABLE: &str = "EXPERTD_NCCL";
const DEFAULT_LIBRARY: &str = "libnccl.so.2";
const POLL: Duration = Duration::from_micros(200);

static DROP_ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Takes the errors that destructors met since the last call; they have nobody to return them to.
#[must_use]
pub fn take_drop_errors() -> Vec<String> {
    DROP_ERRORS.lock().map(|mut errors| std::mem::take(&mut *errors)).unwrap_or_default()
}

fn record(outcome: Result<(), Error>) {
    if let Err(error) = outcome
        && let Ok(mut errors) = DROP_ERRORS.lock()
        // A bound, in case nobody ever asks.
        && errors.len() < 64
    {
        errors.push(error.to_string());
    }
}

/// An opened NCCL library of a version that is new enough.
pub struct Library {
    functions: Functions,
    version: Version,
    origin: String,
    // Kept last: the functions above are code of this library.
    _library: libloading::Library,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("origin", &self.origin).field("version", &self.version).finish()
    }
}

impl Library {
    /// Opens `path`, else what `EXPERTD_NCCL` names, else `libnccl.so.2` wherever the loader finds it. A place that was
    /// named is the only one that is tried.
    ///
    /// # Errors
    /// When it cannot be opened, lacks a function or is older than [`Version::OLDEST`].
    pub fn open(path: Option<&Path>) -> Result<Arc<Library>, Error> {
        let named = env::var_os(LIBRARY_VARIABLE).filter(|value| !value.is_empty());
        let (name, source): (OsString, &str) = match (path, named) {
            (Some(path), _) => (path.into(), "as configured"),
            (None, Some(named)) => (named, "from EXPERTD_NCCL"),
            (None, None) => (DEFAULT_LIBRARY.into(), "the loader's search path"),
        };
        let tried = format!("{} ({source})", name.to_string_lossy());
        // SAFETY: loading runs the library's initialisers; NCCL's have no requirements.
        let library = unsafe { libloading::Library::new(&name) }
            .map_err(|e| Error::Open { tried: tried.clone(), why: e.to_string() })?;
        // The version comes first, so that an old library is called old and not incomplete.
        let version = {
            // SAFETY: declared so in nccl.h since its first version.
            let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> Code>(b"ncclGetVersion") }
                .map_err(|_| Error::Symbol { tried: tried.clone(), symbol: "ncclGetVersion" })?;
            let mut code: c_int = 0;
            // SAFETY: `code` is a valid place for the answer.
            let status = unsafe { get(&raw mut code) };
            if status != sys::SUCCESS || code <= 0 {
                return Err(Error::Argument(format!(
                    "{tried}: ncclGetVersion returned {status}, version {code}"
                )));
            }
            Version::from_code(code.unsigned_abs())
        };
        if version < Version::OLDEST {
            return Err(Error::TooOld { tried, found: version });
        }
        // SAFETY: it answered as NCCL does; the functions live in the same struct as the library.
        let functions = unsafe { Functions::resolve(&library) }
            .map_err(|symbol| Error::Symbol { tried: tried.clone(), symbol })?;
        Ok(Arc::new(Library { functions, version, origin: tried, _library: library }))
    }

    /// The library's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// What was opened and who named it.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Whether `ncclGetLsaDevicePointer` is there; older libraries' window tables are read instead.
    #[must_use]
    pub fn has_lsa_pointer(&self) -> bool {
        self.functions.lsa_pointer.is_some()
    }

    fn check(&self, call: &'static str, code: Code, comm: Comm) -> Result<(), Error> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        // SAFETY: both return static or communicator-owned strings; a null communicator is allowed.
        let (text, last) = unsafe {
            (string((self.functions.error_string)(code)), string((self.functions.last_error)(comm)))
        };
        Err(Error::Call { call, code, text, last })
    }
}

/// # Safety
/// `text` is null or a C string.
unsafe fn string(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The rendezvous of one communicator: made by one rank, given to all.
#[derive(Clone, Copy)]
pub struct UniqueId(RawUniqueId);

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl UniqueId {
    /// Asks the library for a new one; opens a listening socket in this process.
    ///
    /// # Errors
    /// When NCCL finds no usable network interface (loopback suffices).
    pub fn create(library: &Arc<Library>) -> Result<UniqueId, Error> {
        let mut raw = RawUniqueId { internal: [0; sys::UNIQUE_ID_BYTES] };
        // SAFETY: `raw` is a valid place for the answer.
        let code = unsafe { (library.functions.get_unique_id)(&raw mut raw) };
        library.check("ncclGetUniqueId", code, ptr::null_mut())?;
        Ok(UniqueId(raw))
    }

    /// Its bytes, for the other ranks.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; sys::UNIQUE_ID_BYTES] {
        self.0.internal.map(|byte| byte.to_ne_bytes()[0])
    }

    /// The inverse of [`UniqueId::to_bytes`].
    ///
    /// # Errors
    /// When all bytes are zero: NCCL would wait for ever on an id that nobody wrote.
    pub fn from_bytes(bytes: &[u8; sys::UNIQUE_ID_BYTES]) -> Result<UniqueId, Error> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Err(Error::Argument(
                "the NCCL id is all zeros: the rank that makes it failed or never sent it".into(),
            ));
        }
        Ok(UniqueId(RawUniqueId { internal: bytes.map(|byte| std::ffi::c_char::from_ne_bytes([byte])) }))
    }
}

/// One rank's membership in a group. Non-blocking: every wait has a deadline. Dropping it aborts, which does not wait
/// for peers; [`Communicator::finish`] is the orderly way out.
pub struct Communicator {
    library: Arc<Library>,
    raw: Comm,
    ranks: u32,
    rank: u32,
}

// SAFETY: NCCL allows calls on a communicator from any one thread at a time, and the methods that change it take the
// lock of their owner: registration and finishing are `&mut` or consume it; the rest reads fields.
unsafe impl Send for Communicator {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator").field("rank", &self.rank).field("ranks", &self.ranks).finish()
    }
}

impl Communicator {
    /// Joins the group of `ranks` members as `rank`, with the CUDA device that is current on this thread. Returns when
    /// all have joined.
    ///
    /// # Errors
    /// On NCCL's errors and when the others do not come before the deadline.
    pub fn join(
        library: &Arc<Library>,
        id: &UniqueId,
        ranks: u32,
        rank: u32,
        deadline: Duration,
    ) -> Result<Communicator, Error> {
        let (Ok(count), Ok(mine)) = (c_int::try_from(ranks), c_int::try_from(rank)) else {
            return Err(Error::Argument(format!("rank {rank} of {ranks} is out of range")));
        };
        if rank >= ranks {
            return Err(Error::Argument(format!("rank {rank} does not exist in a group of {ranks}")));
        }
        let mut config = Config::new();
        config.blocking = 0;
        let mut communicator =
            Communicator { library: Arc::clone(library), raw: ptr::null_mut(), ranks, rank };
        // SAFETY: all pointers are valid during the call; NCCL copies the config.
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

    /// This member.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The error that NCCL met in the background, if any.
    ///
    /// # Errors
    /// That error.
    pub fn health(&self) -> Result<(), Error> {
        match self.state()? {
            sys::IN_PROGRESS => Ok(()),
            code => self.library.check("ncclCommGetAsyncError", code, self.raw),
        }
    }

    fn state(&self) -> Result<Code, Error> {
        let mut state = sys::SUCCESS;
        // SAFETY: the communicator exists (checked by callers or by `join`), `state` is a valid place.
        let code = unsafe { (self.library.functions.async_error)(self.raw, &raw mut state) };
        self.library.check("ncclCommGetAsyncError", code, self.raw)?;
        Ok(state)
    }

    /// Waits for a non-blocking call to end.
    fn settle(&self, call: &'static str, code: Code, deadline: Duration) -> Result<(), Error> {
        let start = Instant::now();
        let mut state = code;
        while state == sys::IN_PROGRESS {
            if start.elapsed() > deadline {
                return Err(Error::Deadline { call, waited: deadline });
            }
            thread::sleep(POLL);
            state = self.state()?;
        }
        self.library.check(call, state, self.raw)
    }

    /// Waits for a window. The state alone does not tell: NCCL 2.28 reports success while a registration still runs in
    /// the background, so the handle itself has to appear.
    fn await_window(&self, code: Code, handle: &WindowHandle, deadline: Duration) -> Result<(), Error> {
        let start = Instant::now();
        if code != sys::IN_PROGRESS {
            self.library.check("ncclCommWindowRegister", code, self.raw)?;
        }
        loop {
            let state = self.state()?;
            // SAFETY: valid memory that the library writes from a thread of its own.
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
            thread::sleep(POLL);
        }
    }

    /// Leaves in order: waits until all members finish, then frees everything.
    ///
    /// # Errors
    /// On NCCL's errors and when peers do not finish before the deadline; the communicator is aborted then.
    pub fn finish(mut self, deadline: Duration) -> Result<(), Error> {
        // SAFETY: the communicator is alive until its handle is cleared below.
        let code = unsafe { (self.library.functions.comm_finalize)(self.raw) };
        self.settle("ncclCommFinalize", code, deadline)?;
        let raw = std::mem::replace(&mut self.raw, ptr::null_mut());
        // SAFETY: finalised, and never used again.
        let code = unsafe { (self.library.functions.comm_destroy)(raw) };
        self.library.check("ncclCommDestroy", code, ptr::null_mut())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: still alive; the handle is not used again.
            let code = unsafe { (self.library.functions.comm_abort)(self.raw) };
            if code != sys::IN_PROGRESS {
                record(self.library.check("ncclCommAbort", code, ptr::null_mut()));
            }
        }
    }
}

/// Device memory that can become a window (`ncclMemAlloc`). Needs a current CUDA context.
pub struct SymmetricMemory {
    library: Arc<Library>,
    address: *mut c_void,
    bytes: usize,
}

// SAFETY: an address of device memory; the host never dereferences it.
unsafe impl Send for SymmetricMemory {}

impl std::fmt::Debug for SymmetricMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SymmetricMemory").field("address", &self.address).field("bytes", &self.bytes).finish()
    }
}

impl SymmetricMemory {
    /// Allocates at least `bytes`, rounded up to the alignment of windows. The contents are not initialised.
    ///
    /// # Errors
    /// When NCCL cannot allocate.
    pub fn allocate(library: &Arc<Library>, bytes: usize) -> Result<SymmetricMemory, Error> {
        if bytes == 0 {
            return Err(Error::Argument("a window of 0 bytes was asked for".into()));
        }
        let bytes = bytes.next_multiple_of(sys::WINDOW_ALIGNMENT);
        let mut address = ptr::null_mut();
        // SAFETY: `address` is a valid place for the answer.
        let code = unsafe { (library.functions.mem_alloc)(&raw mut address, bytes) };
        library.check("ncclMemAlloc", code, ptr::null_mut())?;
        Ok(SymmetricMemory { library: Arc::clone(library), address, bytes })
    }

    /// Device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for SymmetricMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `ncclMemAlloc`, freed once.
        let code = unsafe { (self.library.functions.mem_free)(self.address) };
        record(self.library.check("ncclMemFree", code, ptr::null_mut()));
    }
}

/// Memory that every member of a group registered, with the addresses of all copies. It owns what it needs; the order
/// of its fields is the order of destruction: window, communicator, memory.
pub struct Window {
    registration: Registration,
    communicator: Communicator,
    memory: SymmetricMemory,
    peers: Vec<u64>,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("memory", &self.memory).field("peers", &self.peers).finish()
    }
}

/// The handle, boxed because a non-blocking registration writes it after the call returned.
struct Registration {
    library: Arc<Library>,
    comm: Comm,
    handle: Box<WindowHandle>,
}

// SAFETY: handles, used under the same rules as the communicator's.
unsafe impl Send for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: registered with this communicator, which is dropped after this.
            let code = unsafe { (self.library.functions.window_deregister)(self.comm, *self.handle) };
            if code != sys::IN_PROGRESS {
                record(self.library.check("ncclCommWindowDeregister", code, self.comm));
            }
        }
    }
}

impl Window {
    /// Registers `memory` together with all peers (each with the same size) and resolves their addresses.
    /// `read_device` copies bytes from device memory at an address; it serves libraries before 2.29.
    ///
    /// # Errors
    /// On NCCL's errors, when peers do not register before the deadline, and when the result is no usable window.
    pub fn register(
        communicator: Communicator,
        memory: SymmetricMemory,
        deadline: Duration,
        read_device: impl FnOnce(u64, &mut [u8]) -> Result<(), String>,
    ) -> Result<Window, Error> {
        let library = Arc::clone(&communicator.library);
        let mut registration = Registration {
            library: Arc::clone(&library),
            comm: communicator.raw,
            handle: Box::new(ptr::null_mut()),
        };
        // SAFETY: the memory is NCCL's own; the boxed handle stays in place until the call settles or, after a missed
        // deadline, for ever (it is leaked below).
        let code = unsafe {
            (library.functions.window_register)(
                communicator.raw,
                memory.address,
                memory.bytes,
                &raw mut *registration.handle,
                sys::WINDOW_SYMMETRIC,
            )
        };
        if let Err(error) = communicator.await_window(code, &registration.handle, deadline) {
            // The registration may go on in the background, where it writes the handle and uses memory and
            // communicator: none of them may go away. The rank ends after this error, so nothing is lost.
            std::mem::forget(registration);
            std::mem::forget(memory);
            std::mem::forget(communicator);
            return Err(error);
        }
        let mut window = Window { registration, communicator, memory, peers: Vec::new() };
        window.peers = window.resolve(read_device)?;
        Ok(window)
    }

    fn resolve(
        &self,
        read_device: impl FnOnce(u64, &mut [u8]) -> Result<(), String>,
    ) -> Result<Vec<u64>, Error> {
        let handle = *self.registration.handle;
        let ranks = self.communicator.ranks;
        let peers: Vec<u64> = if let Some(lsa_pointer) = self.registration.library.functions.lsa_pointer {
            (0..ranks)
                .map(|peer| {
                    let mut address = ptr::null_mut();
                    let index = c_int::try_from(peer).unwrap_or(c_int::MAX);
                    // SAFETY: a live window; NCCL checks the index.
                    let code = unsafe { lsa_pointer(handle, 0, index, &raw mut address) };
                    self.registration.library.check(
                        "ncclGetLsaDevicePointer",
                        code,
                        self.communicator.raw,
                    )?;
                    Ok(address as u64)
                })
                .collect::<Result<_, Error>>()?
        } else {
            let mut bytes = [0_u8; WindowTable::BYTES];
            read_device(handle as u64, &mut bytes)
                .map_err(|why| Error::BadWindow(format!("its table cannot be read: {why}")))?;
            let table = WindowTable::decode(&bytes);
            if table.lsa_rank != self.communicator.rank || table.world_rank != self.communicator.rank {
                return Err(Error::BadWindow(format!(
                    "its table names rank {} ({} among directly connected ones), expected {}: not all GPUs reach \
                     each other, or this NCCL lays windows out differently",
                    table.world_rank, table.lsa_rank, self.communicator.rank
                )));
            }
            (0..ranks).map(|peer| table.peer(peer)).collect()
        };
        if let Some(missing) = peers.iter().position(|&address| address == 0) {
            return Err(Error::BadWindow(format!("no address for rank {missing}")));
        }
        let mut distinct = peers.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() != peers.len() {
            return Err(Error::BadWindow(format!("two ranks share an address in {peers:x?}")));
        }
        Ok(peers)
    }

    /// Addresses of every rank's copy, as this rank may load and store them.
    #[must_use]
    pub fn peers(&self) -> &[u64] {
        &self.peers
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// The group's background state.
    ///
    /// # Errors
    /// The error that NCCL met.
    pub fn health(&self) -> Result<(), Error> {
        self.communicator.health()
    }

    /// Deregisters and leaves the group in order.
    ///
    /// # Errors
    /// As [`Communicator::finish`].
    pub fn finish(self, deadline: Duration) -> Result<(), Error> {
        let Window { registration, communicator, memory, peers: _ } = self;
        drop(registration);
        let outcome = communicator.finish(deadline);
        drop(memory);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_what_was_tried_and_the_way_out() {
        let error =
            Library::open(Some(Path::new("/nowhere/libnccl.so.2"))).expect_err("there is no such file");
        let text = error.to_string();
        for part in ["/nowhere/libnccl.so.2 (as configured)", "EXPERTD_NCCL", "2.28.0 or newer"] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused_by_symbol() {
        let error = Library::open(Some(Path::new("libc.so.6"))).expect_err("libc is no NCCL");
        assert!(matches!(error, Error::Symbol { symbol: "ncclGetVersion", .. }), "{error}");
    }

    #[test]
    fn an_id_that_nobody_wrote_is_refused() {
        assert!(UniqueId::from_bytes(&[0; sys::UNIQUE_ID_BYTES]).is_err());
        let mut bytes = [0; sys::UNIQUE_ID_BYTES];
        bytes[127] = 0xfe;
        let id = UniqueId::from_bytes(&bytes).expect("one byte is set");
        assert_eq!(id.to_bytes(), bytes);
    }

    /// Runs where a real library is at hand (EXPERTD_NCCL); elsewhere there is nothing to look at.
    #[test]
    fn a_real_library_has_every_symbol() {
        if env::var_os(LIBRARY_VARIABLE).is_none() {
            eprintln!("skipped: EXPERTD_NCCL is not set");
            return;
        }
        let library = Library::open(None).expect("EXPERTD_NCCL names an NCCL library");
        assert!(library.version() >= Version::OLDEST);
    }
}
