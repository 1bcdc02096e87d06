//! Parameters of the expert MLP kernels, which mirror `experts.h`, and their launches.
#![allow(unsafe_code, reason = "calls the kernels' C launchers")]

use std::ffi::{c_int, c_void};
use std::ops::Range;

use cudarc::driver::sys::CUstream;

use crate::launch::{LaunchError, check};
use crate::path::KernelPath;

/// Row lengths and intermediate sizes are multiples of this number of elements.
pub const PANEL: usize = 64;
/// Alignment of panels and workspaces, in bytes.
pub const ALIGNMENT: u64 = 1024;
/// Largest number of experts of one rank.
pub const MAX_LOCAL_EXPERTS: usize = 512;

/// `silu(g) * u`.
pub const SWIGLU: i32 = 0;
/// `silu(min(g, limit)) * clamp(u, -limit, limit)`.
pub const SWIGLU_CLAMPED: i32 = 1;
/// `g * sigmoid(alpha * g) * (u + 1)`, both clamped.
pub const SWIGLU_OAI: i32 = 2;

/// Launch flag: the kernel may start before the previous kernel of the stream has ended, and then waits for it.
pub const PROGRAMMATIC: i32 = 1;
/// Launch flag: a kernel for experts with few rows each. It is right for any number of rows, but reads an expert's weights once for
/// every eight of them. [`ExpertsParams::h`] must have room for bf16 `[assignments, inter]` in every format.
pub const FEW_ROWS: i32 = 4;
/// Launch flag: a kernel for experts with many rows each ([`W4A8`]), with the same results. [`ExpertsParams::tile_rows`] is 0,
/// [`TILE_TOKEN_ROWS`] or [`TILE_TOKEN_PAIRS`].
pub const MANY_ROWS: i32 = 8;

/// Weights in bf16 panels.
pub const BF16: i32 = 0;
/// Weights in FP8 e4m3 units.
pub const FP8: i32 = 1;
/// Weights in MXFP4 units.
pub const MXFP4: i32 = 2;
/// Weights in FP8 e4m3 panels, multiplied with FP8 rows; the intermediate size is a multiple of [`SCALE_ELEMENTS`].
pub const W8A8: i32 = 3;
/// Weights in INT4 units; every zero point is 8.
pub const INT4: i32 = 4;
/// Weights in INT4 units with zero points from 0 to 15.
pub const INT4_ZEROS: i32 = 5;
/// Weights in NVFP4 units.
pub const NVFP4: i32 = 6;
/// Weights in MXFP8 units.
pub const MXFP8: i32 = 7;
/// MXFP4 weights, multiplied with FP8 rows; the intermediate size is a multiple of [`SCALE_ELEMENTS`]. There is no kernel for few rows.
pub const W4A8: i32 = 8;
/// Elements of a row that share a scale in [`NVFP4`].
pub const NVFP4_GROUP: usize = 16;
/// Elements of a row that share a scale and a zero point in [`INT4`] and [`INT4_ZEROS`].
pub const INT4_GROUP: usize = 32;
/// The zero point of [`INT4`].
pub const INT4_MIDDLE: u8 = 8;
/// Elements of a row of x or h that share a scale in [`W8A8`] and [`W4A8`].
pub const SCALE_ELEMENTS: usize = 128;

/// Rows of x in bf16.
pub const ROWS_BF16: i32 = 0;
/// Rows of x as dispatch pushes them in FP8.
pub const ROWS_FP8: i32 = 1;

/// [`ExpertsParams::tile_rows`]: 256 weight rows for one block ([`BF16`], [`W8A8`], [`W4A8`], up to 128 tokens).
pub const TILE_TALL: i32 = 1;
/// [`ExpertsParams::tile_rows`]: segments shared by two blocks, whose warpgroups take them in turn ([`BF16`], up to 128 tokens).
pub const TILE_TURNS: i32 = 2;

/// [`ExpertsParams::tile_rows`]: 256 weight rows and 128 tokens, which are wgmma's M operand ([`BF16`], [`W8A8`] with
/// [`LayerWeights::block_scales`], and [`W4A8`] with [`MANY_ROWS`]).
pub const TILE_TOKEN_ROWS: i32 = 3;
/// [`ExpertsParams::tile_rows`]: as the value before, and two blocks with neighbouring token tiles share their weights.
pub const TILE_TOKEN_PAIRS: i32 = 4;

/// Packs the gate and up matrices.
pub const PACK_GATE_UP: i32 = 0;
/// Packs the down matrix.
pub const PACK_DOWN: i32 = 1;

/// One layer's weights, in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerWeights {
    /// Panels or units of gate and up.
    pub gate_up: u64,
    /// Panels or units of down.
    pub down: u64,
    /// f32 `[experts, 2, inter]`, or 0.
    pub gate_up_bias: u64,
    /// f32 `[experts, hidden]`, or 0.
    pub down_bias: u64,
    /// All but bf16: f32 `[experts, 2, inter]`.
    pub gate_up_scale: u64,
    /// All but bf16: f32 `[experts, hidden]`.
    pub down_scale: u64,
    /// [`W8A8`]: 1 if 128 neighbouring rows of each matrix, from a multiple of 128 on, have the same scales of k blocks, or 0.
    pub block_scales: u64,
}

/// See `ExpertdExpertsParams` in `experts.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertsParams {
    /// Table of [`LayerWeights`].
    pub layers: u64,
    /// u32: index of the layer in the table.
    pub layer: u64,
    /// i32 `[experts + 1]`.
    pub expert_offsets: u64,
    /// i32 `[assignments]`.
    pub row_index: u64,
    /// f32 `[assignments]`.
    pub row_weight: u64,
    /// Rows of `x_format`.
    pub x: u64,
    /// Out: bf16 `[assignments, hidden]`.
    pub y: u64,
    /// Workspace bf16 `[hidden / 64, panel_rows, 64]`; [`W8A8`], [`W4A8`]: e4m3 `[ceil(hidden / 128), panel_rows, 128]`.
    pub x_panels: u64,
    /// Workspace bf16 `[inter / 64, panel_rows, 64]`; [`W8A8`], [`W4A8`]: e4m3 `[inter / 128, panel_rows, 128]`.
    pub h: u64,
    /// [`W8A8`], [`W4A8`]: workspace f32 `[ceil(hidden / 128), panel_rows]`.
    pub x_scales: u64,
    /// [`W8A8`], [`W4A8`]: workspace f32 `[inter / 128, panel_rows]`.
    pub h_scales: u64,
    /// u32 `[state_words(experts)]`, zero before the first launch.
    pub state: u64,
    /// u32 error word, or 0.
    pub error: u64,
    /// Distance between rows of `x`, in bytes.
    pub x_stride: u64,
    /// Number of rows of the workspaces: at least the largest number of assignments + 7 * experts.
    pub panel_rows: i32,
    /// Number of local experts.
    pub experts: i32,
    /// Elements of a row.
    pub hidden: i32,
    /// Intermediate size.
    pub inter: i32,
    /// [`SWIGLU`], [`SWIGLU_CLAMPED`] or [`SWIGLU_OAI`].
    pub activation: i32,
    /// Alpha of [`SWIGLU_OAI`].
    pub alpha: f32,
    /// Limit of [`SWIGLU_CLAMPED`] and [`SWIGLU_OAI`].
    pub limit: f32,
    /// 1 if the routing weight scales the input.
    pub weight_on_input: i32,
    /// Number of thread blocks; 0 means one per multiprocessor.
    pub blocks: i32,
    /// Widest token tile; 0 lets the device choose.
    pub tile_tokens: i32,
    /// 0: chosen on the device. [`TILE_TALL`], [`TILE_TURNS`]; other values: `experts.h`.
    pub tile_rows: i32,
    /// [`PROGRAMMATIC`], [`FEW_ROWS`] and [`MANY_ROWS`].
    pub flags: i32,
    /// [`BF16`] and others: of all layers in the table that are launched with these parameters.
    pub format: i32,
    /// [`ROWS_BF16`] or, with [`W8A8`] and [`W4A8`], [`ROWS_FP8`].
    pub x_format: i32,
    /// [`W8A8`], [`W4A8`]: 1 rounds the scales of x and h up to powers of two.
    pub power_of_two_scales: i32,
    /// Longest wait of a block for others, nanoseconds; 0: no limit.
    pub deadline_ns: u64,
}

/// See `ExpertdPackParams` in `experts.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PackParams {
    /// bf16 `[experts]` of gate `[inter, hidden]`, or of down `[hidden, inter]`.
    pub first: u64,
    /// bf16 `[experts]` of up; 0 for down.
    pub second: u64,
    /// Destination.
    pub panels: u64,
    /// Strides between experts of `first` and of `second`, in elements.
    pub expert_stride: u64,
    /// Number of experts.
    pub experts: i32,
    /// Elements of a row.
    pub hidden: i32,
    /// Intermediate size.
    pub inter: i32,
    /// [`PACK_GATE_UP`] or [`PACK_DOWN`].
    pub kind: i32,
}

/// One expert's matrix that is not bf16; see `ExpertdPackNarrowParams` in `experts.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PackNarrowParams {
    /// Codes of gate `[inter, hidden]` or down `[hidden, inter]`.
    pub first: u64,
    /// Codes of up; 0 for down.
    pub second: u64,
    /// FP8, W8A8: f32 `[rows, ceil(k / 128)]`; MXFP4, MXFP8, W4A8: e8m0 `[rows, k / 32]`; INT4: f16 `[rows, k / 32]`; NVFP4: e4m3
    /// `[rows, k / 16]`.
    pub first_scales: u64,
    /// Scales of up; 0 for down.
    pub second_scales: u64,
    /// [`INT4_ZEROS`]: bytes `[rows, k / 32]`; otherwise 0.
    pub first_zeros: u64,
    /// Zero points of up; 0 for down.
    pub second_zeros: u64,
    /// f32 `[2, inter]` or `[hidden]`, further factors of the rows.
    pub row_scales_in: u64,
    /// Out: f32 of the same shape.
    pub row_scales: u64,
    /// Out: [`matrix_bytes`] bytes.
    pub units: u64,
    /// Elements of a row.
    pub hidden: i32,
    /// Intermediate size.
    pub inter: i32,
    /// [`PACK_GATE_UP`] or [`PACK_DOWN`].
    pub kind: i32,
    /// Any but [`BF16`].
    pub format: i32,
}

/// [`RepackParams::source_format`]: the source is bf16.
pub const FROM_BF16: i32 = 0;
/// [`RepackParams::source_format`]: the source is f16.
pub const FROM_F16: i32 = 1;
/// [`RepackParams::source_format`]: the source is f32.
pub const FROM_F32: i32 = 2;
/// [`RepackParams::source_format`]: the source is FP8.
pub const FROM_FP8: i32 = 3;
/// [`RepackParams::source_format`]: the source is MXFP4.
pub const FROM_MXFP4: i32 = 4;
/// [`RepackParams::source_format`]: the source is NVFP4.
pub const FROM_NVFP4: i32 = 5;
/// [`RepackParams::source_format`]: the source is MXFP8.
pub const FROM_MXFP8: i32 = 6;
/// [`RepackParams::source_format`]: the source is INT4.
pub const FROM_INT4: i32 = 7;

/// [`RepackParams::scale_type`]: bf16.
pub const SCALES_BF16: i32 = 0;
/// [`RepackParams::scale_type`]: f16, with a factor of each row.
pub const SCALES_F16: i32 = 1;
/// [`RepackParams::scale_type`]: f32.
pub const SCALES_F32: i32 = 2;

/// One matrix of some experts that is packed for processors; see `ExpertdRepackParams` in `experts_repack.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RepackParams {
    /// Panels of the first expert as CPU ranks have them.
    pub source: u64,
    /// The first expert's scales apart from its panels; 0 if there are none.
    pub scales: u64,
    /// Destination of the first expert.
    pub panels: u64,
    /// Destination of row scales, `[experts, 2, inter]` or `[experts, hidden]`; 0 for bf16.
    pub row_scales: u64,
    /// Bytes between experts in the source.
    pub source_stride: u64,
    /// Bytes between experts in the destination.
    pub panel_stride: u64,
    /// Number of experts.
    pub experts: i32,
    /// Elements of a row of the destination, padded.
    pub hidden: i32,
    /// Intermediate size of the destination, padded.
    pub inter: i32,
    /// [`PACK_GATE_UP`] or [`PACK_DOWN`].
    pub kind: i32,
    /// Format of the destination: [`BF16`] and others.
    pub format: i32,
    /// Output features of each projection in the source, without padding.
    pub source_features: i32,
    /// Input features in the source, without padding.
    pub source_k: i32,
    /// Rows of a panel of the source.
    pub width: i32,
    /// [`FROM_BF16`] and others.
    pub source_format: i32,
    /// FP8: blocks of 32 input features that share a vector of scales.
    pub scale_blocks: i32,
    /// Groups with scales in a block of 32 input features; 0 for formats without scales in their blocks.
    pub block_groups: i32,
    /// [`SCALES_BF16`], [`SCALES_F16`] or [`SCALES_F32`].
    pub scale_type: i32,
    /// 1 if groups have zero points.
    pub has_zeros: i32,
    /// 0.
    pub reserved: i32,
}

const _: () = {
    assert!(size_of::<RepackParams>() == 104);
    assert!(size_of::<LayerWeights>() == 56);
    assert!(size_of::<ExpertsParams>() == 184);
    assert!(size_of::<PackParams>() == 48);
    assert!(size_of::<PackNarrowParams>() == 88);
};

unsafe extern "C" {
    fn expertd_experts_state_words(experts: i32) -> u32;
    fn expertd_experts_setup() -> c_int;
    fn expertd_experts_launch(params: *const ExpertsParams, stream: *mut c_void) -> c_int;
    fn expertd_experts_pack(params: *const PackParams, stream: *mut c_void) -> c_int;
    fn expertd_experts_pack_narrow(params: *const PackNarrowParams, stream: *mut c_void) -> c_int;
    fn expertd_experts_repack(params: *const RepackParams, stream: *mut c_void) -> c_int;
    fn expertd_portable_experts_repack(params: *const RepackParams, stream: *mut c_void) -> c_int;
    fn expertd_experts_repack_host(params: *const RepackParams) -> c_int;
    fn expertd_portable_experts_setup() -> c_int;
    fn expertd_portable_experts_launch(params: *const ExpertsParams, stream: *mut c_void) -> c_int;
    fn expertd_portable_experts_pack(params: *const PackParams, stream: *mut c_void) -> c_int;
    fn expertd_portable_experts_pack_narrow(params: *const PackNarrowParams, stream: *mut c_void) -> c_int;
    fn expertd_experts_pack_host(params: *const PackParams, first: u64, count: u64) -> c_int;
    fn expertd_experts_pack_narrow_host(params: *const PackNarrowParams, first: u64, count: u64) -> c_int;
    fn expertd_experts_matrix_bytes(format: i32, kind: i32, hidden: i32, inter: i32) -> u64;
}

/// Size of [`ExpertsParams::state`], in 32-bit words.
#[must_use]
pub fn state_words(experts: usize) -> usize {
    // SAFETY: the function is pure.
    unsafe { expertd_experts_state_words(i32::try_from(experts).unwrap_or(i32::MAX)) as usize }
}

/// Prepares the kernels. Must be called once per process and device, before the first launch or capture.
///
/// # Errors
/// If the kernels were not compiled for the device's architecture.
pub fn setup() -> Result<(), LaunchError> {
    // SAFETY: the function only needs a current context, and reports an error if there is none.
    check("experts_setup", unsafe {
        match KernelPath::chosen() {
            KernelPath::Hopper => expertd_experts_setup(),
            KernelPath::Portable => expertd_portable_experts_setup(),
        }
    })
}

/// Launches the whole expert MLP.
///
/// # Safety
/// Addresses must be valid as documented until the launch, or the last replay of its graph, has ended.
pub unsafe fn experts(params: &ExpertsParams, stream: CUstream) -> Result<(), LaunchError> {
    // SAFETY: the caller's promise.
    check("experts", unsafe {
        match KernelPath::chosen() {
            KernelPath::Hopper => expertd_experts_launch(params, stream.cast()),
            KernelPath::Portable => expertd_portable_experts_launch(params, stream.cast()),
        }
    })
}

/// Launches the conversion of row-major weights to panels.
///
/// # Safety
/// Addresses must be valid as documented until the launch has ended.
pub unsafe fn pack(params: &PackParams, stream: CUstream) -> Result<(), LaunchError> {
    // SAFETY: the caller's promise.
    check("experts_pack", unsafe {
        match KernelPath::chosen() {
            KernelPath::Hopper => expertd_experts_pack(params, stream.cast()),
            KernelPath::Portable => expertd_portable_experts_pack(params, stream.cast()),
        }
    })
}

/// Launches the conversion of panels of CPU ranks to the layout of [`experts`].
///
/// # Safety
/// Addresses must be valid as documented until the launch has ended.
pub unsafe fn repack(params: &RepackParams, stream: CUstream) -> Result<(), LaunchError> {
    // SAFETY: the caller's promise.
    check("experts_repack", unsafe {
        match KernelPath::chosen() {
            KernelPath::Hopper => expertd_experts_repack(params, stream.cast()),
            KernelPath::Portable => expertd_portable_experts_repack(params, stream.cast()),
        }
    })
}

/// Converts panels of CPU ranks on the host, as [`repack`] does on the device.
///
/// # Errors
/// If sizes are invalid, or the source cannot become the format of the destination.
///
/// # Safety
/// Addresses must be of host memory with the documented sizes, and nothing else may access the destination.
pub unsafe fn repack_host(params: &RepackParams) -> Result<(), LaunchError> {
    // SAFETY: the caller's promise.
    check("experts_repack_host", unsafe { expertd_experts_repack_host(params) })
}

/// Size on the device of one expert's gate and up ([`PACK_GATE_UP`]) or down ([`PACK_DOWN`]) matrices, in bytes. `hidden` and
/// `inter` are multiples of [`PANEL`].
#[must_use]
pub fn matrix_bytes(format: i32, kind: i32, hidden: usize, inter: usize) -> u64 {
    let size = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    // SAFETY: the function is pure.
    unsafe { expertd_experts_matrix_bytes(format, kind, size(hidden), size(inter)) }
}

/// Launches the conversion of a matrix that is not bf16 to units.
///
/// # Safety
/// Addresses must be valid as documented until the launch has ended.
pub unsafe fn pack_narrow(params: &PackNarrowParams, stream: CUstream) -> Result<(), LaunchError> {
    // SAFETY: the caller's promise.
    check("experts_pack_narrow", unsafe {
        match KernelPath::chosen() {
            KernelPath::Hopper => expertd_experts_pack_narrow(params, stream.cast()),
            KernelPath::Portable => expertd_portable_experts_pack_narrow(params, stream.cast()),
        }
    })
}

/// Converts row-major weights of one expert to panels on the host. `panels` are numbers of panels of [`PANEL`] k.
///
/// # Errors
/// If sizes are invalid.
///
/// # Safety
/// Addresses must be of host memory with the documented sizes, and nothing else may access the panels that are written.
pub unsafe fn pack_host(params: &PackParams, panels: Range<u64>) -> Result<(), LaunchError> {
    let count = panels.end.saturating_sub(panels.start);
    // SAFETY: the caller's promise.
    check("experts_pack_host", unsafe { expertd_experts_pack_host(params, panels.start, count) })
}

/// Rows of a unit.
pub const UNIT_ROWS: usize = 16;

/// Converts a matrix that is not bf16 to units on the host. `units` are numbers of units of [`UNIT_ROWS`] rows.
///
/// # Errors
/// If sizes are invalid.
///
/// # Safety
/// Addresses must be of host memory with the documented sizes, and nothing else may access the units and row scales that are
/// written.
pub unsafe fn pack_narrow_host(params: &PackNarrowParams, units: Range<u64>) -> Result<(), LaunchError> {
    let count = units.end.saturating_sub(units.start);
    // SAFETY: the caller's promise.
    check("experts_pack_narrow_host", unsafe { expertd_experts_pack_narrow_host(params, units.start, count) })
}
