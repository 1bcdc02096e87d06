//! The tensors of one linear module, in any format.

use super::SynthFormat;
use super::configs::fp8_by_channel;
use super::layout::{
    Element, FP4_DEVIATION, FP8_DEVIATION, FP8_SCALE, Fill, INT4_DEVIATION, Layout, deviation,
};

impl Layout<'_> {
    /// Adds the matrix `[rows, cols]` of a module with its scales and zero points.
    pub(super) fn linear(&mut self, module: &str, [rows, cols]: [usize; 2], format: SynthFormat) {
        let name = |leaf: &str| format!("{module}.{leaf}");
        let deviation = deviation(cols);
        let group = self.config.int4_group();
        let int4_scales = Fill::Scales(deviation / INT4_DEVIATION);
        match format {
            SynthFormat::Fp8 => {
                let fill = Fill::Scales(deviation / FP8_DEVIATION);
                self.push(name("weight"), Element::Fp8, &[rows, cols], Fill::Fp8Codes);
                if fp8_by_channel(self.family) {
                    self.push(name("weight_scale"), Element::Bf16, &[rows, 1], fill);
                } else {
                    let grid = [rows.div_ceil(128), cols.div_ceil(128)];
                    self.push(name("weight_scale_inv"), Element::F32, &grid, fill);
                }
            }
            SynthFormat::Mxfp8 => {
                let fill = Fill::Exponents(deviation / FP8_DEVIATION);
                self.push(name("weight"), Element::Fp8, &[rows, cols], Fill::Fp8Codes);
                self.push(name("weight_scale"), Element::U8, &[rows, cols / 32], fill);
            }
            SynthFormat::Nvfp4 => {
                let factor = Fill::Scales(deviation / (FP4_DEVIATION * FP8_SCALE));
                self.push(name("weight"), Element::U8, &[rows, cols / 2], Fill::Fp4Codes);
                self.push(name("weight_scale"), Element::Fp8, &[rows, cols / 16], Fill::Fp8Scales);
                self.push(name("weight_scale_2"), Element::F32, &[], factor);
                self.push(name("input_scale"), Element::F32, &[], Fill::Scales(0.01));
            }
            SynthFormat::Int4 => {
                self.push(name("weight_packed"), Element::I32, &[rows, cols / 8], Fill::Words);
                self.push(name("weight_scale"), Element::Bf16, &[rows, cols / group], int4_scales);
                self.push(name("weight_shape"), Element::I32, &[2], Fill::Numbers([rows, cols]));
            }
            SynthFormat::Int4Gptq => {
                self.push(name("qweight"), Element::I32, &[cols / 8, rows], Fill::Words);
                self.push(name("qzeros"), Element::I32, &[cols / group, rows / 8], Fill::ZeroPoints(3));
                self.push(name("scales"), Element::F16, &[cols / group, rows], int4_scales);
                self.push(name("g_idx"), Element::I32, &[cols], Fill::Groups { cols: group });
            }
            SynthFormat::Int4Awq => {
                self.push(name("qweight"), Element::I32, &[cols, rows / 8], Fill::Words);
                self.push(name("qzeros"), Element::I32, &[cols / group, rows / 8], Fill::ZeroPoints(4));
                self.push(name("scales"), Element::F16, &[cols / group, rows], int4_scales);
            }
            SynthFormat::Bf16 | SynthFormat::F16 | SynthFormat::F32 | SynthFormat::Mxfp4 => {
                self.push(name("weight"), self.plain(), &[rows, cols], Fill::Normal(deviation));
            }
        }
    }
}
