//! Launches of the kernels in `src/*.cu` on a stream. A slice of one parameter struct launches one rank; a slice of several
//! launches a loopback group, whose virtual ranks run in one launch.
#![allow(unsafe_code, reason = "calls the kernels' C launchers")]

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::driver::sys::CUstream;

use crate::params::{
    CombineParams, CopyInParams, CopyOutParams, DispatchParams, GateParams, Group, ScaleParams, SharedParams,
    TierParams,
};

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
    fn expertd_tier(params: *const TierParams, count: u32, blocks: u32, stream: *mut c_void) -> c_int;
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

macro_rules! launcher {
    ($(#[$doc:meta])* $name:ident($params:ty, $amount:ident) = $symbol:ident) => {
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
            // SAFETY: the slice holds `count` structs, which the launcher copies; the caller promises the rest.
            check(stringify!($name), unsafe { $symbol(params.as_ptr(), count, $amount, stream.cast()) })
        }
    };
}

launcher! {
    /// Runs the gate on at most `tokens_at_most` rows, which determines the grid; the actual count is read on the device.
    gate(GateParams, tokens_at_most) = expertd_gate
}
launcher! {
    /// Pushes rows to their experts' ranks and lists received rows by expert. All `blocks` must fit on the device at once.
    dispatch(DispatchParams, blocks) = expertd_dispatch
}
launcher! {
    /// Returns and reduces partials, and advances the slot's sequence. All `blocks` must fit on the device at once.
    combine(CombineParams, blocks) = expertd_combine
}
launcher! {
    /// Waits until all ranks have reached this launch, for measurements. One of the `blocks` waits.
    meet(Group, blocks) = expertd_meet
}
launcher! {
    /// Runs a stand-in for experts.
    scale(ScaleParams, blocks) = expertd_scale
}
launcher! {
    /// Makes the assignments of the shared experts.
    shared(SharedParams, blocks) = expertd_shared
}
launcher! {
    /// Sends a step's rows to CPU ranks, and divides the gate's choices.
    tier(TierParams, blocks) = expertd_tier
}
launcher! {
    /// Copies from host staging to device memory.
    copy_in(CopyInParams, blocks) = expertd_copy_in
}
launcher! {
    /// Copies from device memory to host staging, then writes the completion record.
    copy_out(CopyOutParams, blocks) = expertd_copy_out
}
