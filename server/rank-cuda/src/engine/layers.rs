//! This rank's share of a model's MoE blocks in GPU memory, and the tables in which kernels find their addresses.

use std::ops::Range;

use expertd_kernels::device::{Buffer, Device, DeviceError};
use expertd_kernels::experts::LayerWeights;
use expertd_kernels::params::{GateLayer, GateParams};
use half::bf16;

use crate::experts::{CudaExperts, DeviceFormat, UploadError, Uploader, bf16_parts, padded};
use expertd_ipc::control::Fp8Compute;
use expertd_model::{
    Checkpoint, Choice, GateSpec, GroupScore, ModelError, ModelSpec, MoeLayer, Normalise, ScoreFn,
    WeightFormat,
};
use expertd_rank::share::{ExpertShare, LoadProgress, weights};
use expertd_types::{ExpertId, LayerId};

/// Why weights could not be loaded to the GPU.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An expert could not be uploaded.
    #[error("layer {layer}: {source}")]
    Upload {
        /// The layer of the expert.
        layer: LayerId,
        /// The cause.
        source: UploadError,
    },
    /// The CUDA driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A gate's tensors; [`GateLayer`] holds their addresses.
struct DeviceGate {
    weight: Buffer<u16>,
    /// What rounding took from weights that the checkpoint stores in f32 or f16.
    weight_low: Option<Buffer<u16>>,
    bias: Option<Buffer<f32>>,
    correction: Option<Buffer<f32>>,
    table: Option<Buffer<i32>>,
}

/// Shared experts as one MLP.
pub(super) struct SharedExperts {
    pub(super) experts: CudaExperts,
    /// bf16 `[hidden]`: the experts' output is multiplied with the sigmoid of the row's dot product with this vector.
    gate: Option<Buffer<u16>>,
}

/// One layer's MoE block.
pub(super) struct Layer {
    pub(super) spec: MoeLayer,
    /// Layers of one class have equal sizes and functions, and share captured graphs.
    pub(super) class: usize,
    /// The experts that this rank owns.
    pub(super) mine: Range<u32>,
    /// Device format of the layer's experts, also on ranks that own none of them.
    pub(super) format: DeviceFormat,
    gate: DeviceGate,
    /// `None` if this rank owns no experts of the layer.
    pub(super) experts: Option<CudaExperts>,
    pub(super) shared: Option<SharedExperts>,
}

/// All layers, and the tables that kernels index with `SlotState::layer`.
pub(super) struct Layers {
    pub(super) layers: Vec<Option<Layer>>,
    /// Addresses of gates.
    pub(super) gates: Buffer<GateLayer>,
    /// Addresses of routed experts.
    pub(super) experts: Buffer<LayerWeights>,
    /// Addresses of shared experts.
    pub(super) shared: Buffer<LayerWeights>,
    /// Addresses of the gate vectors of shared experts.
    pub(super) shared_gates: Buffer<u64>,
    /// Size of this rank's share in the checkpoint, in bytes.
    pub(super) weight_bytes: u64,
}

/// Size of this rank's weights in device memory, in bytes.
pub(super) fn device_bytes(checkpoint: &Checkpoint, share: ExpertShare, fp8: Fp8Compute) -> u64 {
    let hidden = checkpoint.spec().hidden;
    // The gate's weights, and what rounding takes from them.
    let gate = |layer: LayerId, moe: &MoeLayer| {
        let is_bf16 = checkpoint.gate(layer).is_ok_and(|gate| gate.weight.format == WeightFormat::Bf16);
        moe.experts.count * padded(hidden) * if is_bf16 { 2 } else { 4 }
    };
    let of = |(layer, moe): (LayerId, &MoeLayer)| {
        let mine = share.experts(moe).len();
        CudaExperts::bytes(DeviceFormat::of(moe.experts.format, fp8), mine, hidden, moe.experts.width)
            + moe.shared.as_ref().map_or(0, |shared| {
                CudaExperts::bytes(DeviceFormat::of(shared.format, fp8), 1, hidden, shared.width)
            })
            + gate(layer, moe) as u64
    };
    checkpoint.spec().moe_layers().map(of).sum()
}

/// The largest intermediate size of any layer, unpadded.
pub(super) fn widest(spec: &ModelSpec) -> usize {
    let of = |moe: &MoeLayer| moe.experts.width.max(moe.shared.as_ref().map_or(0, |shared| shared.width));
    spec.moe_layers().map(|(_, moe)| of(moe)).max().unwrap_or(1)
}

/// Whether any layer's experts compute products in FP8.
pub(super) fn any_fp8_products(spec: &ModelSpec, fp8: Fp8Compute) -> bool {
    let of = |moe: &MoeLayer| {
        let shared = moe.shared.as_ref().map(|shared| shared.format);
        [Some(moe.experts.format), shared]
            .into_iter()
            .flatten()
            .any(|f| DeviceFormat::of(f, fp8) == DeviceFormat::W8a8)
    };
    spec.moe_layers().any(|(_, moe)| of(moe))
}

impl Layers {
    /// The first layer of each class.
    pub(super) fn classes(&self) -> impl Iterator<Item = (usize, &Layer)> {
        let mut next = 0;
        self.layers.iter().flatten().filter_map(move |layer| {
            let new = layer.class == next;
            next += usize::from(new);
            new.then_some((layer.class, layer))
        })
    }

    /// Loads this rank's share. `progress` is called with the bytes loaded so far and the bytes in all.
    pub(super) fn load(
        device: &Device,
        checkpoint: &Checkpoint,
        share: ExpertShare,
        fp8: Fp8Compute,
        pool: &rayon::ThreadPool,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let spec = checkpoint.spec();
        let mut uploader = Uploader::new(device, pool, spec.hidden, widest(spec))?;
        let mut progress = LoadProgress::start(share.bytes(spec), progress);
        let mut layers = Vec::with_capacity(spec.num_layers);
        for (index, moe) in (0..).zip(&spec.layers) {
            let Some(moe) = moe else {
                layers.push(None);
                continue;
            };
            let layer = LayerId(index);
            let failed = |source| LoadError::Upload { layer, source };
            let mine = share.experts(moe);
            let mut experts = match mine.len() {
                0 => None,
                count => {
                    let MoeLayer { experts, .. } = moe;
                    let format = DeviceFormat::of(experts.format, fp8);
                    let allocated =
                        CudaExperts::new(device, format, count, spec.hidden, experts.width, experts.biases);
                    Some(allocated.map_err(|e| failed(e.into()))?)
                }
            };
            if let Some(experts) = &mut experts {
                for (place, expert) in mine.clone().enumerate() {
                    let tensors = checkpoint.expert(layer, ExpertId(expert))?;
                    uploader.load(experts, place, &weights(&tensors)).map_err(failed)?;
                    progress.expert(&moe.experts);
                }
                experts.finish(device).map_err(|e| failed(e.into()))?;
            }
            let shared = match (checkpoint.shared(layer)?, &moe.shared) {
                (Some(tensors), Some(spec_of)) => {
                    let format = DeviceFormat::of(spec_of.format, fp8);
                    let mut experts =
                        CudaExperts::new(device, format, 1, spec.hidden, spec_of.width, spec_of.biases)
                            .map_err(|e| failed(e.into()))?;
                    uploader.load(&mut experts, 0, &weights(&tensors.mlp)).map_err(failed)?;
                    experts.finish(device).map_err(|e| failed(e.into()))?;
                    progress.shared(spec_of);
                    let gate = tensors.gate.map(|gate| {
                        let mut bits: Vec<u16> = gate.iter().map(|v| bf16::from_f32(*v).to_bits()).collect();
                        bits.resize(padded(spec.hidden), 0);
                        Buffer::from_slice(device, &bits)
                    });
                    Some(SharedExperts { experts, gate: gate.transpose()? })
                }
                _ => None,
            };
            let gate = DeviceGate::load(device, checkpoint, layer, padded(spec.hidden))?;
            let class = class_of(&layers, moe);
            let format = DeviceFormat::of(moe.experts.format, fp8);
            layers.push(Some(Layer { spec: moe.clone(), class, mine, format, gate, experts, shared }));
        }
        uploader.finish()?;
        drop(uploader);
        Ok(Self {
            gates: Buffer::from_slice(device, &each(&layers, |layer| layer.gate.entry()))?,
            experts: Buffer::from_slice(device, &each(&layers, |l| entry(l.experts.as_ref())))?,
            shared: Buffer::from_slice(
                device,
                &each(&layers, |l| entry(l.shared.as_ref().map(|s| &s.experts))),
            )?,
            shared_gates: Buffer::from_slice(
                device,
                &each(&layers, |layer| {
                    layer.shared.as_ref().and_then(|s| s.gate.as_ref()).map_or(0, Buffer::address)
                }),
            )?,
            layers,
            weight_bytes: progress.total(),
        })
    }
}

/// The class of the layers that equal `moe`, or a new class.
fn class_of(layers: &[Option<Layer>], moe: &MoeLayer) -> usize {
    let known = || layers.iter().flatten();
    let alike = known().find(|layer| layer.spec == *moe).map(|layer| layer.class);
    alike.unwrap_or_else(|| known().map(|layer| layer.class + 1).max().unwrap_or(0))
}

fn each<T: Default>(layers: &[Option<Layer>], of: impl Fn(&Layer) -> T) -> Vec<T> {
    layers.iter().map(|layer| layer.as_ref().map_or_else(T::default, &of)).collect()
}

fn entry(experts: Option<&CudaExperts>) -> LayerWeights {
    experts.map(CudaExperts::weights).unwrap_or_default()
}

impl DeviceGate {
    fn load(
        device: &Device,
        checkpoint: &Checkpoint,
        layer: LayerId,
        hidden: usize,
    ) -> Result<Self, LoadError> {
        let tensors = checkpoint.gate(layer)?;
        let floats = |values: Option<Vec<f32>>| values.map(|v| Buffer::from_slice(device, &v)).transpose();
        let (weight, weight_low) = bf16_parts(&tensors.weight, hidden);
        Ok(DeviceGate {
            weight: Buffer::from_slice(device, &weight)?,
            weight_low: weight_low.map(|low| Buffer::from_slice(device, &low)).transpose()?,
            bias: floats(tensors.bias)?,
            correction: floats(tensors.correction_bias)?,
            table: tensors.token_table.map(|table| Buffer::from_slice(device, &table)).transpose()?,
        })
    }

    fn entry(&self) -> GateLayer {
        GateLayer {
            weight: self.weight.address(),
            weight_low: self.weight_low.as_ref().map_or(0, Buffer::address),
            logit_bias: self.bias.as_ref().map_or(0, Buffer::address),
            correction_bias: self.correction.as_ref().map_or(0, Buffer::address),
            token_table: self.table.as_ref().map_or(0, Buffer::address),
        }
    }
}

/// The routing function in the kernel's codes (`step.h`). The caller sets addresses and sizes of buffers.
pub(super) fn gate_params(spec: &GateSpec) -> GateParams {
    let (score_fn, jitter) = match spec.scores {
        ScoreFn::Softmax => (0, 0.0),
        ScoreFn::SoftmaxOfChosen => (1, 0.0),
        ScoreFn::Sigmoid => (2, 0.0),
        ScoreFn::SqrtSoftplus => (3, 0.0),
        ScoreFn::SparseMixer { jitter } => (4, jitter),
    };
    let (choice, vocab) = match spec.choice {
        Choice::Scores => (0, 0),
        Choice::Logits => (1, 0),
        Choice::TokenIds { vocab } => (2, vocab),
    };
    let (group_score, groups, groups_kept) = spec.groups.map_or((0, 0, 0), |limit| {
        let by = match limit.by {
            GroupScore::Max => 1,
            GroupScore::TopTwoSum => 2,
        };
        (by, limit.groups, limit.kept)
    });
    let (normalise, epsilon) = match spec.normalise {
        Normalise::No => (0, 0.0),
        Normalise::Sum { epsilon } => (1, epsilon),
        Normalise::SumAtLeast { floor } => (2, floor),
    };
    GateParams {
        experts: spec.num_experts as u32,
        top_k: spec.top_k as u32,
        score_fn,
        choice,
        group_score,
        groups: groups as u32,
        groups_kept: groups_kept as u32,
        normalise,
        epsilon,
        scale: spec.scale,
        jitter,
        vocab: vocab as u32,
        ..GateParams::default()
    }
}
