//! Faults of the device that tests cause: see [`expertd_shm::faults`].

#![allow(unsafe_code, reason = "launches kernels that misbehave")]

use expertd_kernels::experts::{PACK_DOWN, PackParams, pack};
use expertd_kernels::launch;
use expertd_kernels::params::Group;

use super::CudaEngine;
use super::fault::CudaFault;
use expertd_shm::faults;

/// An address that no allocation has.
const UNMAPPED: u64 = 1 << 12;

impl CudaEngine {
    /// Launches a kernel that never ends (`gpu-hang`), or one that accesses memory that is not mapped (`gpu-error`), if a test
    /// asks for it.
    pub(super) fn inject_fault(&self, slot: usize) -> Result<(), CudaFault> {
        if self.shape.ranks > 1 && faults::happens("gpu-hang") {
            tracing::warn!("injecting a kernel that never ends");
            // No other rank launches this kernel, so its wait for them lasts until the deadline, centuries from now.
            let group = Group { deadline_ns: u64::MAX / 2, ..self.groups[slot] };
            // SAFETY: the kernel reads and writes flags of live windows, which this rank's steps use for nothing else.
            unsafe { launch::meet(&[group], 1, self.stream.raw())? };
        }
        if faults::happens("gpu-error") {
            tracing::warn!("injecting an access to memory that is not mapped");
            let (hidden, inter, expert_stride) = (64, 64, 64 * 64);
            let params = PackParams {
                first: UNMAPPED,
                second: 0,
                panels: UNMAPPED,
                expert_stride,
                experts: 1,
                hidden,
                inter,
                kind: PACK_DOWN,
            };
            // SAFETY: no memory has these addresses: the device refuses the access and gives up the context, as is intended.
            unsafe { pack(&params, self.stream.raw())? };
        }
        Ok(())
    }
}
