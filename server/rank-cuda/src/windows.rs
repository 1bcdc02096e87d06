//! Windows in GPU memory: every rank's copy is addressable by every kernel of every rank, over NVLink.
//!
//! One allocation per rank holds the regions of all slots (see `expertd_kernels::layout`); it is registered once as a
//! symmetric window and the addresses of the peers' copies are resolved once. From then on kernels use plain pointers.
//! A group of one rank needs neither NCCL nor peers.

#![allow(unsafe_code, reason = "clears device memory and reads NCCL's window table")]

use std::time::Duration;

use expertd_kernels::device::{Buffer, Device, DeviceError, fill_device, read_device};
use expertd_kernels::layout::{Shape, WindowLayout};
use nccl_sys::{Communicator, Library, SymmetricMemory, UniqueId, Window};

/// Bytes of an NCCL id.
pub const ID_BYTES: usize = nccl_sys::sys::UNIQUE_ID_BYTES;

/// Why there are no windows.
#[derive(Debug, thiserror::Error)]
pub enum LsaError {
    /// The driver.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// NCCL.
    #[error(transparent)]
    Nccl(#[from] nccl_sys::Error),
}

/// Who holds the memory. Its fields know the order of their destruction: window, communicator, memory.
#[derive(Debug)]
enum Memory {
    Alone(#[expect(dead_code, reason = "held, not read")] Buffer<u8>),
    Group(Window),
}

/// One rank's windows, all slots.
#[derive(Debug)]
pub struct LsaWindows {
    /// Start of every rank's copy.
    peers: Vec<u64>,
    region_bytes: u64,
    memory: Memory,
}

impl LsaWindows {
    /// The windows of a group of one rank.
    ///
    /// # Errors
    /// When device memory is short.
    pub fn alone(device: &Device, shape: &Shape, slots: u32) -> Result<Self, LsaError> {
        let (_, region_bytes) = WindowLayout::new(shape);
        let bytes = usize::try_from(region_bytes).unwrap_or(usize::MAX).saturating_mul(slots as usize);
        let memory = Buffer::zeroed(device, bytes)?;
        Ok(LsaWindows { peers: vec![memory.address()], region_bytes, memory: Memory::Alone(memory) })
    }

    /// Joins `shape.ranks` ranks as `rank` with the id that one of them made. Every wait for peers ends after
    /// `deadline`.
    ///
    /// # Errors
    /// When memory is short, when NCCL or the machine cannot do it, and when peers do not come.
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
        // Flags must be zero before any peer can write one. Registration ends after every rank has begun it, so no
        // peer has the address yet.
        // SAFETY: the memory was just allocated, and nobody else knows it.
        unsafe { fill_device(memory.address(), 0, memory.bytes())? };
        // SAFETY: NCCL asks for the head of a table that its window handle points to.
        let window =
            Window::register(communicator, memory, deadline, |at, into| unsafe { read_device(at, into) })?;
        Ok(LsaWindows { peers: window.peers().to_vec(), region_bytes, memory: Memory::Group(window) })
    }

    /// Where a slot's region stands at every rank.
    #[must_use]
    pub fn slot(&self, slot: usize) -> Vec<u64> {
        self.peers.iter().map(|start| start + slot as u64 * self.region_bytes).collect()
    }

    /// NCCL's background state.
    ///
    /// # Errors
    /// The error that it met.
    pub fn health(&self) -> Result<(), LsaError> {
        match &self.memory {
            Memory::Alone(_) => Ok(()),
            Memory::Group(window) => Ok(window.health()?),
        }
    }
}
