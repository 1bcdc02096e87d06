//! Stacks of all experts in one tensor, in the NVFP4 of ModelOpt.

use safetensors::Dtype;

use super::Module;
use crate::plan::{Factor, GroupsRef, MatrixRef, ScalesRef};
use crate::store::{Store, TensorId};
use crate::{ModelError, ScaleFormat, WeightFormat};

/// A stack of the matrices of all experts in NVFP4, `[E, rows, cols]`: `NAME` in U8 `[E, rows, cols / 2]`, `NAME_weight_scale` `[E, rows,
/// cols / 16]` and `NAME_weight_scale_2`.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Nvfp4Stack {
    weight: TensorId,
    scales: TensorId,
    factor: TensorId,
    /// Factors of an expert: 1, or 2 if gate and up have one each, or 0 if all experts share one.
    factors: usize,
    cols: usize,
}

impl Nvfp4Stack {
    /// Finds the tensors of a stack.
    pub(in super::super) fn find(
        store: &mut Store,
        name: &str,
        [experts, rows, cols]: [usize; 3],
        reason: &str,
    ) -> Result<Self, ModelError> {
        let mut module = Module { store, name, rows, cols, reason, bytes: 0 };
        let weight = module.store.find(name, reason)?;
        module.expect_multiple(weight, "blocks of 16 inputs", cols, 16)?;
        module.expect(weight, &[Dtype::U8], &[experts, rows, cols / 2])?;
        let scales = module.store.find(&format!("{name}_weight_scale"), reason)?;
        module.expect(scales, &[Dtype::F8_E4M3], &[experts, rows, cols / 16])?;
        let factor = module.store.find(&format!("{name}_weight_scale_2"), reason)?;
        let shape = module.store.info(factor).shape.clone();
        let factors = match shape[..] {
            [] | [1] => 0,
            [found, 2] if found == experts => 2,
            _ => 1,
        };
        let expected = if factors == 1 { vec![experts] } else { shape };
        module.expect(factor, &[Dtype::F32], &expected)?;
        Ok(Self { weight, scales, factor, factors, cols })
    }

    /// The tensors.
    pub(in super::super) fn tensors(&self) -> [TensorId; 3] {
        [self.weight, self.scales, self.factor]
    }

    /// A matrix of `rows` rows, `step` apart, whose first one is row `first` of all rows of the stack; `half` is 1 for up.
    pub(in super::super) fn matrix(
        &self,
        expert: usize,
        half: usize,
        first: usize,
        step: usize,
        rows: usize,
    ) -> MatrixRef {
        let at = if self.factors == 2 { 2 * expert + half } else { self.factors * expert };
        let scales = ScalesRef::Groups(GroupsRef {
            tensor: self.scales,
            format: ScaleFormat::Fp8E4m3,
            first: first * (self.cols / 16),
            cols: 16,
            row_stride: step * (self.cols / 16),
            group_stride: 1,
            factor: Factor::Of(self.factor, at),
            zeros: None,
        });
        let whole = MatrixRef::by_rows(self.weight, WeightFormat::Nvfp4, [rows, self.cols], scales);
        MatrixRef { first: first * self.cols, row_stride: step * self.cols, ..whole }
    }
}
