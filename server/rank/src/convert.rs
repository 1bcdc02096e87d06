//! Conversion of rows between their dtype in staging and f32, in which CPU ranks compute.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use expertd_types::DType;

/// Widens `bytes`, which hold aligned elements of `dtype`, to f32 without rounding.
pub fn widen(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(bytes)),
        DType::F16 => bytemuck::cast_slice::<u8, f16>(bytes).convert_to_f32_slice(out),
        DType::Bf16 => bytemuck::cast_slice::<u8, bf16>(bytes).convert_to_f32_slice(out),
    }
}

/// Rounds to `dtype`, to nearest, ties to even; values beyond the range of f16 become infinities.
pub fn narrow(values: &[f32], dtype: DType, bytes: &mut [u8]) {
    match dtype {
        DType::F32 => bytemuck::cast_slice_mut(bytes).copy_from_slice(values),
        DType::F16 => bytemuck::cast_slice_mut::<u8, f16>(bytes).convert_from_f32_slice(values),
        DType::Bf16 => bytemuck::cast_slice_mut::<u8, bf16>(bytes).convert_from_f32_slice(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_16_bit_pattern_survives_the_round_trip() {
        for dtype in [DType::F16, DType::Bf16] {
            let patterns: Vec<u16> = (0..=u16::MAX).collect();
            let bytes: &[u8] = bytemuck::cast_slice(&patterns);
            let mut wide = vec![f32::NAN; patterns.len()];
            widen(bytes, dtype, &mut wide);
            let mut back = vec![0xffff_u16; patterns.len()];
            narrow(&wide, dtype, bytemuck::cast_slice_mut(&mut back));
            for ((pattern, value), back) in patterns.iter().zip(&wide).zip(&back) {
                assert!(value.is_nan() || pattern == back, "{dtype} {pattern:#x} -> {value} -> {back:#x}");
            }
        }
    }

    #[test]
    fn ties_round_to_even() {
        let mut bytes = [0u16; 2];
        // 1 + 2^-8 and 1 + 3 * 2^-8 lie halfway between two bf16 values.
        narrow(&[1.0 + 0.003_906_25, 1.0 + 0.011_718_75], DType::Bf16, bytemuck::cast_slice_mut(&mut bytes));
        assert_eq!(bytes, [0x3f80, 0x3f82]);
    }
}
