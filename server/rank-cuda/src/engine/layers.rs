//! This rank's share of a model's MoE blocks in GPU memory, and the tables in which kernels find their addresses.

use expertd_kernels::copies::CopyTables;
use expertd_kernels::device::{Buffer, Device, DeviceError, ShareableMemory};
use expertd_kernels::experts::LayerWeights;
use expertd_kernels::params::{GateLayer, GateParams, Group};
use serde::{Deserialize, Serialize};

use crate::experts::{CudaExperts, DeviceFormat, WeightSpace, padded};
use crate::format::Stored;
use expertd_model::{Choice, GateSpec, GroupScore, ModelSpec, MoeLayer, Normalise, ScoreFn};
use expertd_rank::share::ExpertShare;
use expertd_types::{Fp8Products, LayerId, Rank};

/// Properties of a layer's weights that its specification does not contain.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct LayerFacts {
    /// Whether rounding to bf16 takes anything from the gate's weights.
    pub(super) gate_low: bool,
    /// [`CudaExperts::has_block_scales`] of the routed experts.
    pub(super) block_scales: bool,
    /// [`CudaExperts::has_block_scales`] of the shared experts.
    pub(super) shared_block_scales: bool,
}

/// Shared experts as one MLP.
pub(super) struct SharedExperts {
    pub(super) experts: CudaExperts,
    /// Address of bf16 `[hidden]`, or 0: the experts' output is multiplied with the sigmoid of the row's dot product with this
    /// vector.
    pub(super) gate: u64,
}

/// One layer's MoE block.
pub(super) struct Layer {
    /// Its number.
    pub(super) index: usize,
    pub(super) spec: MoeLayer,
    /// Layers of one class have equal sizes and functions, and share captured graphs.
    pub(super) class: usize,
    /// In a mixed group: whether this rank has all of the layer's experts, so that its steps need no CPU ranks.
    pub(super) is_whole: bool,
    /// The experts that this rank owns, ascending.
    pub(super) mine: Vec<u32>,
    /// Device format of the layer's experts, also on ranks that own none of them.
    pub(super) format: DeviceFormat,
    /// Addresses of the gate's tensors. `weight_low` has the rounding errors of weights that the checkpoint stores in f32 or f16.
    pub(super) gate: GateLayer,
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
    /// `None`: kernels compute the owners of experts.
    placement: Option<DevicePlacement>,
    /// Size of this rank's share in the checkpoint, in bytes.
    pub(super) weight_bytes: u64,
    /// The weights. A loader has packed them.
    _memory: ShareableMemory,
}

/// The tables that name slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotTables {
    /// `TierParams::resident`.
    pub(super) resident: u64,
    /// `CopyOutParams::local_ids`.
    pub(super) local_ids: u64,
    /// Physical experts before the slots.
    pub(super) held: u32,
}

/// The tables of a placement.
pub(super) enum Tables {
    /// Of all ranks.
    Copies(CopyTables),
    /// Of the source of a mixed group alone.
    Resident(CopyTables),
}

impl Tables {
    /// Number of physical experts of each rank.
    pub(super) const fn per_rank(&self) -> u32 {
        match self {
            Tables::Copies(tables) | Tables::Resident(tables) => tables.per_rank(),
        }
    }
}

/// The tables of a placement in device memory.
struct DevicePlacement {
    /// Number of physical experts of each rank, in every layer, without slots.
    per_rank: u32,
    /// Number of slots of every layer, in a mixed group.
    slots: u32,
    /// `None` in a mixed group, where kernels see this rank alone.
    copies: Option<Buffer<u32>>,
    local_ids: Buffer<u32>,
    /// In a mixed group: `TierParams::resident`.
    resident: Option<Buffer<u32>>,
}

impl DevicePlacement {
    /// Number of physical experts of each rank.
    const fn all(&self) -> u32 {
        self.per_rank + self.slots
    }

    fn new(device: &Device, tables: &Tables, rank: Rank) -> Result<Self, DeviceError> {
        let buffer = |values: &[u32]| Buffer::from_slice(device, values).map(Some);
        let (tables, copies, resident) = match tables {
            Tables::Copies(tables) => (tables, buffer(tables.copies())?, None),
            Tables::Resident(tables) => (tables, None, buffer(&tables.resident(rank.index()))?),
        };
        let local_ids = Buffer::from_slice(device, &tables.local_ids(rank.index()))?;
        Ok(DevicePlacement { per_rank: tables.per_rank(), slots: 0, copies, local_ids, resident })
    }
}

/// The largest intermediate size of any layer, unpadded.
pub(super) fn widest(spec: &ModelSpec) -> usize {
    let of = |moe: &MoeLayer| moe.experts.width.max(moe.shared.as_ref().map_or(0, |shared| shared.width));
    spec.moe_layers().map(|(_, moe)| of(moe)).max().unwrap_or(1)
}

/// Whether any layer's experts compute products in FP8.
pub(super) fn any_fp8_products(spec: &ModelSpec, products: Fp8Products) -> bool {
    let of = |moe: &MoeLayer| {
        let shared = moe.shared.as_ref().map(Stored::shared);
        [Some(Stored::routed(&moe.experts)), shared]
            .into_iter()
            .flatten()
            .any(|stored| stored.on_device(products).has_fp8_rows())
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

    /// The view of the group for steps of a layer, from the one for all layers.
    pub(super) fn group(&self, layer: &Layer, group: Group) -> Group {
        let routed = layer.spec.experts.count as u32;
        match &self.placement {
            Some(placed) => {
                let copies = placed.copies.as_ref().map_or(0, Buffer::address);
                Group { experts: group.ranks * placed.all(), copies, ..group }
            }
            None => Group { experts: routed, copies: 0, ..group },
        }
    }

    /// Number of this rank's physical experts in a layer, slots included.
    pub(super) fn local_experts(&self, layer: &Layer) -> u32 {
        self.placement.as_ref().map_or(layer.mine.len() as u32, DevicePlacement::all)
    }

    /// Number of this rank's physical experts in a layer, without slots.
    pub(super) fn held_experts(&self, layer: &Layer) -> u32 {
        self.placement.as_ref().map_or(layer.mine.len() as u32, |placed| placed.per_rank)
    }

    /// Adds `slots` physical experts to every layer, to which no expert belongs yet.
    pub(super) fn add_slots(&mut self, device: &Device, slots: u32) -> Result<(), DeviceError> {
        let Some(placed) = self.placement.as_mut().filter(|_| slots > 0) else { return Ok(()) };
        let mut ids = Vec::new();
        for of_layer in placed.local_ids.read()?.chunks(placed.per_rank.max(1) as usize) {
            ids.extend_from_slice(of_layer);
            ids.resize(ids.len() + slots as usize, 0);
        }
        placed.local_ids = Buffer::from_slice(device, &ids)?;
        placed.slots = slots;
        Ok(())
    }

    /// The tables in which slots are named.
    pub(super) fn slot_tables(&self) -> SlotTables {
        let held = self.placement.as_ref().map_or(0, |placed| placed.per_rank);
        SlotTables { resident: self.resident(), local_ids: self.local_ids(), held }
    }

    /// Address of `CopyOutParams::local_ids`.
    pub(super) fn local_ids(&self) -> u64 {
        self.placement.as_ref().map_or(0, |placed| placed.local_ids.address())
    }

    /// Address of `TierParams::resident`; 0 outside of mixed groups.
    pub(super) fn resident(&self) -> u64 {
        let resident = self.placement.as_ref().and_then(|placed| placed.resident.as_ref());
        resident.map_or(0, Buffer::address)
    }

    /// Makes the tables of layers whose weights lie in `memory`. `tables` is the placement of their experts, as seen by `rank`.
    pub(super) fn new(
        device: &Device,
        layers: Vec<Option<Layer>>,
        (tables, rank): (Option<&Tables>, Rank),
        weight_bytes: u64,
        memory: ShareableMemory,
    ) -> Result<Self, DeviceError> {
        let shared = |layer: &Layer| entry(layer.shared.as_ref().map(|shared| &shared.experts));
        let shared_gate = |layer: &Layer| layer.shared.as_ref().map_or(0, |shared| shared.gate);
        Ok(Self {
            gates: Buffer::from_slice(device, &each(&layers, |layer| layer.gate))?,
            experts: Buffer::from_slice(device, &each(&layers, |layer| entry(layer.experts.as_ref())))?,
            shared: Buffer::from_slice(device, &each(&layers, shared))?,
            shared_gates: Buffer::from_slice(device, &each(&layers, shared_gate))?,
            placement: tables.map(|tables| DevicePlacement::new(device, tables, rank)).transpose()?,
            layers,
            weight_bytes,
            _memory: memory,
        })
    }
}

/// `[layers]`: takes places for a share of all layers. `facts` has an entry for each layer. `is_mixed`: in a mixed group, layers that are
/// whole on the source and others are of different classes.
pub(super) fn place(
    spec: &ModelSpec,
    share: &ExpertShare,
    is_mixed: bool,
    products: Fp8Products,
    facts: &[LayerFacts],
    space: &mut WeightSpace,
) -> Vec<Option<Layer>> {
    let mut layers: Vec<Option<Layer>> = Vec::with_capacity(spec.num_layers);
    for (index, (moe, facts)) in (0..).zip(spec.layers.iter().zip(facts)) {
        let layer = moe.as_ref().map(|moe| {
            let mut experts_of = |stored: Stored, count, width, biases, block_scales| {
                let format = stored.on_device(products);
                let mut experts = CudaExperts::place(space, format, count, spec.hidden, width, biases);
                experts.set_block_scales(block_scales);
                experts
            };
            let mine = share.experts(LayerId(index), moe);
            let is_whole = is_mixed && share.is_whole(LayerId(index));
            let MoeLayer { experts: routed, shared, .. } = moe;
            let experts = (!mine.is_empty()).then(|| {
                let stored = Stored::routed(routed);
                experts_of(stored, mine.len(), routed.width, routed.biases, facts.block_scales)
            });
            let shared = shared.as_ref().map(|shared| {
                let block_scales = facts.shared_block_scales;
                let stored = Stored::shared(shared);
                (experts_of(stored, 1, shared.width, shared.biases, block_scales), shared.gated)
            });
            let row = padded(spec.hidden) * size_of::<u16>();
            let shared = shared.map(|(experts, is_gated)| SharedExperts {
                experts,
                gate: space.take(if is_gated { row } else { 0 }),
            });
            Layer {
                index: index as usize,
                spec: moe.clone(),
                class: class_of(&layers, moe, is_whole),
                is_whole,
                mine,
                format: Stored::routed(&moe.experts).on_device(products),
                gate: place_gate(&moe.gate, row, facts.gate_low, space),
                experts,
                shared,
            }
        });
        layers.push(layer);
    }
    layers
}

/// Takes places for a gate whose rows have `row` bytes.
fn place_gate(spec: &GateSpec, row: usize, has_low: bool, space: &mut WeightSpace) -> GateLayer {
    let count = spec.num_experts;
    let of = |present: bool, bytes: usize| if present { bytes } else { 0 };
    GateLayer {
        weight: space.take(count * row),
        weight_low: space.take(of(has_low, count * row)),
        logit_bias: space.take(of(spec.logit_bias, count * size_of::<f32>())),
        correction_bias: space.take(of(spec.correction_bias, count * size_of::<f32>())),
        token_table: space.take(spec.vocab().unwrap_or(0) * spec.top_k * size_of::<i32>()),
    }
}

/// The class of the layers that equal `moe` and are whole like it, or a new class.
fn class_of(layers: &[Option<Layer>], moe: &MoeLayer, is_whole: bool) -> usize {
    let known = || layers.iter().flatten();
    let alike =
        known().find(|layer| layer.spec == *moe && layer.is_whole == is_whole).map(|layer| layer.class);
    alike.unwrap_or_else(|| known().map(|layer| layer.class + 1).max().unwrap_or(0))
}

fn each<T: Default>(layers: &[Option<Layer>], of: impl Fn(&Layer) -> T) -> Vec<T> {
    layers.iter().map(|layer| layer.as_ref().map_or_else(T::default, &of)).collect()
}

fn entry(experts: Option<&CudaExperts>) -> LayerWeights {
    experts.map(CudaExperts::weights).unwrap_or_default()
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
