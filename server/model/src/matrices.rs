//! Lookup of one weight matrix: its tensor, format and scales.

use safetensors::Dtype;

use super::plan::{BlockScales, MatrixRef, ScalesRef};
use super::quant::Quantization;
use super::store::{Store, TensorId};
use super::{ModelError, quantised};
use crate::WeightFormat;

const PLAIN_TYPES: &str = "BF16, F16 or F32";
const ALL_TYPES: &str = "BF16, F16, F32, F8_E4M3 with scales, or U8 with `quant_algo` NVFP4";

/// The format of an unquantised tensor.
pub(super) fn plain_format(dtype: Dtype) -> Option<WeightFormat> {
    match dtype {
        Dtype::F32 => Some(WeightFormat::F32),
        Dtype::F16 => Some(WeightFormat::F16),
        Dtype::BF16 => Some(WeightFormat::Bf16),
        _ => None,
    }
}

/// Finds a matrix `[rows, cols]` that must not be quantised.
pub(super) fn plain(
    store: &mut Store,
    name: &str,
    [rows, cols]: [usize; 2],
    reason: &str,
) -> Result<MatrixRef, ModelError> {
    let tensor = store.find(name, reason)?;
    let Some(format) = plain_format(store.info(tensor).dtype) else {
        return Err(store.wrong_dtype(tensor, PLAIN_TYPES));
    };
    store.expect_shape(tensor, &[rows, cols], reason)?;
    Ok(MatrixRef::by_rows(tensor, format, [rows, cols], ScalesRef::None))
}

/// Whether the checkpoint lists the weights of a linear module, in any format.
pub(super) fn has_matrix(store: &Store, module: &str) -> bool {
    ["weight", "weight_packed", "qweight"].iter().any(|leaf| store.has(&format!("{module}.{leaf}")))
}

/// Finds the matrix `[rows, cols]` of a linear module, in any format. Also returns its size with that of its scales, in
/// bytes.
pub(super) fn matrix(
    store: &mut Store,
    quantization: Quantization,
    module: &str,
    shape: [usize; 2],
    reason: &str,
) -> Result<(MatrixRef, u64), ModelError> {
    if let Some(found) = quantised::find(store, quantization, module, shape, reason)? {
        return Ok(found);
    }
    let name = &format!("{module}.weight");
    let tensor = store.find(name, reason)?;
    let bytes = store.bytes(tensor).len() as u64;
    if store.info(tensor).dtype != Dtype::F8_E4M3 {
        if plain_format(store.info(tensor).dtype).is_none() {
            return Err(store.wrong_dtype(tensor, ALL_TYPES));
        }
        return Ok((plain(store, name, shape, reason)?, bytes));
    }
    store.expect_shape(tensor, &shape, reason)?;
    let grid = scale_grid(store, quantization, name, None, shape)?;
    let scale_bytes = store.bytes(grid.tensor).len() as u64;
    let found = MatrixRef::by_rows(tensor, WeightFormat::Fp8E4m3, shape, ScalesRef::Block(grid));
    Ok((found, bytes + scale_bytes))
}

/// Finds the scales of an FP8 tensor that holds one matrix `[rows, cols]`, or `experts` of them.
pub(super) fn scale_grid(
    store: &mut Store,
    quantization: Quantization,
    name: &str,
    experts: Option<usize>,
    [rows, cols]: [usize; 2],
) -> Result<BlockScales, ModelError> {
    let names = ["_scale_inv", "_scale"].map(|suffix| format!("{name}{suffix}"));
    let name = names.iter().find(|name| store.has(name)).unwrap_or(&names[0]);
    let tensor = store.find_floats(name, "its weights are FP8, which needs scales")?;
    let shape = &store.info(tensor).shape;
    let (lead, rest) = match (experts, shape.split_first()) {
        (Some(e), Some((first, rest))) if *first == e => (true, rest),
        _ => (false, &shape[..]),
    };
    let block = quantization.block.unwrap_or([128, 128]);
    let not_only_blocks = quantization.block.is_none() || quantization.fp8_rows;
    let grid = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
    // ModelOpt keeps the dimensions that it reduced.
    let kept = [grid[0], 1, grid[1], 1];
    let found = if rest == grid || rest == kept {
        Some((grid, block))
    } else if not_only_blocks && rest.iter().product::<usize>() == 1 {
        Some(([1, 1], [rows, cols]))
    } else if not_only_blocks && (rest == [rows, 1] || rest == [rows]) {
        Some(([rows, 1], [1, cols]))
    } else {
        None
    };
    let Some(([grid_rows, grid_cols], block)) = found.filter(|_| lead == experts.is_some()) else {
        let mut expected: Vec<usize> = experts.into_iter().collect();
        expected.extend(grid);
        let reason = match quantization.block {
            Some([r, c]) => format!("blocks of {r}×{c}, the size in `quantization_config`"),
            None => "blocks of 128×128, one scale per row, or one scale".to_owned(),
        };
        store.expect_shape(tensor, &expected, &reason)?;
        unreachable!("the shape differs from the grid's");
    };
    debug_assert_eq!(
        store.info(tensor).shape.iter().product::<usize>(),
        grid_rows * grid_cols * experts.unwrap_or(1)
    );
    Ok(BlockScales { tensor, first: 0, grid_cols, block, row_first: 0, row_step: 1 })
}

/// Finds the two tensors of an MXFP4 stack `[E, rows, cols]`: `_blocks [E, rows, cols / 32, 16]` and `_scales [E, rows,
/// cols / 32]`.
pub(super) fn mxfp4(
    store: &mut Store,
    name: &str,
    [experts, rows, cols]: [usize; 3],
    reason: &str,
) -> Result<(TensorId, TensorId), ModelError> {
    let blocks = store.find(&format!("{name}_blocks"), reason)?;
    let scales = store.find(&format!("{name}_scales"), "its `_blocks` need scales")?;
    for id in [blocks, scales] {
        if store.info(id).dtype != Dtype::U8 {
            return Err(store.wrong_dtype(id, "U8"));
        }
    }
    if !cols.is_multiple_of(32) {
        let reason = format!(
            "MXFP4 stores blocks of 32 inputs, but {cols} (from config.json) is not a multiple of 32"
        );
        return Err(store.wrong_contents(blocks, reason));
    }
    store.expect_shape(blocks, &[experts, rows, cols / 32, 16], reason)?;
    store.expect_shape(scales, &[experts, rows, cols / 32], reason)?;
    Ok((blocks, scales))
}
