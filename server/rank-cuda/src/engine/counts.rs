//! The counts of rows per expert on a GPU rank. The kernel that ends a step adds to a table in device memory and stores the sums in the
//! router's table, so that no step waits for a read over PCIe.

use expertd_ipc::RowCounts;
use expertd_kernels::device::{Buffer, Device, DeviceError, Pinned};
use expertd_kernels::params::CopyOutParams;
use expertd_types::Rank;
use std::sync::atomic::Ordering;

/// This rank's counts in device memory, and the pinned pages of the router's table.
pub(super) struct DeviceCounts {
    counts: Buffer<u64>,
    host: Pinned<'static>,
    /// Number of experts that a layer has room for.
    stride: u32,
    // Dropped after the pages are no longer pinned.
    _table: RowCounts,
}

impl DeviceCounts {
    /// Pins this rank's part of the table. The counts go on from what earlier generations have counted.
    pub(super) fn new(device: &Device, table: RowCounts, rank: Rank) -> Result<Self, DeviceError> {
        let shape = table.shape();
        let layers = (0..shape.layers as usize).flat_map(|layer| table.of(rank, layer));
        let counted: Vec<u64> = layers.map(|count| count.load(Ordering::Relaxed)).collect();
        let (pages, bytes) = table.pages(rank);
        // SAFETY: `table` maps these pages and is dropped after `host`.
        let host = unsafe { Pinned::register(device, pages, bytes) }?;
        let counts = Buffer::from_slice(device, &counted)?;
        Ok(DeviceCounts { counts, host, stride: shape.experts, _table: table })
    }

    /// The parameters that concern counts.
    pub(super) fn params(&self, expert_offsets: u64) -> CopyOutParams {
        CopyOutParams {
            expert_offsets,
            row_counts: self.counts.address(),
            row_counts_host: self.host.address(),
            count_stride: self.stride,
            ..CopyOutParams::default()
        }
    }
}
