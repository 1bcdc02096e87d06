//! Encoding of token rows and routing on the wire: row-major, little-endian.

use bytes::Bytes;
use half::{bf16, f16};

use crate::DType;

/// Encodes `values` (row-major) in `dtype`, rounding to nearest.
#[must_use]
pub fn encode(values: &[f32], dtype: DType) -> Bytes {
    let mut out = Vec::with_capacity(values.len() * dtype.size());
    for &value in values {
        match dtype {
            DType::Bf16 => out.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
            DType::F16 => out.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
            DType::F32 => out.extend_from_slice(&value.to_le_bytes()),
        }
    }
    out.into()
}

/// Decodes rows of `dtype`; bytes beyond the last whole element are ignored.
#[must_use]
pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::Bf16 => {
            bytes.as_chunks::<2>().0.iter().map(|&pair| bf16::from_le_bytes(pair).to_f32()).collect()
        }
        DType::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|&pair| f16::from_le_bytes(pair).to_f32()).collect()
        }
        DType::F32 => decode_f32(bytes),
    }
}

/// Decodes little-endian f32, such as `topk_weights`.
#[must_use]
pub fn decode_f32(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

/// Decodes little-endian i32, such as `topk_ids`.
#[must_use]
pub fn decode_i32(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| i32::from_le_bytes(word)).collect()
}

/// Encodes i32 little-endian.
#[must_use]
pub fn encode_i32(values: &[i32]) -> Bytes {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Relative L2 error of `got` against `wanted`: `|got - wanted| / |wanted|`, in f64.
///
/// If `wanted` is zero, the result is 0 for equal rows and infinity otherwise. Values that are not finite, and rows of
/// different lengths, give infinity, so that they fail every comparison with a tolerance.
#[must_use]
pub fn relative_error(got: &[f32], wanted: &[f32]) -> f64 {
    if got.len() != wanted.len() || got.iter().any(|value| !value.is_finite()) {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0_f64, 0.0_f64);
    for (&g, &w) in got.iter().zip(wanted) {
        difference += (f64::from(g) - f64::from(w)).powi(2);
        norm += f64::from(w).powi(2);
    }
    if difference == 0.0 {
        0.0
    } else if norm == 0.0 || !norm.is_finite() {
        f64::INFINITY
    } else {
        (difference / norm).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_the_wire_in_every_dtype() {
        let values = [0.0, 1.0, -2.5, 0.000_123, 65504.0, -3.0e-5];
        for (dtype, tolerance) in [(DType::F32, 0.0), (DType::F16, 1e-3), (DType::Bf16, 4e-3)] {
            let bytes = encode(&values, dtype);
            assert_eq!(bytes.len(), values.len() * dtype.size());
            let back = decode(&bytes, dtype);
            for (&a, &b) in values.iter().zip(&back) {
                assert!((a - b).abs() <= tolerance * a.abs() + 6e-8, "{dtype}: {a} became {b}");
            }
        }
        assert_eq!(decode_i32(&encode_i32(&[-1, 7, i32::MAX])), [-1, 7, i32::MAX]);
    }

    #[test]
    fn errors_are_relative_and_bad_values_are_infinite() {
        assert_eq!(relative_error(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!((relative_error(&[1.1, 0.0], &[1.0, 0.0]) - 0.1).abs() < 1e-6);
        assert_eq!(relative_error(&[f32::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[0.0]), f64::INFINITY);
        assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
        assert_eq!(relative_error(&[1.0], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[f32::NAN]), f64::INFINITY);
    }
}
