//! The kernels that copy between a caller's arrays and the session's memory.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUfunction, CUmodule, CUstream};

use super::driver::{Gpu, check};
use crate::client::SessionError;

/// `copies/copies.cu`, compiled by `scripts/session_ptx.sh`; ends with a zero byte.
const PTX: &str = concat!(include_str!("copies/copies.ptx"), "\0");
const THREADS: u32 = 256;
/// Largest number of blocks of a launch: about one for each multiprocessor.
const MOST_BLOCKS: u64 = 128;
/// Bytes that a thread copies at once.
const UNIT: u64 = 16;

/// Floats of the caller, `[rows, k]`, as the kernels take them. All zero: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weights {
    pub(super) data: CUdeviceptr,
    /// Element type, a number of [`DType`](crate::DType).
    pub(super) dtype: u32,
    pub(super) k: u32,
}

/// Integers of the caller, as the kernels take them. All zero: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Integers {
    pub(super) data: CUdeviceptr,
    /// 1 if they have 64 bits, 0 if they have 32.
    pub(super) are_wide: u32,
}

/// Argument of `expertd_put`. Places are what the service reads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Put {
    pub(super) rows: CUdeviceptr,
    pub(super) rows_place: CUdeviceptr,
    pub(super) rows_bytes: u64,
    /// Number of ids, and of weights.
    pub(super) routed: u64,
    pub(super) tokens: u64,
    pub(super) ids: Integers,
    pub(super) ids_place: CUdeviceptr,
    pub(super) weights: Weights,
    pub(super) weights_place: CUdeviceptr,
    pub(super) token_ids: Integers,
    pub(super) token_ids_place: CUdeviceptr,
    /// 1 if the weights of a row with a weight that is not finite are sent as zeros.
    pub(super) masks: u32,
}

/// Argument of `expertd_take`. Places are what the service writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Take {
    /// The completion word.
    pub(super) word: CUdeviceptr,
    /// Address of the lane's two words ([`Copies::arrivals`]).
    pub(super) arrivals: CUdeviceptr,
    /// Bits of what an output that does not exist is filled with.
    pub(super) nan: u32,
    pub(super) output_place: CUdeviceptr,
    pub(super) output: CUdeviceptr,
    pub(super) output_bytes: u64,
    pub(super) row_bytes: u64,
    /// Weights whose rows become NaN if one is not finite.
    pub(super) masks: Weights,
    pub(super) ids_place: CUdeviceptr,
    pub(super) ids: CUdeviceptr,
    pub(super) weights_place: CUdeviceptr,
    pub(super) weights: CUdeviceptr,
    /// Number of returned ids, and of returned weights.
    pub(super) routed: u64,
}

/// The kernels, loaded for one GPU.
#[derive(Debug)]
pub(super) struct Copies {
    gpu: Arc<Gpu>,
    module: CUmodule,
    put: CUfunction,
    take: CUfunction,
    /// Two words for each lane. The first one is zero before and after each `expertd_take`.
    arrivals: CUdeviceptr,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Copies {}
// SAFETY: as above.
unsafe impl Sync for Copies {}

impl Copies {
    /// Compiles the kernels for a GPU. Each of `lanes` lanes has one call at a time.
    pub(super) fn load(gpu: &Arc<Gpu>, lanes: u32) -> Result<Self, SessionError> {
        let _entered = gpu.enter()?;
        let mut copies = Copies {
            gpu: Arc::clone(gpu),
            module: ptr::null_mut(),
            put: ptr::null_mut(),
            take: ptr::null_mut(),
            arrivals: 0,
        };
        // SAFETY: PTX ends with a zero byte; the module is unloaded once, in drop.
        let loaded = unsafe { sys::cuModuleLoadData(&raw mut copies.module, PTX.as_ptr().cast()) };
        check("cuModuleLoadData", loaded)?;
        copies.put = copies.function(c"expertd_put")?;
        copies.take = copies.function(c"expertd_take")?;
        let words = 2 * lanes.max(1) as usize;
        // SAFETY: the argument is valid for writes, and the allocation has the words. It is freed once, in drop.
        unsafe {
            check("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut copies.arrivals, words * size_of::<u32>()))?;
            check("cuMemsetD32", sys::cuMemsetD32_v2(copies.arrivals, 0, words))?;
        }
        Ok(copies)
    }

    /// Address of the lane's two words: the number of blocks of `expertd_take` that are done, by which the last block knows that
    /// it is the last, and the call's completion word.
    pub(super) fn arrivals(&self, lane: u32) -> CUdeviceptr {
        self.arrivals + u64::from(lane) * 2 * size_of::<u32>() as u64
    }

    fn function(&self, name: &CStr) -> Result<CUfunction, SessionError> {
        let (mut function, mut registers) = (ptr::null_mut(), 0);
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the module is loaded, and the arguments are valid for reads and writes. Reading an attribute makes a driver that
        // loads kernels late load this one now, because it could not while a stream is captured.
        unsafe {
            let found = sys::cuModuleGetFunction(&raw mut function, self.module, name.as_ptr());
            check("cuModuleGetFunction", found)?;
            let read = sys::cuFuncGetAttribute(&raw mut registers, attribute, function);
            check("cuFuncGetAttribute", read)?;
        }
        Ok(function)
    }

    /// Enqueues `expertd_put`.
    ///
    /// # Safety
    /// The GPU's context is current; `stream` is a live stream of it, and the arrays and places of `call` have the bytes that it
    /// names until the kernel has run.
    pub(super) unsafe fn put(&self, mut call: Put, stream: CUstream) -> Result<(), SessionError> {
        let units = (call.rows_bytes / UNIT).max(call.routed).max(call.tokens);
        // SAFETY: `Put` is the kernel's only parameter; the caller vouches for the rest.
        unsafe { launch(self.put, units, (&raw mut call).cast(), stream) }
    }

    /// Enqueues `expertd_take`.
    ///
    /// # Safety
    /// As [`put`](Self::put).
    pub(super) unsafe fn take(&self, mut call: Take, stream: CUstream) -> Result<(), SessionError> {
        let units = (call.output_bytes / UNIT).max(call.routed);
        // SAFETY: `Take` is the kernel's only parameter; the caller vouches for the rest.
        unsafe { launch(self.take, units, (&raw mut call).cast(), stream) }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: freed and unloaded once, after the work that uses them. Memory that was not allocated is 0, a module that was not
            // loaded null.
            let _ = unsafe {
                (sys::cuCtxSynchronize(), sys::cuMemFree_v2(self.arrivals), sys::cuModuleUnload(self.module))
            };
        }
    }
}

/// # Safety
/// `argument` points to the kernel's only parameter; the rest as [`Copies::put`].
unsafe fn launch(
    function: CUfunction,
    units: u64,
    argument: *mut c_void,
    stream: CUstream,
) -> Result<(), SessionError> {
    let blocks = units.div_ceil(u64::from(THREADS)).clamp(1, MOST_BLOCKS) as u32;
    let mut parameters = [argument];
    // SAFETY: the driver copies the parameter before it returns; the caller vouches for the rest.
    let launched = unsafe {
        let parameters = parameters.as_mut_ptr();
        sys::cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, ptr::null_mut())
    };
    check("cuLaunchKernel", launched)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes as nvcc lays the parameters out; the PTX declares them.
    #[test]
    fn parameters_are_those_of_the_kernels() {
        let declared = |name: &str| {
            let (_, rest) = PTX.split_once(&format!(".entry {name}(")).expect("the kernel");
            let (_, rest) = rest.split_once('[').expect("its parameter");
            rest.split_once(']').and_then(|(bytes, _)| bytes.parse::<usize>().ok()).expect("its size")
        };
        assert_eq!(declared("expertd_put"), size_of::<Put>());
        assert_eq!(declared("expertd_take"), size_of::<Take>());
    }
}
