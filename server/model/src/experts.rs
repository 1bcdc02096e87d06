//! Lookup of the tensors of a layer's experts: separate, or fused in one of several layouts, which names and shapes
//! tell apart.

use super::context::{Context, vector};
use super::matrices::{has_matrix, matrix, mxfp4, plain_format, scale_grid};
use super::plan::{BlockScales, MatrixRef, MlpPlan, ScalesRef, VectorRef};
use super::quantised::Nvfp4Stack;
use super::store::{Store, TensorId};
use super::{ModelError, plan};
use crate::WeightFormat;

/// Dimensions of a stack of MLPs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) hidden: usize,
    pub(super) width: usize,
    pub(super) experts: usize,
}

/// Names of the gate, up and down projections of one MLP.
const PROJECTIONS: [[&str; 3]; 2] = [["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]];

/// Finds all experts of a layer.
pub(super) fn resolve(
    context: &Context<'_>,
    store: &mut Store,
    base: &str,
    dims: Dims,
) -> Result<Vec<MlpPlan>, ModelError> {
    let family = context.family;
    let reason = format!("`{}` and `hidden_size` in config.json", family.width[0]);
    let (gate_up, down) = (format!("{base}{}", family.fused.0), format!("{base}{}", family.fused.1));
    let plans = if store.has(&format!("{gate_up}_blocks")) {
        fused_mxfp4(context, store, [&gate_up, &down], dims, &reason)?
    } else if context.quantization.nvfp4 && store.has(&format!("{gate_up}_weight_scale_2")) {
        fused_nvfp4(context, store, [&gate_up, &down], dims, &reason)?
    } else if store.has(&gate_up) {
        fused(context, store, [&gate_up, &down], dims, &reason)?
    } else {
        let one = |store: &mut Store, e: usize| {
            let module = format!("{base}experts.{e}.");
            separate(context, store, &module, dims, family.expert_biases, &reason)
        };
        (0..dims.experts).map(|e| one(store, e)).collect::<Result<Vec<_>, _>>()?
    };
    let format = plans[0].gate.format;
    for matrix in plans.iter().flat_map(|p| [&p.gate, &p.up, &p.down]) {
        if matrix.format != format {
            return Err(
                store.wrong_dtype(matrix.tensor, &format!("{format:?} like the layer's other experts"))
            );
        }
    }
    Ok(plans)
}

/// Finds one MLP whose projections are separate tensors.
pub(super) fn separate(
    context: &Context<'_>,
    store: &mut Store,
    module: &str,
    dims: Dims,
    biases: bool,
    reason: &str,
) -> Result<MlpPlan, ModelError> {
    let names = PROJECTIONS
        .iter()
        .find(|names| has_matrix(store, &format!("{module}{}", names[0])))
        .unwrap_or(&PROJECTIONS[0])
        .map(|name| format!("{module}{name}"));
    let shapes = [[dims.width, dims.hidden], [dims.width, dims.hidden], [dims.hidden, dims.width]];
    let mut bytes = 0;
    let mut matrices = Vec::with_capacity(3);
    for (name, shape) in names.iter().zip(shapes) {
        let (found, size) = matrix(store, context.quantization, name, shape, reason)?;
        matrices.push(found);
        bytes += size;
    }
    let biases = if biases {
        let mut bias = |i: usize| vector(store, &format!("{}.bias", names[i]), &[&[shapes[i][0]]], reason);
        let found = [bias(0)?, bias(1)?, bias(2)?];
        bytes += found.iter().map(|b| store.bytes(b.tensor).len() as u64).sum::<u64>();
        Some(found)
    } else {
        None
    };
    let [gate, up, down]: [MatrixRef; 3] = matrices.try_into().expect("three matrices were pushed");
    Ok(MlpPlan { gate, up, down, biases, bytes })
}

/// The first rows of gate and up within the fused tensor, and the distance between their rows.
fn halves(interleaved: bool, width: usize) -> ([usize; 2], usize) {
    if interleaved { ([0, 1], 2) } else { ([0, width], 1) }
}

/// Finds a stack of all experts in two tensors, in bf16, f16, f32 or FP8.
fn fused(
    context: &Context<'_>,
    store: &mut Store,
    [gate_up_name, down_name]: [&str; 2],
    dims: Dims,
    reason: &str,
) -> Result<Vec<MlpPlan>, ModelError> {
    let Dims { hidden, width, experts } = dims;
    let gate_up = store.find(gate_up_name, reason)?;
    let down = store.find(down_name, reason)?;
    // The layout follows from both tensors together: one alone is ambiguous if it is square.
    let straight = [vec![experts, 2 * width, hidden], vec![experts, hidden, width]];
    let turned = [vec![experts, hidden, 2 * width], vec![experts, width, hidden]];
    let is = |shapes: &[Vec<usize>; 2]| {
        store.info(gate_up).shape == shapes[0] && store.info(down).shape == shapes[1]
    };
    let transposed = match (is(&straight), is(&turned)) {
        (false, true) => true,
        (true, false) => false,
        _ => {
            let usual = context.family.stored == super::family::StoredLayout::FusedTransposed;
            let expected = if usual { &turned } else { &straight };
            store.expect_shape(gate_up, &expected[0], reason)?;
            store.expect_shape(down, &expected[1], reason)?;
            usual
        }
    };
    let stack = |store: &mut Store, tensor: TensorId, name: &str, shape: [usize; 2]| {
        let dtype = store.info(tensor).dtype;
        if dtype == safetensors::Dtype::F8_E4M3 && !transposed {
            let grid = scale_grid(store, context.quantization, name, Some(experts), shape)?;
            return Ok((WeightFormat::Fp8E4m3, Some(grid)));
        }
        let types = if transposed {
            "BF16, F16 or F32 in a stack [E, in, out]; quantise experts that are stored one by one"
        } else {
            "BF16, F16, F32, or F8_E4M3 with scales"
        };
        plain_format(dtype).map(|format| (format, None)).ok_or_else(|| store.wrong_dtype(tensor, types))
    };
    let (up_format, up_grid) = stack(store, gate_up, gate_up_name, [2 * width, hidden])?;
    let (down_format, down_grid) = stack(store, down, down_name, [hidden, width])?;
    let biases = fused_biases(context, store, [gate_up_name, down_name], dims, reason)?;
    let tensors =
        [Some(gate_up), Some(down), up_grid.as_ref().map(|g| g.tensor), down_grid.as_ref().map(|g| g.tensor)];
    let bytes = bytes_per_expert(store, tensors.into_iter().flatten().chain(biases.tensors()), experts);
    let (starts, step) = halves(context.family.interleaved, width);
    let part = |tensor,
                format,
                grid: &Option<BlockScales>,
                e: usize,
                shape: [usize; 2],
                all_rows,
                row_first,
                step| {
        let cols = shape[1];
        let first = e * all_rows * cols;
        let (row_stride, col_stride) = if transposed { (step, all_rows) } else { (step * cols, 1) };
        let scales = match grid {
            None => ScalesRef::None,
            Some(grid) => {
                let per_expert = store_grid_len(grid, [all_rows, cols]);
                let first = e * per_expert;
                ScalesRef::Block(BlockScales { first, row_first, row_step: step, ..grid.clone() })
            }
        };
        let first = first + row_first * if transposed { 1 } else { cols };
        let whole = MatrixRef::by_rows(tensor, format, shape, scales);
        MatrixRef { first, row_stride, col_stride, ..whole }
    };
    let half = |e, half: usize| {
        part(gate_up, up_format, &up_grid, e, [width, hidden], 2 * width, starts[half], step)
    };
    let down = |e| part(down, down_format, &down_grid, e, [hidden, width], hidden, 0, 1);
    Ok(stacked(experts, half, down, &biases, bytes))
}

/// Number of scales of one expert's matrix in a grid.
fn store_grid_len(grid: &BlockScales, [rows, _]: [usize; 2]) -> usize {
    rows.div_ceil(grid.block[0]) * grid.grid_cols
}

/// Finds a stack of all experts in MXFP4.
fn fused_mxfp4(
    context: &Context<'_>,
    store: &mut Store,
    [gate_up_name, down_name]: [&str; 2],
    dims: Dims,
    reason: &str,
) -> Result<Vec<MlpPlan>, ModelError> {
    let Dims { hidden, width, experts } = dims;
    let gate_up = mxfp4(store, gate_up_name, [experts, 2 * width, hidden], reason)?;
    let down = mxfp4(store, down_name, [experts, hidden, width], reason)?;
    let biases = fused_biases(context, store, [gate_up_name, down_name], dims, reason)?;
    let tensors = [gate_up.0, gate_up.1, down.0, down.1];
    let bytes = bytes_per_expert(store, tensors.into_iter().chain(biases.tensors()), experts);
    let (starts, step) = halves(context.family.interleaved, width);
    let part = |(blocks, scales), row: usize, step: usize, rows, cols: usize| {
        let scales =
            ScalesRef::Mx { tensor: scales, first: row * (cols / 32), row_stride: step * (cols / 32) };
        let whole = MatrixRef::by_rows(blocks, WeightFormat::Mxfp4, [rows, cols], scales);
        MatrixRef { first: row * cols, row_stride: step * cols, ..whole }
    };
    let half = |e: usize, half: usize| part(gate_up, e * 2 * width + starts[half], step, width, hidden);
    let down = |e: usize| part(down, e * hidden, 1, hidden, width);
    Ok(stacked(experts, half, down, &biases, bytes))
}

/// Finds a stack of all experts in NVFP4.
fn fused_nvfp4(
    context: &Context<'_>,
    store: &mut Store,
    [gate_up_name, down_name]: [&str; 2],
    dims: Dims,
    reason: &str,
) -> Result<Vec<MlpPlan>, ModelError> {
    let Dims { hidden, width, experts } = dims;
    let gate_up = Nvfp4Stack::find(store, gate_up_name, [experts, 2 * width, hidden], reason)?;
    let down = Nvfp4Stack::find(store, down_name, [experts, hidden, width], reason)?;
    let biases = fused_biases(context, store, [gate_up_name, down_name], dims, reason)?;
    let tensors = [gate_up.tensors(), down.tensors()].concat();
    let bytes = bytes_per_expert(store, tensors.into_iter().chain(biases.tensors()), experts);
    let (starts, step) = halves(context.family.interleaved, width);
    let half = |e: usize, half: usize| gate_up.matrix(e, half, e * 2 * width + starts[half], step, width);
    let down = |e: usize| down.matrix(e, 0, e * hidden, 1, hidden);
    Ok(stacked(experts, half, down, &biases, bytes))
}

/// The MLPs of a stack: `half` is the gate (0) or up (1) projection of an expert, `down` its down projection.
fn stacked(
    experts: usize,
    half: impl Fn(usize, usize) -> MatrixRef,
    down: impl Fn(usize) -> MatrixRef,
    biases: &FusedBiases,
    bytes: u64,
) -> Vec<MlpPlan> {
    let of = |e| MlpPlan { gate: half(e, 0), up: half(e, 1), down: down(e), biases: biases.of(e), bytes };
    (0..experts).map(of).collect()
}

fn bytes_per_expert(store: &Store, tensors: impl Iterator<Item = TensorId>, experts: usize) -> u64 {
    tensors.map(|id| store.bytes(id).len() as u64).sum::<u64>() / experts as u64
}

/// Biases of fused experts, if the family has them.
struct FusedBiases {
    tensors: Option<[TensorId; 2]>,
    dims: Dims,
    interleaved: bool,
}

impl FusedBiases {
    fn tensors(&self) -> impl Iterator<Item = TensorId> + use<> {
        self.tensors.into_iter().flatten()
    }

    fn of(&self, e: usize) -> Option<[VectorRef; 3]> {
        let [gate_up, down] = self.tensors?;
        let Dims { hidden, width, .. } = self.dims;
        let (starts, stride) = halves(self.interleaved, width);
        let half =
            |start| plan::VectorRef { tensor: gate_up, first: e * 2 * width + start, stride, len: width };
        let down = plan::VectorRef { tensor: down, first: e * hidden, stride: 1, len: hidden };
        Some([half(starts[0]), half(starts[1]), down])
    }
}

fn fused_biases(
    context: &Context<'_>,
    store: &mut Store,
    [gate_up, down]: [&str; 2],
    dims: Dims,
    reason: &str,
) -> Result<FusedBiases, ModelError> {
    let Dims { hidden, width, experts } = dims;
    let interleaved = context.family.interleaved;
    if !context.family.expert_biases {
        return Ok(FusedBiases { tensors: None, dims, interleaved });
    }
    let gate_up = vector(store, &format!("{gate_up}_bias"), &[&[experts, 2 * width]], reason)?;
    let down = vector(store, &format!("{down}_bias"), &[&[experts, hidden]], reason)?;
    Ok(FusedBiases { tensors: Some([gate_up.tensor, down.tensor]), dims, interleaved })
}
