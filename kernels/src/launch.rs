//! Launches of the kernels in `src/*.cu` on a stream. A slice of one parameter struct launches one rank; a slice of several
//! launches a loopback group, whose virtual ranks run in one launch.
#![allow(unsafe_code, reason = "calls the kernels' C launchers")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;

use crate::params::{
    CombineParams, CopyInParams, CopyOutParams, DispatchParams, GateParams, Group, ScaleParams, SharedParams,
    TierParams,
};
use crate::path::KernelPath;

unsafe extern "C" {
    fn expertd_gate(params: *const GateParams, count: u32, tokens_at_most: u32, stream: *mut c_void)
    -> c_int;
    fn expertd_dispatch(params: *const DispatchParams, count: u32, blocks: u32, stream: *mut c_void)
    -> c_int;
    fn expertd_combine(params: *const CombineParams, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_meet(groups: *const Group, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_scale(params: *const ScaleParams, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_shared(params: *const SharedParams, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_copy_in(params: *const CopyInParams, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_copy_out(params: *const CopyOutParams, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_portable_gate(
        params: *const GateParams,
        count: u32,
        tokens_at_most: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_portable_dispatch(
        params: *const DispatchParams,
        count: u32,
        blocks: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_portable_combine(
        params: *const CombineParams,
        count: u32,
        blocks: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_portable_meet(groups: *const Group, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_portable_scale(
        params: *const ScaleParams,
        count: u32,
        blocks: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_portable_shared(
        params: *const SharedParams,
        count: u32,
        blocks: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_portable_copy_in(
        params: *const CopyInParams,
        count: u32,
        blocks: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_portable_copy_out(
        params: *const CopyOutParams,
        count: u32,
        blocks: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_load_modules() -> c_int;
    fn expertd_portable_load_modules() -> c_int;
    fn expertd_tier(params: *const TierParams, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
    fn expertd_portable_tier(
        params: *const TierParams,
        count: u32,
        blocks: u32,
        stream: *mut c_void,
    ) -> c_int;
    fn expertd_error_string(code: c_int) -> *const c_char;
}

/// A launch that the CUDA runtime refused.
#[derive(Debug, thiserror::Error)]
#[error("launching {kernel} failed with CUDA error {code}: {text}")]
pub struct LaunchError {
    kernel: &'static str,
    code: c_int,
    text: String,
}

pub(crate) fn check(kernel: &'static str, code: c_int) -> Result<(), LaunchError> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the CUDA runtime returns a static string for every code.
    let text = unsafe { CStr::from_ptr(expertd_error_string(code)) }.to_string_lossy().into_owned();
    Err(LaunchError { kernel, code, text })
}

/// Loads the kernels of the chosen set, and compiles them where they come as PTX; returns the time that this took. With
/// `CUDA_MODULE_LOADING=LAZY` the other set is not loaded. Must be called before kernels wait for each other or for the host, because
/// loading may wait for kernels.
///
/// # Errors
/// If the device cannot run the kernels.
pub fn load_kernels() -> Result<Duration, LaunchError> {
    let start = Instant::now();
    // SAFETY: the functions only need a current context, and report an error if there is none.
    let code = unsafe {
        match KernelPath::chosen() {
            KernelPath::Hopper => expertd_load_modules(),
            KernelPath::Portable => expertd_portable_load_modules(),
        }
    };
    check("load_modules", code)?;
    Ok(start.elapsed())
}

macro_rules! launcher {
    ($(#[$doc:meta])* $name:ident($params:ty, $amount:ident) = $hopper:ident, $portable:ident) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// If CUDA refuses the launch. A fault of a running kernel is reported by a later call and in the error word.
        ///
        /// # Safety
        /// The addresses in `params` must be valid on the stream's device, with the sizes that the struct documents, until
        /// the launch, or the last replay of a graph that captured it, has ended. The stream's context must be current.
        pub unsafe fn $name(params: &[$params], $amount: u32, stream: CUstream) -> Result<(), LaunchError> {
            let count = u32::try_from(params.len()).unwrap_or(u32::MAX);
            let launcher = match KernelPath::chosen() {
                KernelPath::Hopper => $hopper,
                KernelPath::Portable => $portable,
            };
            // SAFETY: the slice holds `count` structs, which the launcher copies; the caller promises the rest.
            check(stringify!($name), unsafe { launcher(params.as_ptr(), count, $amount, stream.cast()) })
        }
    };
}

launcher! {
    /// Runs the gate on at most `tokens_at_most` rows, which determines the grid; the actual count is read on the device.
    gate(GateParams, tokens_at_most) = expertd_gate, expertd_portable_gate
}
launcher! {
    /// Pushes rows to their experts' ranks and lists received rows by expert. All `blocks` must fit on the device at once.
    dispatch(DispatchParams, blocks) = expertd_dispatch, expertd_portable_dispatch
}
launcher! {
    /// Returns and reduces partials, and advances the slot's sequence. All `blocks` must fit on the device at once.
    combine(CombineParams, blocks) = expertd_combine, expertd_portable_combine
}
launcher! {
    /// Waits until all ranks have reached this launch, for measurements. One of the `blocks` waits.
    meet(Group, blocks) = expertd_meet, expertd_portable_meet
}
launcher! {
    /// Runs a stand-in for experts.
    scale(ScaleParams, blocks) = expertd_scale, expertd_portable_scale
}
launcher! {
    /// Makes the assignments of the shared experts.
    shared(SharedParams, blocks) = expertd_shared, expertd_portable_shared
}
launcher! {
    /// Sends a step's rows to CPU ranks, and divides the gate's choices.
    tier(TierParams, blocks) = expertd_tier, expertd_portable_tier
}
launcher! {
    /// Copies from host staging to device memory.
    copy_in(CopyInParams, blocks) = expertd_copy_in, expertd_portable_copy_in
}
launcher! {
    /// Copies from device memory to host staging, then writes the completion record.
    copy_out(CopyOutParams, blocks) = expertd_copy_out, expertd_portable_copy_out
}
