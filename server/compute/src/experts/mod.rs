//! Grouped expert MLPs.
//!
//! An expert is `down(activation(gate(x), up(x)))`. A rank runs each row that it received through the experts that the
//! row's assignments name, and adds up their results.

pub mod cpu;
pub mod reference;

use expertd_model::{Activation, ExpertsSpec, SharedSpec, WeightOn};
use expertd_types::Fp8Products;

use crate::linalg::Fp8Scales;

/// Assignments of rows to the experts of a rank, grouped by expert.
///
/// Expert `e` computes the rows `rows[offsets[e] .. offsets[e + 1]]`, with the routing weights at the same indices.
#[derive(Clone, Copy, Debug)]
pub struct Assignments<'a> {
    /// `[experts + 1]`, ascending from 0.
    pub offsets: &'a [u32],
    /// Row numbers; a row occurs at most once per expert.
    pub rows: &'a [u32],
    /// Routing weights, one per assignment.
    pub weights: &'a [f32],
}

/// The function that the experts of a layer compute, apart from their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertKind {
    /// Activation between the projections.
    pub activation: Activation,
    /// Operand of the routing weight.
    pub weight_on: WeightOn,
    /// `Some`: rows, and the inputs of the down projection, are quantised to FP8 with these scales, as docs/models.md defines
    /// ("FP8 products"). `None`: they stay in f32.
    pub fp8_rows: Option<Fp8Scales>,
}

impl ExpertKind {
    /// The routed experts of a layer.
    #[must_use]
    pub fn routed(spec: &ExpertsSpec, fp8_products: Fp8Products) -> Self {
        let weight_on = if spec.weight_on_input { WeightOn::Input } else { WeightOn::Output };
        let fp8_rows = spec.take_fp8_rows(fp8_products).then(|| fp8_scales(spec.power_of_two_scales));
        ExpertKind { activation: spec.activation, weight_on, fp8_rows }
    }

    /// The shared experts of a layer; see [`routed`](Self::routed).
    #[must_use]
    pub fn shared(spec: &SharedSpec, fp8_products: Fp8Products) -> Self {
        let fp8_rows = spec.take_fp8_rows(fp8_products).then(|| fp8_scales(spec.power_of_two_scales));
        ExpertKind { activation: spec.activation, weight_on: WeightOn::Output, fp8_rows }
    }
}

const fn fp8_scales(power_of_two: bool) -> Fp8Scales {
    if power_of_two { Fp8Scales::PowerOfTwo } else { Fp8Scales::F32 }
}
