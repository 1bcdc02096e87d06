//! An MoE block computed with the service's CPU kernels, in this process and without an EP group.

use expertd_compute::experts::cpu::{CpuExpert, Workspace, WorkspaceSize, forward, forward_one};
use expertd_compute::experts::{Assignments, ExpertKind};
use expertd_model::{Checkpoint, ExpertBiases, ExpertTensors, ExpertWeights};
use expertd_types::{ExpertId, Fp8Products, LayerId};

fn pack(tensors: &ExpertTensors<'_>) -> CpuExpert {
    let biases = match (&tensors.gate_bias, &tensors.up_bias, &tensors.down_bias) {
        (Some(gate), Some(up), Some(down)) => Some(ExpertBiases { gate, up, down }),
        _ => None,
    };
    let (gate, up, down) = (tensors.gate.clone(), tensors.up.clone(), tensors.down.clone());
    CpuExpert::pack(&ExpertWeights { gate, up, down, biases }).unwrap()
}

/// The block's output `[tokens, hidden]` for given routing `[tokens, k]`.
pub fn block(
    checkpoint: &Checkpoint,
    layer: LayerId,
    rows: &[f32],
    ids: &[i32],
    weights: &[f32],
    fp8_products: Fp8Products,
) -> Vec<f32> {
    let spec = checkpoint.spec();
    let moe = spec.layer(layer).unwrap();
    let (hidden, k, e) = (spec.hidden, moe.gate.top_k, moe.experts.count);
    let width = moe.experts.width.max(moe.shared.as_ref().map_or(0, |shared| shared.width));
    let size = WorkspaceSize { hidden, intermediate: width, assignments: ids.len().max(1), threads: 1 };
    let mut workspace = Workspace::new(size);
    let experts: Vec<CpuExpert> =
        (0..e as u32).map(|e| pack(&checkpoint.expert(layer, ExpertId(e)).unwrap())).collect();
    let (mut offsets, mut numbers, mut sorted) = (vec![0], Vec::new(), Vec::new());
    for expert in 0..e as i32 {
        for (i, _) in ids.iter().enumerate().filter(|(_, id)| **id == expert) {
            numbers.push((i / k) as u32);
            sorted.push(weights[i]);
        }
        offsets.push(numbers.len() as u32);
    }
    let kind = ExpertKind::routed(&moe.experts, fp8_products);
    let assignments = Assignments { offsets: &offsets, rows: &numbers, weights: &sorted };
    let mut out = vec![f32::NAN; rows.len()];
    forward(kind, &experts, assignments, &[rows], &mut [&mut out], &mut workspace, None);
    if let (Some(shared), Some(spec)) = (checkpoint.shared(layer).unwrap(), &moe.shared) {
        let factors: Option<Vec<f32>> = shared.gate.as_ref().map(|gate| {
            let logit = |row: &[f32]| row.iter().zip(gate).map(|(x, g)| x * g).sum::<f32>();
            rows.chunks_exact(hidden).map(|row| 1.0 / (1.0 + (-logit(row)).exp())).collect()
        });
        let kind = ExpertKind::shared(spec, fp8_products);
        let mut extra = vec![f32::NAN; rows.len()];
        forward_one(kind, &pack(&shared.mlp), factors.as_deref(), rows, &mut extra, &mut workspace, None);
        out.iter_mut().zip(extra).for_each(|(out, extra)| *out += extra);
    }
    out
}
