//! Conversion of rows between their dtype in staging and f32, in which CPU ranks compute.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use expertd_shm::SharedSlice;
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

/// Words of a buffer that stays in the first cache.
const BUFFER_WORDS: usize = 512;

/// Widens elements of `dtype` from byte `at` of a memory that its client may write meanwhile. Each byte is read once.
///
/// # Panics
/// If the elements exceed the memory.
pub fn widen_shared(memory: &SharedSlice<u8>, mut at: usize, dtype: DType, out: &mut [f32]) {
    if dtype == DType::F32 {
        memory.load_bytes(at, bytemuck::cast_slice_mut(out));
        return;
    }
    let mut buffer = [0_u64; BUFFER_WORDS];
    let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
    for out in out.chunks_mut(buffer.len() / dtype.size()) {
        let bytes = &mut buffer[..out.len() * dtype.size()];
        memory.load_bytes(at, bytes);
        widen(bytes, dtype, out);
        at += bytes.len();
    }
}

/// Rounds to `dtype` as [`narrow`] does, into the bytes from byte `at` of a memory that its client may access meanwhile.
///
/// # Panics
/// If the elements exceed the memory.
pub fn narrow_shared(values: &[f32], dtype: DType, memory: &SharedSlice<u8>, mut at: usize) {
    if dtype == DType::F32 {
        memory.store_bytes(at, bytemuck::cast_slice(values));
        return;
    }
    let mut buffer = [0_u64; BUFFER_WORDS];
    let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
    for values in values.chunks(buffer.len() / dtype.size()) {
        let bytes = &mut buffer[..values.len() * dtype.size()];
        narrow(values, dtype, bytes);
        memory.store_bytes(at, bytes);
        at += bytes.len();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
    fn shared_memory_converts_as_own_memory_does() {
        let region = expertd_shm::SharedRegion::create("test", 1 << 16).unwrap();
        let memory = region.slice::<u8>(0, 1 << 16).unwrap();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            // More elements than the buffer holds, and an odd rest.
            let elements = 2 * BUFFER_WORDS * 8 / dtype.size() + 5;
            let values: Vec<f32> = (0..elements).map(|i| (i as f32 - 700.0) * 0.37).collect();
            let mut words = vec![0_u32; (elements * dtype.size()).div_ceil(4)];
            let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..elements * dtype.size()];
            narrow(&values, dtype, bytes);
            let at = 64 + dtype.size();
            memory.store_bytes(0, &vec![0x5a; 1 << 16]);
            narrow_shared(&values, dtype, &memory, at);
            let mut written = vec![0; 1 << 16];
            memory.load_bytes(0, &mut written);
            assert!(written[at..at + bytes.len()] == *bytes, "{dtype}");
            let around = written[..at].iter().chain(&written[at + bytes.len()..]);
            assert!(around.into_iter().all(|&byte| byte == 0x5a), "{dtype}");
            let (mut own, mut shared) = (vec![0.0; elements], vec![0.0; elements]);
            widen(bytes, dtype, &mut own);
            widen_shared(&memory, at, dtype, &mut shared);
            assert_eq!(own, shared, "{dtype}");
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
