//! Memories of clients that this rank's GPU can address: host memory that is registered, and memory of GPUs that is mapped.

#![allow(unsafe_code, reason = "registers the pages of clients' memories")]

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};

use expertd_ipc::{Raise, Segment};
use expertd_kernels::device::{Device, Pinned, ShareableMemory, Unmapped, uuid_of};
use expertd_kernels::params::{MAX_RAISES, Raise as DeviceRaise};
use expertd_rank::ClientMemory;
use expertd_rank::segments::{CheckedSegment, RowsPlace};
use expertd_shm::SharedSlice;
use expertd_types::{MemoryId, uuid_text};

/// Copy engines carry a segment of at least this many bytes in a step whose rows they carry; kernels access smaller ones
/// directly, because each copy costs the host microseconds.
const COPIED_SEGMENT: usize = 64 << 10;
/// Alignment of a segment's rows in a slot's rows on the device, in bytes.
const ROWS_ALIGN: usize = 64;

/// A memory that the GPU can address.
enum Attached {
    /// Host memory.
    Host(PinnedHost),
    /// Memory of a client's GPU, which kernels access over NVLink.
    Device {
        memory: ShareableMemory,
        /// The session's control region, where this rank raises completion words.
        control: Option<PinnedHost>,
    },
}

/// Host memory that is registered with the GPU. Its pages are unregistered before they are unmapped.
struct PinnedHost {
    pinned: Pinned<'static>,
    bytes: SharedSlice<u8>,
}

impl PinnedHost {
    fn register(device: &Device, bytes: SharedSlice<u8>) -> Result<Self, String> {
        // SAFETY: the view begins at the region's first page and covers all of them; it keeps them mapped until they are
        // unregistered.
        let pinned = unsafe { Pinned::register(device, bytes.as_ptr(), bytes.len()) }.map_err(|error| {
            let kib = bytes.len() >> 10;
            format!(
                "cannot pin {kib} KiB of a session: {error}; raise the limit of locked memory (ulimit -l)"
            )
        })?;
        Ok(PinnedHost { pinned, bytes })
    }

    /// Device address of a word of type `T` at `offset`; `None` if it exceeds the memory or is not aligned.
    fn word<T>(&self, offset: u32) -> Option<u64> {
        let (offset, size) = (offset as usize, size_of::<T>());
        let fits = offset.is_multiple_of(size) && offset + size <= self.bytes.len();
        fits.then(|| self.pinned.address() + offset as u64)
    }
}

/// Maps all `bytes` bytes of the memory behind a client's descriptor. `named` is the UUID of the GPU that has it, as the client says.
pub(crate) fn import(
    device: &Device,
    fd: BorrowedFd<'_>,
    bytes: usize,
    named: [u8; 16],
) -> Result<ShareableMemory, String> {
    let gpu = uuid_text(&named);
    let memory = Unmapped::import(device, fd)
        .map_err(|error| format!("the descriptor is not memory of a GPU that this process sees: {error}"))?;
    let owner = memory.owner().map_err(|error| error.to_string())?;
    let owner = owner.ok_or("the descriptor is memory of the host, expected a GPU's")?;
    let owning = uuid_of(owner).map_err(|_| {
        format!("the memory is on GPU {gpu}, which this process does not see; look at CUDA_VISIBLE_DEVICES")
    })?;
    if owning != named {
        return Err(format!("the memory is on GPU {}, but the client names GPU {gpu}", uuid_text(&owning)));
    }
    if !device.reaches_number(owner).map_err(|error| error.to_string())? {
        let own = device.ordinal();
        return Err(format!(
            "GPU {own} of the service cannot access the memory of GPU {gpu}, which the client uses"
        ));
    }
    memory
        .map(bytes)
        .map_err(|error| format!("{bytes} bytes of the client's memory cannot be mapped: {error}"))
}

/// The attached memories.
pub(super) struct Memories {
    attached: HashMap<MemoryId, Attached>,
    /// Whether this rank raises completion words.
    raises: bool,
}

/// Rows that copy engines carry between a client's memory and a slot's rows on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientCopy {
    /// The rows on the host.
    pub(super) input: *const u8,
    /// The place of the results on the host.
    pub(super) output: *mut u8,
    /// Offset of both in the slot's rows, in bytes.
    pub(super) at: usize,
    pub(super) bytes: usize,
}

impl ClientCopy {
    /// Whether `next` continues this copy at all places.
    pub(super) fn is_followed_by(&self, next: &ClientCopy) -> bool {
        self.at + self.bytes == next.at
            && self.input.wrapping_add(self.bytes) == next.input
            && self.output.wrapping_add(self.bytes) == next.output
    }

    /// The part of the copy whose offset in the slot's rows is in `range`; `None` if it is empty.
    pub(super) fn clip(&self, range: Range<usize>) -> Option<ClientCopy> {
        let (first, end) = (self.at.max(range.start), (self.at + self.bytes).min(range.end));
        (first < end).then(|| ClientCopy {
            input: self.input.wrapping_add(first - self.at),
            output: self.output.wrapping_add(first - self.at),
            at: first,
            bytes: end - first,
        })
    }
}

impl Memories {
    pub(super) fn new(raises: bool) -> Self {
        Memories { attached: HashMap::new(), raises }
    }

    /// Registers or maps a memory. No kernel runs.
    pub(super) fn attach(
        &mut self,
        device: &Device,
        memory: MemoryId,
        client: ClientMemory,
    ) -> Result<(), String> {
        if self.attached.contains_key(&memory) {
            return Err(format!("memory {memory} is attached; numbers are never used again"));
        }
        let attached = match client {
            ClientMemory::Host(bytes) => Attached::Host(PinnedHost::register(device, bytes)?),
            ClientMemory::Device(client) => {
                let memory = import(device, client.fd.as_fd(), client.bytes, client.device)?;
                let control =
                    self.raises.then(|| PinnedHost::register(device, client.control)).transpose()?;
                Attached::Device { memory, control }
            }
        };
        self.attached.insert(memory, attached);
        Ok(())
    }

    /// Unregisters and unmaps a memory. No kernel runs.
    pub(super) fn detach(&mut self, memory: MemoryId) {
        self.attached.remove(&memory);
    }

    /// Size of a memory, in bytes.
    pub(super) fn size(&self, memory: MemoryId) -> Option<usize> {
        self.attached.get(&memory).map(|memory| match memory {
            Attached::Host(host) => host.bytes.len(),
            Attached::Device { memory, .. } => memory.bytes(),
        })
    }

    /// The bytes of a host memory.
    pub(super) fn bytes(&self, memory: MemoryId) -> Option<&SharedSlice<u8>> {
        match self.attached.get(&memory)? {
            Attached::Host(host) => Some(&host.bytes),
            Attached::Device { .. } => None,
        }
    }

    /// Whether a step's rows all lie in the memory of GPUs, so that kernels read and write them directly.
    pub(super) fn are_on_gpus(&self, segments: &[CheckedSegment]) -> bool {
        segments.iter().all(|segment| match &segment.place {
            RowsPlace::Memory { memory, .. } => {
                matches!(self.attached.get(memory), Some(Attached::Device { .. }))
            }
            RowsPlace::Staging(_) => false,
        })
    }

    /// The addresses of completion words that this rank raises.
    ///
    /// # Errors
    /// The first entry that names no word of an attached control region.
    pub(super) fn words(&self, raises: &[Raise]) -> Result<[DeviceRaise; MAX_RAISES], String> {
        let mut words = [DeviceRaise::default(); MAX_RAISES];
        for (to, raise) in words.iter_mut().zip(raises) {
            let control = match self.attached.get(&MemoryId(raise.memory)) {
                Some(Attached::Device { control: Some(control), .. }) => Some(control),
                _ => None,
            };
            let word = control.and_then(|control| control.word::<u32>(raise.word));
            let number = control.and_then(|control| control.word::<u64>(raise.number));
            let (Some(word), Some(number)) = (word, number) else {
                return Err(format!("{raise:?} names no completion word of an attached session"));
            };
            *to = DeviceRaise { word, number, call: raise.call };
        }
        Ok(words)
    }

    /// Address of a memory of a client's GPU; `None` for other memories.
    pub(super) fn device_address(&self, memory: MemoryId) -> Option<u64> {
        match self.attached.get(&memory)? {
            Attached::Device { memory, .. } => Some(memory.address()),
            Attached::Host(_) => None,
        }
    }

    /// Replaces offsets in memories by device addresses, in the table of a step's segments. If copy engines carry the step's rows, to
    /// a buffer of `copied` bytes, large segments get places there; returns their copies.
    pub(super) fn place(
        &self,
        segments: &[CheckedSegment],
        table: &mut [Segment],
        copied: Option<usize>,
    ) -> Vec<ClientCopy> {
        let mut next = segments.iter().map(CheckedSegment::staged_end).max().unwrap_or(0);
        let mut copies = Vec::new();
        for (segment, entry) in segments.iter().zip(table) {
            let RowsPlace::Memory { memory, input, output } = &segment.place else { continue };
            let PinnedHost { pinned, bytes } = match self.attached.get(memory) {
                Some(Attached::Host(host)) => host,
                Some(Attached::Device { memory, .. }) => {
                    entry.byte_offset = memory.address() + input.start as u64;
                    entry.output_offset = memory.address() + output.start as u64;
                    continue;
                }
                None => continue,
            };
            let at = next.next_multiple_of(ROWS_ALIGN);
            if input.len() >= COPIED_SEGMENT && copied.is_some_and(|capacity| at + input.len() <= capacity) {
                next = at + input.len();
                *entry =
                    Segment { byte_offset: at as u64, output_offset: 0, memory: Segment::STAGING, ..*entry };
                copies.push(ClientCopy {
                    input: bytes.as_ptr().wrapping_add(input.start).cast_const(),
                    output: bytes.as_ptr().wrapping_add(output.start),
                    at,
                    bytes: input.len(),
                });
            } else {
                entry.byte_offset = pinned.address() + input.start as u64;
                entry.output_offset = pinned.address() + output.start as u64;
            }
        }
        copies
    }
}
