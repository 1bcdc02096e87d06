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
    /// E8M0 exponents that give FP4 values about this standard deviation.
    Exponents(f32),
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

/// Element types, named as in safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Bf16,
    F16,
    F32,
    Fp8,
    U8,
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
            Element::I64 => "I64",
        }
    }

    pub(super) fn size(self) -> usize {
        match self {
            Element::Fp8 | Element::U8 => 1,
            Element::Bf16 | Element::F16 => 2,
            Element::F32 => 4,
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

struct Layout<'a> {
    config: &'a SynthConfig,
    family: &'static Family,
    tensors: Vec<Tensor>,
}

impl Layout<'_> {
    fn push(&mut self, name: String, element: Element, shape: &[usize], fill: Fill) {
        self.tensors.push(Tensor { name, element, shape: shape.to_vec(), fill });
    }

    /// The element type of unquantised tensors.
    fn plain(&self) -> Element {
        match self.config.format {
            SynthFormat::F16 => Element::F16,
            SynthFormat::F32 => Element::F32,
            SynthFormat::Bf16 | SynthFormat::Fp8 | SynthFormat::Mxfp4 => Element::Bf16,
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
            // Ernie keeps a dimension for groups, of which it has one.
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
                    let fill = Fill::Exponents(deviation(cols));
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
            _ if one_by_one || format == SynthFormat::Fp8 => {
                for e in 0..experts {
                    self.mlp(&format!("{base}experts.{e}."), width, self.family.expert_biases);
                }
                return;
            }
            _ => {
                let transposed = self.family.stored == StoredLayout::FusedTransposed;
                for (name, [rows, cols]) in fused {
                    let shape = if transposed { [experts, cols, rows] } else { [experts, rows, cols] };
                    self.push(format!("{base}{name}"), self.plain(), &shape, Fill::Normal(deviation(cols)));
                }
            }
        }
        if self.family.expert_biases {
            for (name, [rows, _]) in fused {
                self.push(format!("{base}{name}_bias"), self.plain(), &[experts, rows], Fill::Normal(0.1));
            }
        }
    }

    /// Adds one MLP with separate projections.
    fn mlp(&mut self, module: &str, width: usize, biases: bool) {
        let hidden = self.config.hidden;
        let names = match self.family.stored {
            StoredLayout::Numbered => ["w1", "w3", "w2"],
            _ => ["gate_proj", "up_proj", "down_proj"],
        };
        for (name, [rows, cols]) in names.into_iter().zip([[width, hidden], [width, hidden], [hidden, width]])
        {
            let weight = format!("{module}{name}.weight");
            if self.config.format == SynthFormat::Fp8 {
                let fill = Fill::Scales(deviation(cols) / FP8_DEVIATION);
                self.push(weight.clone(), Element::Fp8, &[rows, cols], Fill::Fp8Codes);
                if fp8_by_channel(self.family) {
                    self.push(format!("{weight}_scale"), Element::Bf16, &[rows, 1], fill);
                } else {
                    let grid = [rows.div_ceil(128), cols.div_ceil(128)];
                    self.push(format!("{weight}_scale_inv"), Element::F32, &grid, fill);
                }
            } else {
                self.push(weight, self.plain(), &[rows, cols], Fill::Normal(deviation(cols)));
            }
            if biases {
                self.push(format!("{module}{name}.bias"), self.plain(), &[rows], Fill::Normal(0.1));
            }
        }
    }

    fn shared(&mut self, base: &str) {
        let Some(rule) = self.family.shared else { return };
        debug_assert!(!matches!(rule.width, SharedWidth::Count { default: 0, .. }));
        self.mlp(&format!("{base}{}.", rule.module), self.config.width, false);
        if let Some(gate) = rule.gate {
            let hidden = self.config.hidden;
            self.push(format!("{base}{gate}"), self.plain(), &[1, hidden], Fill::Normal(deviation(hidden)));
        }
    }
}

/// Standard deviation of weights that multiply `inputs` numbers of unit variance, so that activations have a variance
/// near one.
fn deviation(inputs: usize) -> f32 {
    1.5 / (inputs as f32).sqrt()
}
