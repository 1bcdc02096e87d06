//! One MoE layer of a GPU rank alone, gate to combine, as a C library: the launches of a service's step without its copies, on
//! tensors and streams of the caller. `loadtest/peers/gpu/expertd_layer.py` loads it.
//!
//! Functions return 0, or -1 after a message on standard error. Addresses are those of device memory of GPU 0.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, reason = "a C interface to kernels")]

mod layers;

use std::ffi::c_void;

use layers::{Error, Layers};

/// Sizes and format of all layers of a handle.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LayerShape {
    /// Elements of a row.
    pub hidden: u32,
    /// Intermediate size of an expert.
    pub width: u32,
    /// Number of experts.
    pub experts: u32,
    /// Experts per row.
    pub top_k: u32,
    /// 0: bf16; 1: FP8 in blocks of 128 × 128, for products with FP8 rows; 2: MXFP4; 3: INT4 in groups of 32, minus 8; 4: NVFP4, with
    /// 2^-9 as the factor of every matrix.
    pub format: u32,
    /// 1: gpt-oss's activation.
    pub gpt_oss: u32,
    /// Largest number of rows of a step.
    pub max_tokens: u32,
    /// Number of layers that will be added.
    pub layers: u32,
    /// 1: FP8 rows are quantised by the experts' kernel, once for each of a row's experts, and not by dispatch. For comparisons.
    pub rows_by_experts: u32,
    /// 1: the portable kernels instead of those for Hopper.
    pub portable: u32,
}

/// Weights of one layer in row-major order, gate rows before up rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LayerTensors {
    /// bf16 `[E, H]`. Read by every step.
    pub gate: u64,
    /// f32 `[E]`, or 0. Read by every step.
    pub gate_bias: u64,
    /// `[E, 2I, H]` in the format's codes.
    pub gate_up: u64,
    /// FP8: f32 `[E, 2I, H / 128]`; MXFP4: u8 `[E, 2I, H / 32]`; INT4: f16, as long; NVFP4: e4m3 `[E, 2I, H / 16]`.
    pub gate_up_scales: u64,
    /// `[E, H, I]`.
    pub down: u64,
    /// As `gate_up_scales`, for `[E, H, I]`.
    pub down_scales: u64,
    /// f32 `[E, 2I]`, or 0. Read by every step.
    pub gate_up_bias: u64,
    /// f32 `[E, H]`, or 0. Read by every step.
    pub down_bias: u64,
}

fn status(done: Result<(), Error>) -> i32 {
    match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("expertd_layer: {error}");
            -1
        }
    }
}

/// Allocates buffers and prepares kernels; returns null on failure.
///
/// # Safety
/// `shape` points to a [`LayerShape`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_layers_open(shape: *const LayerShape) -> *mut Layers {
    // SAFETY: the caller's promise.
    let opened = Layers::open(unsafe { *shape });
    opened.map_or_else(
        |error| (status(Err(error)), std::ptr::null_mut()).1,
        |layers| Box::into_raw(Box::new(layers)),
    )
}

/// Packs the weights of the next layer. The tensors that only packing reads may be freed afterwards.
///
/// # Safety
/// `layers` is open, and `tensors` names device memory of the documented sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_layers_add(layers: *mut Layers, tensors: *const LayerTensors) -> i32 {
    // SAFETY: the caller's promises.
    status(unsafe { (*layers).add(&*tensors) })
}

/// Sets the number of rows of the following steps.
///
/// # Safety
/// `layers` is open, all its layers are added, and none of its steps runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_layers_rows(layers: *mut Layers, rows: u32) -> i32 {
    // SAFETY: the caller's promise.
    status(unsafe { (*layers).set_rows(rows) })
}

/// Enqueues one step of a layer: bf16 `[rows, H]` from `tokens` to `out`. Steps can be captured; steps of a handle must not overlap.
///
/// # Safety
/// As for [`expertd_layers_rows`]; `tokens` and `out` are device memory, and `stream` a stream of the current context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_layers_step(
    layers: *mut Layers,
    layer: u32,
    tokens: u64,
    out: u64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's promises.
    status(unsafe { (*layers).step(layer, tokens, out, stream.cast()) })
}

/// Fails if a step has set its error word. Waits for nothing.
///
/// # Safety
/// `layers` is open, and none of its steps runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_layers_check(layers: *mut Layers) -> i32 {
    // SAFETY: the caller's promise.
    status(unsafe { (*layers).check() })
}

/// Frees everything.
///
/// # Safety
/// `layers` is open, none of its steps runs, and no graph with its steps is launched again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_layers_close(layers: *mut Layers) {
    // SAFETY: the pointer came from `expertd_layers_open`.
    drop(unsafe { Box::from_raw(layers) });
}
