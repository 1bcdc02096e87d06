//! The tensors of a synthesised checkpoint and the distribution of their elements.

use super::configs::{VOCAB, dense_layers, fp8_by_channel, hashed_layers};
use super::{SynthConfig, SynthFormat};
use crate::Family;
use crate::family::{SharedWidth, StoredLayout};

/// The distribution of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// Normal, with this standard deviation.
    Normal(f32),
    /// FP8 codes of normal numbers with a standard deviation of [`FP8_DEVIATION`].
    Fp8Codes,
    /// Scales, uniform from half to one and a half times this mean.
    Scales(f32),
    /// Pairs of FP4 codes, all equally likely.
    Fp4Codes,
    /// E8M0 exponents of powers of two near this number.
    Exponents(f32),
    /// Words of eight 4-bit integers, all equally likely.
    Words,
    /// Words of eight zero points, uniform from this number to this number + 7.
    ZeroPoints(u8),
    /// FP8 codes of scales, uniform from half to one and a half times [`FP8_SCALE`].
    Fp8Scales,
    /// These numbers.
    Numbers([usize; 2]),
    /// The group of each column.
    Groups {
        /// Columns of a group.
        cols: usize,
    },
    /// Distinct experts in each row.
    Experts {
        /// Number of experts to draw from.
        count: usize,
    },
}

/// Standard deviation of FP8 codes, in units of their scale; it uses most of the range up to 448.
pub(super) const FP8_DEVIATION: f32 = 96.0;
/// Standard deviation of uniformly drawn FP4 codes.
pub(super) const FP4_DEVIATION: f32 = 2.926;
/// Standard deviation of uniformly drawn INT4 codes, minus their zero points.
pub(super) const INT4_DEVIATION: f32 = 5.0;
/// Mean of FP8 scales.
pub(super) const FP8_SCALE: f32 = 64.0;

/// Element types, named as in safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Bf16,
    F16,
    F32,
    Fp8,
    U8,
    I32,
    I64,
}

impl Element {
    pub(super) fn name(self) -> &'static str {
        match self {
            Element::Bf16 => "BF16",
            Element::F16 => "F16",
            Element::F32 => "F32",
            Element::Fp8 => "F8_E4M3",
            Element::U8 => "U8",
            Element::I32 => "I32",
            Element::I64 => "I64",
        }
    }

    pub(super) fn size(self) -> usize {
        match self {
            Element::Fp8 | Element::U8 => 1,
            Element::Bf16 | Element::F16 => 2,
            Element::F32 | Element::I32 => 4,
            Element::I64 => 8,
        }
    }
}

/// One tensor to write.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) element: Element,
    pub(super) shape: Vec<usize>,
    pub(super) fill: Fill,
}

impl Tensor {
    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.elements() * self.element.size()) as u64
    }
}

/// All tensors, in the order in which they are written.
pub(super) fn tensors(config: &SynthConfig, family: &'static Family) -> Vec<Tensor> {
    let mut layout = Layout { config, family, tensors: Vec::new() };
    let hashed = hashed_layers(config, family);
    for layer in dense_layers(config, family)..config.layers {
        let base = format!("model.layers.{layer}.{}.", family.block[0]);
        layout.gate(&base, layer < hashed);
        layout.experts(&base);
        layout.shared(&base);
    }
    layout.tensors
}

/// The tensors of a checkpoint so far.
pub(super) struct Layout<'a> {
    pub(super) config: &'a SynthConfig,
    pub(super) family: &'static Family,
    tensors: Vec<Tensor>,
}

impl Layout<'_> {
    pub(super) fn push(&mut self, name: String, element: Element, shape: &[usize], fill: Fill) {
        self.tensors.push(Tensor { name, element, shape: shape.to_vec(), fill });
    }

    /// The element type of unquantised tensors.
    pub(super) fn plain(&self) -> Element {
        match self.config.format {
            SynthFormat::F16 => Element::F16,
            SynthFormat::F32 => Element::F32,
            _ => Element::Bf16,
        }
    }

    fn gate(&mut self, base: &str, hashed: bool) {
        let (names, plain) = (self.family.gate, self.plain());
        let SynthConfig { experts, hidden, top_k, .. } = *self.config;
        self.push(
            format!("{base}{}", names.weight[0]),
            plain,
            &[experts, hidden],
            Fill::Normal(deviation(hidden)),
        );
        if let Some(bias) = names.bias {
            self.push(format!("{base}{bias}"), plain, &[experts], Fill::Normal(0.3));
        }
        if hashed {
            self.push(
                format!("{base}{}", names.table),
                Element::I64,
                &[VOCAB, top_k],
                Fill::Experts { count: experts },
            );
        } else if let Some(correction) = names.correction.first() {
            // Ernie stores the bias with a leading dimension for groups, of size 1.
            let shape: &[usize] =
                if correction.starts_with("moe_statics") { &[1, experts] } else { &[experts] };
            self.push(format!("{base}{correction}"), Element::F32, shape, Fill::Normal(0.05));
        }
    }

    fn experts(&mut self, base: &str) {
        let SynthConfig { experts, width, hidden, format, .. } = *self.config;
        let fused = [(self.family.fused.0, [2 * width, hidden]), (self.family.fused.1, [hidden, width])];
        let one_by_one = matches!(self.family.stored, StoredLayout::Projections | StoredLayout::Numbered);
        match format {
            SynthFormat::Mxfp4 => {
                for (name, [rows, cols]) in fused {
                    let (blocks, scales) = (format!("{base}{name}_blocks"), format!("{base}{name}_scales"));
                    self.push(blocks, Element::U8, &[experts, rows, cols / 32, 16], Fill::Fp4Codes);
                    let fill = Fill::Exponents(deviation(cols) / FP4_DEVIATION);
                    self.push(scales, Element::U8, &[experts, rows, cols / 32], fill);
                }
            }
            SynthFormat::Fp8 if !one_by_one && !fp8_by_channel(self.family) => {
                for (name, [rows, cols]) in fused {
                    let name = format!("{base}{name}");
                    self.push(name.clone(), Element::Fp8, &[experts, rows, cols], Fill::Fp8Codes);
                    let grid = [experts, rows.div_ceil(128), cols.div_ceil(128)];
                    let fill = Fill::Scales(deviation(cols) / FP8_DEVIATION);
                    self.push(format!("{name}_scale_inv"), Element::F32, &grid, fill);
                }
            }
            SynthFormat::Bf16 | SynthFormat::F16 | SynthFormat::F32 if !one_by_one => {
                let transposed = self.family.stored == StoredLayout::FusedTransposed;
                for (name, [rows, cols]) in fused {
                    let shape = if transposed { [experts, cols, rows] } else { [experts, rows, cols] };
                    self.push(format!("{base}{name}"), self.plain(), &shape, Fill::Normal(deviation(cols)));
                }
            }
            _ => {
                let numbered = self.family.stored == StoredLayout::Numbered;
                for e in 0..experts {
                    let module = format!("{base}experts.{e}.");
                    self.mlp(&module, numbered, width, self.family.expert_biases, format);
                }
                return;
            }
        }
        if self.family.expert_biases {
            for (name, [rows, _]) in fused {
                self.push(format!("{base}{name}_bias"), self.plain(), &[experts, rows], Fill::Normal(0.1));
            }
        }
    }

    /// Adds one MLP with separate projections.
    fn mlp(&mut self, module: &str, numbered: bool, width: usize, biases: bool, format: SynthFormat) {
        let hidden = self.config.hidden;
        let names = if numbered { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        for (name, shape) in names.into_iter().zip([[width, hidden], [width, hidden], [hidden, width]]) {
            let name = format!("{module}{name}");
            self.linear(&name, shape, format);
            if biases {
                self.push(format!("{name}.bias"), self.plain(), &shape[..1], Fill::Normal(0.1));
            }
        }
    }

    fn shared(&mut self, base: &str) {
        let Some(rule) = self.family.shared else { return };
        debug_assert!(!matches!(rule.width, SharedWidth::Count { default: 0, .. }));
        let format = match self.config.format {
            SynthFormat::Int4 => SynthFormat::Bf16,
            format => format,
        };
        self.mlp(&format!("{base}{}.", rule.module), rule.numbered, self.config.width, false, format);
        if let Some(gate) = rule.gate {
            let hidden = self.config.hidden;
            self.push(format!("{base}{gate}"), self.plain(), &[1, hidden], Fill::Normal(deviation(hidden)));
        }
    }
}

/// Standard deviation of weights that multiply `inputs` numbers of unit variance, so that activations have a variance
/// near one.
pub(super) fn deviation(inputs: usize) -> f32 {
    1.5 / (inputs as f32).sqrt()
}
