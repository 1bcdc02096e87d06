//! Memories of clients that this rank's GPU can address: host memory that is registered, and memory of GPUs that is mapped.

#![allow(unsafe_code, reason = "registers the pages of clients' memories")]

use std::collections::HashMap;
use std::os::fd::AsFd as _;

use expertd_ipc::{Segment, SharedSlice};
use expertd_kernels::device::{Device, Pinned};
use expertd_rank::ClientMemory;
use expertd_rank::segments::{CheckedSegment, RowsPlace};
use expertd_session::cuda::{Gpu, ImportedMemory};
use expertd_types::MemoryId;

/// Copy engines carry a segment of at least this many bytes in a step whose rows they carry; kernels access smaller ones
/// directly, because each copy costs the host microseconds.
const COPIED_SEGMENT: usize = 64 << 10;
/// Alignment of a segment's rows in a slot's rows on the device, in bytes.
const ROWS_ALIGN: usize = 64;

/// A memory that the GPU can address.
enum Attached {
    /// Host memory, whose pages are unregistered before they are unmapped.
    Host { pinned: Pinned<'static>, bytes: SharedSlice<u8> },
    /// Memory of a client's GPU, which kernels access over NVLink.
    Device(ImportedMemory),
}

/// The attached memories.
#[derive(Default)]
pub(super) struct Memories {
    attached: HashMap<MemoryId, Attached>,
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

impl Memories {
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
        let bytes = match client {
            ClientMemory::Host(bytes) => bytes,
            ClientMemory::Device(client) => {
                let gpu = Gpu::open(device.ordinal()).map_err(|error| error.to_string())?;
                let imported = ImportedMemory::import(&gpu, client.fd.as_fd(), client.bytes, client.device);
                let imported = imported.map_err(|error| error.to_string())?;
                self.attached.insert(memory, Attached::Device(imported));
                return Ok(());
            }
        };
        // SAFETY: the view begins at the region's first page and covers all of them; `Attached` keeps them mapped until they
        // are unregistered.
        let pinned = unsafe { Pinned::register(device, bytes.as_ptr(), bytes.len()) }.map_err(|error| {
            let mib = bytes.len() >> 20;
            format!(
                "cannot pin {mib} MiB of a session: {error}; raise the limit of locked memory (ulimit -l)"
            )
        })?;
        self.attached.insert(memory, Attached::Host { pinned, bytes });
        Ok(())
    }

    /// Unregisters and unmaps a memory. No kernel runs.
    pub(super) fn detach(&mut self, memory: MemoryId) {
        self.attached.remove(&memory);
    }

    /// Size of a memory, in bytes.
    pub(super) fn size(&self, memory: MemoryId) -> Option<usize> {
        self.attached.get(&memory).map(|memory| match memory {
            Attached::Host { bytes, .. } => bytes.len(),
            Attached::Device(imported) => imported.bytes(),
        })
    }

    /// The bytes of a host memory.
    pub(super) fn bytes(&self, memory: MemoryId) -> Option<&SharedSlice<u8>> {
        match self.attached.get(&memory)? {
            Attached::Host { bytes, .. } => Some(bytes),
            Attached::Device(_) => None,
        }
    }

    /// Address of a memory of a client's GPU; `None` for other memories.
    pub(super) fn device_address(&self, memory: MemoryId) -> Option<u64> {
        match self.attached.get(&memory)? {
            Attached::Device(imported) => Some(imported.address()),
            Attached::Host { .. } => None,
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
            let (pinned, bytes) = match self.attached.get(memory) {
                Some(Attached::Host { pinned, bytes }) => (pinned, bytes),
                Some(Attached::Device(imported)) => {
                    entry.byte_offset = imported.address() + input.start as u64;
                    entry.output_offset = imported.address() + output.start as u64;
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
