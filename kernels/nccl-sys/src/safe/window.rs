//! Symmetric memory, and the window that all members register.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::{Communicator, Library, record};
use crate::result::Error;
use crate::sys::{self, Comm, WindowHandle, WindowTable};

/// Device memory that can be registered as a window (`ncclMemAlloc`). Requires a current CUDA context.
pub struct SymmetricMemory {
    library: Arc<Library>,
    address: *mut c_void,
    bytes: usize,
}

// SAFETY: the field is an address of device memory, which the host never dereferences.
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
    /// If NCCL cannot allocate the memory.
    pub fn allocate(library: &Arc<Library>, bytes: usize) -> Result<SymmetricMemory, Error> {
        if bytes == 0 {
            return Err(Error::Argument("the window's size is 0 bytes, expected at least 1".into()));
        }
        let bytes = bytes.next_multiple_of(sys::WINDOW_ALIGNMENT);
        let mut address = ptr::null_mut();
        // SAFETY: `address` is valid for writes.
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
        // SAFETY: the memory was allocated by `ncclMemAlloc` and is freed once.
        let code = unsafe { (self.library.functions.mem_free)(self.address) };
        record(self.library.check("ncclMemFree", code, ptr::null_mut()));
    }
}

/// Memory that every member of a group has registered, with the addresses of all members' windows. Its fields are dropped in
/// the required order: registration, communicator, memory.
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

/// A window handle, boxed because a non-blocking registration writes it after the call has returned.
struct Registration {
    library: Arc<Library>,
    comm: Comm,
    handle: Box<WindowHandle>,
}

// SAFETY: the handles are used under the same rules as the communicator's.
unsafe impl Send for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the handle was registered with this communicator, which is dropped later.
            let code = unsafe { (self.library.functions.window_deregister)(self.comm, *self.handle) };
            if code != sys::IN_PROGRESS {
                record(self.library.check("ncclCommWindowDeregister", code, self.comm));
            }
        }
    }
}

impl Window {
    /// Registers `memory` together with all peers, which register the same size, and resolves the addresses of their
    /// windows. `read_device` copies bytes from a device address; only libraries before 2.29 need it.
    ///
    /// # Errors
    /// NCCL's errors, [`Error::Deadline`] if peers do not register in time, and [`Error::NullWindow`] or
    /// [`Error::BadWindow`] if the result is not a usable window.
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
        // SAFETY: the memory was allocated by NCCL; the boxed handle stays in place until the registration ends or, after a
        // missed deadline, for ever (it is leaked below).
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
            // The registration may still run in the background, where it writes the handle and uses memory and
            // communicator, so none of them may be freed. The leak is harmless, because the rank ends after this error.
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
        let ranks = self.communicator.ranks();
        let peers: Vec<u64> = if let Some(lsa_pointer) = self.registration.library.functions.lsa_pointer {
            (0..ranks)
                .map(|peer| {
                    let mut address = ptr::null_mut();
                    let index = c_int::try_from(peer).unwrap_or(c_int::MAX);
                    // SAFETY: the window is alive, and NCCL checks the index.
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
                .map_err(|why| Error::BadWindow(format!("the window table cannot be read: {why}")))?;
            let table = WindowTable::decode(&bytes);
            if table.lsa_rank != self.communicator.rank() || table.world_rank != self.communicator.rank() {
                return Err(Error::BadWindow(format!(
                    "the window table has rank {} ({} among directly connected GPUs), expected {}: not all GPUs reach \
                     each other, or this NCCL has another window layout",
                    table.world_rank,
                    table.lsa_rank,
                    self.communicator.rank()
                )));
            }
            (0..ranks).map(|peer| table.peer(peer)).collect()
        };
        if let Some(missing) = peers.iter().position(|&address| address == 0) {
            return Err(Error::BadWindow(format!("the address of rank {missing} is null")));
        }
        let mut distinct = peers.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() != peers.len() {
            return Err(Error::BadWindow(format!("two ranks share an address in {peers:x?}")));
        }
        Ok(peers)
    }

    /// `[ranks]`: address of each rank's window, for loads and stores by this rank.
    #[must_use]
    pub fn peers(&self) -> &[u64] {
        &self.peers
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// Checks NCCL's asynchronous state.
    ///
    /// # Errors
    /// The asynchronous error.
    pub fn health(&self) -> Result<(), Error> {
        self.communicator.health()
    }

    /// Deregisters the window and leaves the group in order.
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
