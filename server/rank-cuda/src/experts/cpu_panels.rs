//! Matrices that are packed for processors, as kernels read them that rewrite copies of them.

use expertd_compute::linalg::{GroupLayout, PackedForm, PackedScale};
use expertd_kernels::experts::{
    FROM_BF16, FROM_F16, FROM_F32, FROM_FP8, FROM_INT4, FROM_MXFP4, FROM_MXFP8, FROM_NVFP4, PACK_DOWN,
    PACK_GATE_UP, RepackParams, SCALES_BF16, SCALES_F16, SCALES_F32,
};
use expertd_model::WeightFormat;

use super::DeviceFormat;
use crate::format::{FP8_COLS, INT4_COLS, MX_COLS, NVFP4_COLS};

/// How a matrix of this form becomes one in `format`, without addresses, strides and the sizes of the destination; `None` if no kernel
/// rewrites it, because it does not hold all that the format needs.
pub(crate) fn rewriting(form: &PackedForm, format: DeviceFormat) -> Option<RepackParams> {
    let from_groups = |cols: usize, scale: Option<PackedScale>| {
        let fits = |groups: GroupLayout| {
            MX_COLS / groups.per_block >= cols && scale.is_none_or(|scale| scale == groups.scale)
        };
        form.groups.is_some_and(fits)
    };
    let is_held = match (form.format, format) {
        (_, DeviceFormat::Bf16) => true,
        (WeightFormat::Fp8E4m3, DeviceFormat::Fp8 | DeviceFormat::W8a8) => {
            (form.scale_blocks * MX_COLS).is_multiple_of(FP8_COLS) || form.scale_blocks * MX_COLS >= form.k
        }
        (WeightFormat::Mxfp4, DeviceFormat::Mxfp4) | (WeightFormat::Mxfp8, DeviceFormat::Mxfp8) => true,
        (WeightFormat::Nvfp4, DeviceFormat::Nvfp4) => from_groups(NVFP4_COLS, Some(PackedScale::F16)),
        (WeightFormat::Int4, DeviceFormat::Int4Zeros) => from_groups(INT4_COLS, None),
        (WeightFormat::Int4, DeviceFormat::Int4) => {
            from_groups(INT4_COLS, None) && form.groups.is_some_and(|groups| !groups.zeros)
        }
        _ => false,
    };
    let groups = form.groups;
    is_held.then(|| RepackParams {
        kind: if form.interleaved { PACK_GATE_UP } else { PACK_DOWN },
        format: format.code(),
        source_features: (if form.interleaved { form.n / 2 } else { form.n }) as i32,
        source_k: form.k as i32,
        width: form.level.panel_width() as i32,
        source_format: match form.format {
            WeightFormat::Bf16 => FROM_BF16,
            WeightFormat::F16 => FROM_F16,
            WeightFormat::F32 => FROM_F32,
            WeightFormat::Fp8E4m3 => FROM_FP8,
            WeightFormat::Mxfp4 => FROM_MXFP4,
            WeightFormat::Nvfp4 => FROM_NVFP4,
            WeightFormat::Mxfp8 => FROM_MXFP8,
            WeightFormat::Int4 => FROM_INT4,
        },
        scale_blocks: form.scale_blocks as i32,
        block_groups: groups.map_or(0, |groups| groups.per_block as i32),
        scale_type: groups.map_or(0, |groups| match groups.scale {
            PackedScale::Bf16 => SCALES_BF16,
            PackedScale::F16 => SCALES_F16,
            PackedScale::F32 => SCALES_F32,
        }),
        has_zeros: i32::from(groups.is_some_and(|groups| groups.zeros)),
        ..RepackParams::default()
    })
}
