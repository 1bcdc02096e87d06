//! A rank's packed weights in device memory that outlives ranks: a loader packs them, ranks of every generation map them.
//!
//! All weights of a rank lie in one allocation, whose descriptor the loader exports. A second descriptor is sealed memory with
//! the [`Index`] as JSON. Places in the allocation follow from the index by [`place`], in the loader and in ranks alike.

use std::os::fd::{AsFd as _, OwnedFd};

use expertd_kernels::device::{Device, DeviceError, ShareableMemory};
use expertd_kernels::path::KernelPath;
use serde::{Deserialize, Serialize};

use super::layers::{LayerFacts, Layers, Tables, place};
use super::open::open;
use super::upload::Upload;
use super::weights_error::WeightsError;
use crate::experts::{PackOn, WeightSpace, bf16_parts, padded};
use crate::{RankGpu, check_portable, copy_tables, resident_tables};
use expertd_ipc::control::{LoaderSetup, RankSetup};
use expertd_ipc::{SealedMemory, SealedWriter};
use expertd_model::{Checkpoint, ModelSpec};
use expertd_rank::share::{ExpertShare, open_checkpoint};
use expertd_rank::{PackedShare, Progress, SetupClock};
use expertd_types::{ExpertPlacement, Fp8Products, LayerId, Rank, WeightFingerprint};

/// Changes with every change of the places of weights or of their formats.
const LAYOUT: u32 = 7;
/// Device memory that a loader leaves to buffers of steps, graphs and the driver, for each rank on the GPU, in bytes.
const RESERVE: u64 = 1 << 30;
/// Largest number of threads that copy weights from the page cache to pinned memory.
const LOAD_THREADS: usize = 16;

/// The contents of the device memory.
#[derive(Debug, Serialize, Deserialize)]
struct Index {
    layout: u32,
    fingerprint: WeightFingerprint,
    rank: Rank,
    ranks: usize,
    fp8_products: Fp8Products,
    /// Size of the rank's share in the checkpoint, in bytes.
    weight_bytes: u64,
    /// Size of the device memory, in bytes.
    memory_bytes: usize,
    spec: ModelSpec,
    /// `None`: ranks own contiguous ranges of experts.
    placement: Option<ExpertPlacement>,
    /// `[layers]`.
    facts: Vec<LayerFacts>,
}

/// Packs one rank's share of a checkpoint into device memory, and proves that it is of the expected weights.
///
/// # Errors
/// If the checkpoint cannot be read, holds other weights or changes meanwhile, or the device has no room for it.
pub(crate) fn pack(setup: &LoaderSetup, progress: &Progress) -> Result<PackedShare, WeightsError> {
    let mut clock = SetupClock::start();
    let gpu = RankGpu::of(setup.rank, &setup.gpus).map_err(WeightsError::Gpu)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(setup.threads.min(LOAD_THREADS))
        .thread_name(|i| format!("load-{i}"))
        .build()?;
    // The driver starts while the checkpoint is read.
    let (device, checkpoint) = std::thread::scope(|scope| {
        let device = scope.spawn(|| open(gpu.index));
        let checkpoint = pool.install(|| open_checkpoint(&setup.checkpoint, progress));
        let device = device.join().unwrap_or_else(|_| Err(DeviceError::NoDriver.to_string()));
        (device, checkpoint)
    });
    let (device, checkpoint) = (device.map_err(WeightsError::Gpu)?, checkpoint?);
    device.bind()?;
    let spec = checkpoint.spec();
    if KernelPath::chosen() == KernelPath::Portable {
        check_portable(spec, setup.fp8_products).map_err(WeightsError::Gpu)?;
    }
    let share = ExpertShare::of_rank(setup.rank, setup.ranks as usize, setup.checkpoint.placement.clone());
    clock.end("device and checkpoint");
    let mut facts = pool.install(|| facts_of(&checkpoint))?;
    clock.end("gates");
    let mut space = WeightSpace::counting();
    place(spec, &share, false, setup.fp8_products, &facts, &mut space);
    let bytes = space.bytes();
    let memory = allocate(&device, gpu, bytes)?;
    let mut space = WeightSpace::at(memory.address());
    let mut layers = place(spec, &share, false, setup.fp8_products, &facts, &mut space);
    let pack_on = if setup.in_background { PackOn::Host } else { PackOn::Device };
    clock.end("device memory");
    let upload = Upload { device: &device, pool: &pool, pack_on, checkpoint: &checkpoint, share: &share };
    let read = upload.run(&mut layers, progress)?;
    clock.end("upload");
    // The bytes that were packed are those of the fingerprint if no file changed in between.
    checkpoint.check_unchanged()?;
    for (facts, layer) in facts.iter_mut().zip(&layers) {
        let Some(layer) = layer else { continue };
        facts.block_scales = layer.experts.as_ref().is_some_and(|experts| experts.has_block_scales());
        facts.shared_block_scales =
            layer.shared.as_ref().is_some_and(|shared| shared.experts.has_block_scales());
    }
    let weight_bytes = share.bytes(spec);
    let index = Index {
        layout: LAYOUT,
        fingerprint: setup.checkpoint.fingerprint,
        rank: setup.rank,
        ranks: share.ranks,
        fp8_products: setup.fp8_products,
        weight_bytes,
        memory_bytes: memory.bytes(),
        spec: spec.clone(),
        placement: setup.checkpoint.placement.clone(),
        facts,
    };
    let json = serde_json::to_vec(&index).map_err(|error| contents("an index", error))?;
    let mut writer = SealedWriter::create(&format!("expertd-weights-{}", setup.rank))?;
    writer.write_at(0, &json)?;
    let memories = vec![writer.seal()?, memory.export()?];
    clock.end("export");
    tracing::debug!(parts = %clock, cached_bytes = read.cached, direct_bytes = read.direct, "packed");
    let memory_bytes = memory.bytes() as u64;
    Ok(PackedShare {
        memory: memories,
        memory_bytes,
        weight_bytes,
        used: Box::new((memory, checkpoint, device)),
    })
}

/// Allocates the memory of a rank's weights on a GPU that has room for them and for a reserve of each rank.
fn allocate(device: &Device, gpu: RankGpu, bytes: u64) -> Result<ShareableMemory, WeightsError> {
    let reserve = RESERVE * u64::from(gpu.ranks);
    let needed = bytes + reserve;
    let check = |needed: u64, held: u64| {
        let (free, total) = device.memory()?;
        let (free, total) = (free as u64 + held, total as u64);
        let lacks = WeightsError::Room { gpu: gpu.index, gpu_ranks: gpu.ranks, free, total, needed };
        if needed > free { Err(lacks) } else { Ok(()) }
    };
    check(needed, 0)?;
    let memory = ShareableMemory::allocate(device, usize::try_from(bytes).unwrap_or(usize::MAX));
    if gpu.ranks == 1 {
        return Ok(memory?);
    }
    // The loaders of the other ranks allocate at the same time. The last of them finds what all of them have left.
    match memory {
        Ok(memory) => check(needed, memory.bytes() as u64).map(|()| memory),
        Err(error) => {
            check(needed, 0)?;
            Err(error.into())
        }
    }
}

fn contents(expected: impl ToString, found: impl ToString) -> WeightsError {
    WeightsError::Contents { expected: expected.to_string(), found: found.to_string() }
}

/// Properties of all layers, block scales assumed wherever a format has them.
fn facts_of(checkpoint: &Checkpoint) -> Result<Vec<LayerFacts>, WeightsError> {
    let hidden = padded(checkpoint.spec().hidden);
    let of = |(layer, moe): (u32, &Option<_>)| {
        if moe.is_none() {
            return Ok(LayerFacts::default());
        }
        let gate = checkpoint.gate(LayerId(layer))?;
        let gate_low = bf16_parts(&gate.weight, hidden).1.is_some();
        Ok(LayerFacts { gate_low, block_scales: true, shared_block_scales: true })
    };
    (0..).zip(&checkpoint.spec().layers).map(of).collect()
}

/// What a rank needs of its weights before it maps them.
pub(super) struct HeldWeights {
    index: Index,
    memory: OwnedFd,
}

impl HeldWeights {
    /// Reads the index that a loader has written for this rank.
    pub(super) fn open(setup: &RankSetup, index: OwnedFd, memory: OwnedFd) -> Result<Self, WeightsError> {
        let sealed = SealedMemory::map(index)?;
        let index: Index = serde_json::from_slice((*sealed).as_ref())
            .map_err(|error| contents("an index of packed weights", error))?;
        let ranks = setup.shape.ranks as usize;
        let expected = (LAYOUT, setup.rank, ranks, setup.fingerprint, setup.fp8_products);
        let found = (index.layout, index.rank, index.ranks, index.fingerprint, index.fp8_products);
        if found != expected || index.facts.len() != index.spec.layers.len() {
            let show = |(layout, rank, ranks, fingerprint, products): (
                u32,
                Rank,
                usize,
                WeightFingerprint,
                Fp8Products,
            )| {
                let Fp8Products { of_fp8, of_mxfp4 } = products;
                format!(
                    "layout {layout}, rank {rank} of {ranks}, fingerprint {fingerprint}, FP8 products of FP8 {of_fp8}, of MXFP4 \
                     {of_mxfp4}"
                )
            };
            return Err(contents(show(expected), show(found)));
        }
        Ok(HeldWeights { index, memory })
    }

    /// The model.
    pub(super) const fn spec(&self) -> &ModelSpec {
        &self.index.spec
    }

    /// The share of experts that was packed.
    fn share(&self) -> ExpertShare {
        ExpertShare::of_rank(self.index.rank, self.index.ranks, self.index.placement.clone())
    }

    /// The tables of the placement, if there is one or the group is mixed.
    pub(super) fn tables(&self, is_mixed: bool) -> Option<Tables> {
        if is_mixed {
            return Some(Tables::Resident(resident_tables(&self.index.spec, &self.share())));
        }
        copy_tables(&self.index.spec, &self.share()).map(Tables::Copies)
    }

    /// Maps the weights, for reading only. `tables` are those of [`tables`](Self::tables).
    pub(super) fn map(self, device: &Device, tables: Option<&Tables>) -> Result<Layers, WeightsError> {
        let share = self.share();
        let Index { rank, fp8_products, weight_bytes, memory_bytes, spec, facts, .. } = self.index;
        let memory = ShareableMemory::import(device, self.memory.as_fd(), memory_bytes)?;
        let mut space = WeightSpace::at(memory.address());
        let is_mixed = matches!(tables, Some(Tables::Resident(_)));
        let layers = place(&spec, &share, is_mixed, fp8_products, &facts, &mut space);
        if space.bytes() > memory_bytes as u64 {
            let found = format!("{memory_bytes} bytes of device memory");
            return Err(contents(format!("{} bytes of weights", space.bytes()), found));
        }
        Ok(Layers::new(device, layers, (tables, rank), weight_bytes, memory)?)
    }
}
