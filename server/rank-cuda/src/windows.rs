//! Windows in GPU memory: kernels of every rank can address the window of every rank over NVLink.
//!
//! One allocation per rank holds the regions of all slots (see `expertd_kernels::layout`). It is registered once as a
//! symmetric window, and the addresses of the peers' windows are resolved once; kernels then use plain pointers. A group
//! of one rank needs neither NCCL nor peers.

#![allow(unsafe_code, reason = "clears device memory and reads NCCL's window table")]

use std::time::Duration;

use expertd_kernels::device::{Buffer, Device, DeviceError, fill_device, read_device};
use expertd_kernels::layout::{Shape, WindowLayout};
use nccl_sys::{Communicator, Library, SymmetricMemory, UniqueId, Window};

/// Size of an NCCL id.
pub const ID_BYTES: usize = nccl_sys::sys::UNIQUE_ID_BYTES;

/// Why windows could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum LsaError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Nccl(#[from] nccl_sys::Error),
}

/// Owner of the window memory. A [`Window`] drops in the required order: registration, communicator, memory.
#[derive(Debug)]
enum WindowMemory {
    Alone(#[expect(dead_code, reason = "held, not read")] Buffer<u8>),
    Group(Window),
}

/// One rank's windows for all slots.
#[derive(Debug)]
pub struct LsaWindows {
    /// `[ranks]`: address of each rank's window.
    peers: Vec<u64>,
    /// Size of a slot's region.
    region_bytes: u64,
    memory: WindowMemory,
}

impl LsaWindows {
    /// Makes the windows of a group of one rank.
    pub fn alone(device: &Device, shape: &Shape, slots: u32) -> Result<Self, LsaError> {
        let (_, region_bytes) = WindowLayout::new(shape);
        let bytes = usize::try_from(region_bytes).unwrap_or(usize::MAX).saturating_mul(slots as usize);
        let memory = Buffer::zeroed(device, bytes)?;
        Ok(LsaWindows { peers: vec![memory.address()], region_bytes, memory: WindowMemory::Alone(memory) })
    }

    /// Joins a group of `shape.ranks` ranks as `rank`, with the id that one of the ranks made. Each wait for peers lasts
    /// `deadline` at most.
    ///
    /// # Errors
    /// If there is not enough memory, NCCL or the machine does not support windows, or peers do not join in time.
    pub fn join(
        library: &std::sync::Arc<Library>,
        id: &[u8; ID_BYTES],
        shape: &Shape,
        rank: u32,
        slots: u32,
        deadline: Duration,
    ) -> Result<Self, LsaError> {
        let id = UniqueId::from_bytes(id)?;
        let communicator = Communicator::join(library, &id, shape.ranks, rank, deadline)?;
        let (_, region_bytes) = WindowLayout::new(shape);
        let bytes = usize::try_from(region_bytes).unwrap_or(usize::MAX).saturating_mul(slots as usize);
        let memory = SymmetricMemory::allocate(library, bytes)?;
        // Flags must be zero before any peer can write one. No rank's registration ends before every rank has begun its
        // own, so no peer has the address yet.
        // SAFETY: the memory was just allocated and is not used by anything else.
        unsafe { fill_device(memory.address(), 0, memory.bytes())? };
        // SAFETY: the address is that of the table's head, which NCCL's window handle points to.
        let window =
            Window::register(communicator, memory, deadline, |at, into| unsafe { read_device(at, into) })?;
        Ok(LsaWindows { peers: window.peers().to_vec(), region_bytes, memory: WindowMemory::Group(window) })
    }

    /// `[ranks]`: address of a slot's region in each rank's window.
    #[must_use]
    pub fn slot(&self, slot: usize) -> Vec<u64> {
        self.peers.iter().map(|start| start + slot as u64 * self.region_bytes).collect()
    }

    /// Checks NCCL's asynchronous state.
    ///
    /// # Errors
    /// The asynchronous error of the communicator.
    pub fn health(&self) -> Result<(), LsaError> {
        match &self.memory {
            WindowMemory::Alone(_) => Ok(()),
            WindowMemory::Group(window) => Ok(window.health()?),
        }
    }
}
