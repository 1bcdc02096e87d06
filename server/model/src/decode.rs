//! Conversion of stored weight elements to values.

pub use crate::codes::{FP4, e8m0_bf16, fp4_e2m1, fp8_e4m3};
use crate::{GroupScales, INT4_ZERO, MatrixView, ScaleFormat, Scales, WeightFormat};

impl MatrixView<'_> {
    /// Index of element `(row, col)`, in elements.
    fn element(&self, row: usize, col: usize) -> usize {
        self.packing.index(row, col, self.row_stride, self.col_stride)
    }

    /// The `N` bytes of element `(row, col)`.
    ///
    /// # Panics
    /// If [`check`](Self::check) fails on this view.
    pub fn bits<const N: usize>(&self, row: usize, col: usize) -> [u8; N] {
        let at = self.element(row, col) * N;
        *self.data[at..].first_chunk().expect("MatrixView::check covers all elements")
    }

    /// The four bits of an element of MXFP4, NVFP4 or INT4.
    pub fn nibble(&self, row: usize, col: usize) -> u8 {
        let at = self.element(row, col);
        self.data[at / 2] >> (at % 2 * 4) & 15
    }

    /// The multiplier of an element, with the factor of its matrix; 1 if the matrix has no scales.
    pub fn scale(&self, row: usize, col: usize) -> f32 {
        match &self.scales {
            Scales::None => 1.0,
            Scales::Block { values, block_rows, block_cols } => {
                values[row / block_rows * self.cols.div_ceil(*block_cols) + col / block_cols]
            }
            Scales::Mx { .. } => f32::from_bits(u32::from(e8m0_bf16(self.exponent(row, col))) << 16),
            Scales::Groups(scales) => scales.scale(row, col / scales.cols),
        }
    }

    /// The E8M0 exponent of an element of MXFP4 or MXFP8.
    pub fn exponent(&self, row: usize, col: usize) -> u8 {
        match &self.scales {
            Scales::Mx { exponents, row_stride } => exponents[row * row_stride + col / 32],
            _ => 127,
        }
    }

    /// The zero point of an INT4 element.
    pub fn zero_point(&self, row: usize, col: usize) -> u8 {
        match &self.scales {
            Scales::Groups(scales) => scales.zero_point(row, col / scales.cols),
            _ => INT4_ZERO,
        }
    }

    /// The value of element `(row, col)`, scaled.
    pub fn value(&self, row: usize, col: usize) -> f32 {
        match self.format {
            WeightFormat::F32 => f32::from_le_bytes(self.bits(row, col)),
            WeightFormat::F16 => half::f16::from_le_bytes(self.bits(row, col)).to_f32(),
            WeightFormat::Bf16 => half::bf16::from_le_bytes(self.bits(row, col)).to_f32(),
            WeightFormat::Fp8E4m3 | WeightFormat::Mxfp8 => {
                fp8_e4m3(self.bits::<1>(row, col)[0]) * self.scale(row, col)
            }
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => {
                fp4_e2m1(self.nibble(row, col)) * self.scale(row, col)
            }
            WeightFormat::Int4 => {
                let code = i16::from(self.nibble(row, col)) - i16::from(self.zero_point(row, col));
                f32::from(code) * self.scale(row, col)
            }
        }
    }
}

impl GroupScales<'_> {
    /// The scale of group `group` of row `row`, multiplied with the factor.
    ///
    /// # Panics
    /// If [`MatrixView::check`] fails on the matrix of these scales.
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        let at = (row * self.row_stride + group * self.group_stride) * self.format.bytes();
        let bytes = &self.data[at..];
        let scale = match (self.format, bytes) {
            (ScaleFormat::F32, &[a, b, c, d, ..]) => f32::from_le_bytes([a, b, c, d]),
            (ScaleFormat::F16, &[a, b, ..]) => half::f16::from_le_bytes([a, b]).to_f32(),
            (ScaleFormat::Bf16, &[a, b, ..]) => half::bf16::from_le_bytes([a, b]).to_f32(),
            (ScaleFormat::Fp8E4m3, &[code, ..]) => fp8_e4m3(code),
            _ => panic!("MatrixView::check covers all scales"),
        };
        scale * self.factor
    }

    /// The zero point of group `group` of row `row`.
    ///
    /// # Panics
    /// If [`MatrixView::check`] fails on the matrix of these scales.
    pub fn zero_point(&self, row: usize, group: usize) -> u8 {
        let Some(zeros) = &self.zeros else { return INT4_ZERO };
        let at = zeros.packing.index(row, group, zeros.row_stride, zeros.group_stride);
        if zeros.bias == 0 {
            return zeros.data[at / 2] >> (at % 2 * 4) & 15;
        }
        let word = zeros.data[at / 8 * 4..].first_chunk().expect("MatrixView::check covers whole words");
        let word = u32::from_le_bytes(*word).wrapping_add(0x1111_1111 * u32::from(zeros.bias));
        (word >> (at % 8 * 4)) as u8 & 15
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_codes_match_the_definition() {
        // The expected value follows from the definition: sign, 4 exponent bits of bias 7, 3 mantissa bits.
        for code in 0..=255_u8 {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
            let magnitude = if exponent == 0 {
                mantissa * 2f64.powi(-6)
            } else {
                (1.0 + mantissa) * 2f64.powi(exponent - 7)
            };
            let value = f64::from(fp8_e4m3(code));
            if code & 0x7f == 0x7f {
                assert!(value.is_nan());
            } else {
                assert_eq!(value, if code < 128 { magnitude } else { -magnitude }, "{code:#x}");
            }
        }
        assert_eq!(fp8_e4m3(0x7e), 448.0);
        assert!(fp8_e4m3(0x80).is_sign_negative());
    }

    #[test]
    fn fp4_and_e8m0_codes_match_the_definition() {
        for code in 0..16_u8 {
            let (exponent, mantissa) = (i32::from(code >> 1 & 3), f32::from(code & 1) / 2.0);
            let magnitude = if exponent == 0 { mantissa } else { (1.0 + mantissa) * 2f32.powi(exponent - 1) };
            assert_eq!(fp4_e2m1(code), if code < 8 { magnitude } else { -magnitude });
        }
        for code in 0..255_u8 {
            let value = f32::from_bits(u32::from(e8m0_bf16(code)) << 16);
            assert_eq!(f64::from(value), 2f64.powi(i32::from(code) - 127));
        }
        assert!(f32::from_bits(u32::from(e8m0_bf16(255)) << 16).is_nan());
    }
}
