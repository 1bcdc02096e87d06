//! Rows on the wire: row-major, little-endian.

use bytes::Bytes;
use half::{bf16, f16};

use crate::args::DType;

/// Encodes `values` as `dtype`.
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

/// Decodes rows of `dtype`.
#[must_use]
pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let (pairs, words) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
    match dtype {
        DType::Bf16 => pairs.iter().map(|&pair| bf16::from_le_bytes(pair).to_f32()).collect(),
        DType::F16 => pairs.iter().map(|&pair| f16::from_le_bytes(pair).to_f32()).collect(),
        DType::F32 => words.iter().map(|&word| f32::from_le_bytes(word)).collect(),
    }
}

/// Relative L2 error of `got` compared with `wanted`; infinite if the lengths differ or a value is not finite.
#[must_use]
pub fn relative_error(got: &[f32], wanted: &[f32]) -> f64 {
    if got.len() != wanted.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0_f64, 0.0_f64);
    for (&g, &w) in got.iter().zip(wanted) {
        difference += (f64::from(g) - f64::from(w)).powi(2);
        norm += f64::from(w).powi(2);
    }
    match (difference, norm) {
        (0.0, _) => 0.0,
        (d, n) if d.is_finite() && n.is_finite() && n > 0.0 => (d / n).sqrt(),
        _ => f64::INFINITY,
    }
}
