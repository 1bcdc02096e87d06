//! A rank's packed weights, and their layout in sealed memory.
//!
//! The memory begins with a [`Header`]: a magic number, the version of the layout, and the length of the [`Index`] that
//! follows it as JSON. The index describes the model and names, in the order of layers, where the packed matrices and
//! small vectors lie. All places are offsets from the beginning of the memory, so that each process maps it anywhere.

mod held;

pub use held::HeldExperts;

use std::mem::size_of;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use expertd_compute::experts::ExpertKind;
use expertd_compute::experts::cpu::{CpuExpert, ExpertError, ExpertParts};
use expertd_compute::gate::{CpuGate, GateParts};
use expertd_compute::linalg::{PackedForm, PackedMatrix, SharedBytes, StoredError};
use expertd_ipc::control::LoaderSetup;
use expertd_ipc::{SealedError, SealedMemory, SealedWriter};
use expertd_model::{Checkpoint, ModelError, ModelSpec, MoeLayer};
use expertd_rank::share::{ExpertShare, ReadBuffers, open_checkpoint, weights};
use expertd_rank::{PackedShare, Progress};
use expertd_types::{ExpertId, ExpertOwners, ExpertPlacement, Fp8Products, LayerId, Rank, WeightFingerprint};

/// Marks the memory as packed weights of CPU ranks.
const MAGIC: [u8; 8] = *b"xpdcpuwt";
/// Changes with every change of the layout, also of packed matrices.
const LAYOUT: u32 = 5;
/// Alignment of every part, in bytes.
const ALIGN: u64 = 64;
/// Upper bound of the bytes that one part takes in the index.
const PART_BYTES: u64 = 320;

/// Why a rank's weights could not be packed or mapped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum WeightsError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("layer {layer}, {which}: {source}")]
    Expert { layer: LayerId, which: String, source: ExpertError },
    #[error(transparent)]
    Memory(#[from] SealedError),
    #[error("cannot start the threads that pack weights: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    #[error("packed weights: {0}")]
    Stored(#[from] StoredError),
    #[error("packed weights: expected {expected}, found {found}")]
    Contents { expected: String, found: String },
}

/// The shared experts of a layer, packed as one MLP.
pub(crate) struct SharedMlp {
    pub(crate) kind: ExpertKind,
    pub(crate) mlp: CpuExpert,
    /// `[hidden]`: the output of each token is multiplied by the sigmoid of this vector's dot product with the token.
    pub(crate) gate: Option<Vec<f32>>,
}

/// A rank's part of one MoE block: the routed experts that the rank holds; on ranks that get rows, also the whole gate and the shared
/// experts.
pub(crate) struct RankLayer {
    /// `None` on a rank that gets no rows.
    pub(crate) gate: Option<CpuGate>,
    /// The ranks that own each expert.
    pub(crate) owners: ExpertOwners,
    /// Whether the first rank owns all of them, by the placement. In a mixed group it then runs the layer's steps alone.
    pub(crate) is_whole: bool,
    /// Experts that this rank holds, ascending.
    pub(crate) mine: Vec<u32>,
    /// `[experts]`: index in `mine` of each expert, or [`NOT_HERE`].
    pub(crate) local: Vec<u32>,
    pub(crate) kind: ExpertKind,
    pub(crate) experts: Vec<CpuExpert>,
    pub(crate) shared: Option<SharedMlp>,
}

impl RankLayer {
    /// An expert that the rank holds.
    ///
    /// # Panics
    /// If it does not.
    pub(crate) fn expert(&self, id: ExpertId) -> &CpuExpert {
        &self.experts[self.local[id.index()] as usize]
    }
}

/// Entry of [`RankLayer::local`] for an expert that the rank does not hold.
pub(crate) const NOT_HERE: u32 = u32::MAX;

/// A rank's weights, mapped.
pub(crate) struct RankWeights {
    pub(crate) spec: ModelSpec,
    pub(crate) layers: Vec<Option<RankLayer>>,
    pub(crate) weight_bytes: u64,
    pub(crate) memory: Arc<SealedMemory>,
}

/// The first bytes of the memory.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    layout: u32,
    reserved: u32,
    index_bytes: u64,
}

/// Where a part lies: its offset and its length, in bytes.
type Place = [u64; 2];

/// A packed matrix in the memory.
#[derive(Serialize, Deserialize)]
struct StoredMatrix {
    form: PackedForm,
    elements: Place,
    scales: Place,
}

/// The contents of the memory.
#[derive(Serialize, Deserialize)]
struct Index {
    fingerprint: WeightFingerprint,
    rank: Rank,
    ranks: usize,
    sources: usize,
    /// The owners of experts; `None`: contiguous ranges.
    placement: Option<ExpertPlacement>,
    weight_bytes: u64,
    spec: ModelSpec,
    /// Of each layer with an MoE block: the gate; then gate and up, and down, of each held expert and of the shared ones. Ranks that get
    /// no rows have no gates and no shared experts.
    matrices: Vec<StoredMatrix>,
    /// Of each layer with an MoE block: the gate's bias, correction bias and table; then the two biases of each expert and
    /// of the shared ones, and the gate of these. Empty where there is none, missing with the matrices.
    vectors: Vec<Place>,
}

/// Packs one rank's share of a checkpoint into sealed memory, and proves that it is of the expected weights.
///
/// # Errors
/// If the checkpoint cannot be read, holds other weights or changes meanwhile, or there is no memory.
pub fn pack(setup: &LoaderSetup, progress: &Progress) -> Result<PackedShare, WeightsError> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(setup.threads)
        .thread_name(|i| format!("pack-{i}"))
        .build()?;
    let checkpoint = pool.install(|| open_checkpoint(&setup.checkpoint, progress))?;
    let spec = checkpoint.spec();
    let placement = setup.checkpoint.placement.clone();
    let share = ExpertShare::of_rank(setup.rank, setup.ranks as usize, placement.clone())
        .with_sources(setup.sources as usize);
    let weight_bytes = share.bytes(spec);
    progress.set(0, weight_bytes);
    let index = Index {
        fingerprint: setup.checkpoint.fingerprint,
        rank: setup.rank,
        ranks: share.ranks,
        sources: setup.sources as usize,
        placement,
        weight_bytes,
        spec: spec.clone(),
        matrices: Vec::new(),
        vectors: Vec::new(),
    };
    let mut packer = Packer::new(index, &share)?;
    let (mut loaded, buffers) = (0, ReadBuffers::new(&checkpoint));
    for (layer, moe) in spec.moe_layers() {
        if share.is_source() {
            packer.gate(&CpuGate::new(&moe.gate, &checkpoint.gate(layer)?))?;
        }
        let mine = share.experts(layer, moe);
        // Few at a time: what is packed and not yet written is held twice.
        for experts in mine.chunks(2 * setup.threads) {
            let packed: Vec<Result<CpuExpert, WeightsError>> = pool.install(|| {
                experts.par_iter().map(|&expert| pack_expert(&checkpoint, layer, expert, &buffers)).collect()
            });
            for expert in packed {
                packer.expert(&expert?)?;
                loaded += moe.experts.bytes;
                progress.set(loaded, weight_bytes);
            }
        }
        if !share.is_source() {
            continue;
        }
        let mut buffer = buffers.take();
        let tensors = pool.install(|| checkpoint.read_shared(layer, &mut buffer))?;
        if let (Some(tensors), Some(shared)) = (tensors, &moe.shared) {
            let packed = CpuExpert::pack(&weights(&tensors.mlp));
            let failed = |source| WeightsError::Expert { layer, which: "shared experts".into(), source };
            packer.expert(&packed.map_err(failed)?)?;
            packer.vector(tensors.gate.as_deref().unwrap_or_default())?;
            loaded += shared.bytes;
            progress.set(loaded, weight_bytes);
        }
        buffers.put_back(buffer);
    }
    // The bytes that were packed are those of the fingerprint if no file changed in between.
    checkpoint.check_unchanged()?;
    let share = packer.seal(weight_bytes)?;
    let read = buffers.total();
    tracing::debug!(cached_bytes = read.cached, direct_bytes = read.direct, "packed");
    Ok(PackedShare { used: Box::new(checkpoint), ..share })
}

fn pack_expert(
    checkpoint: &Checkpoint,
    layer: LayerId,
    expert: u32,
    buffers: &ReadBuffers,
) -> Result<CpuExpert, WeightsError> {
    let mut buffer = buffers.take();
    let tensors = checkpoint.read_expert(layer, ExpertId(expert), &mut buffer)?;
    let failed = |source| WeightsError::Expert { layer, which: format!("expert {expert}"), source };
    let packed = CpuExpert::pack(&weights(&tensors)).map_err(failed)?;
    buffers.put_back(buffer);
    Ok(packed)
}

/// Writes parts one after another.
struct Packer {
    memory: SealedWriter,
    index: Index,
    /// End of the space for the index.
    first: u64,
    next: u64,
}

impl Packer {
    fn new(index: Index, share: &ExpertShare) -> Result<Self, WeightsError> {
        let parts = |(layer, moe)| 4 + 4 * share.experts(layer, moe).len() as u64 + 5;
        let parts: u64 = index.spec.moe_layers().map(parts).sum();
        let described = serde_json::to_vec(&(&index.spec, &index.placement));
        let spec = described.map_or(0, |json| json.len() as u64);
        // Space that the index does not fill takes no memory.
        let first = (spec + parts * PART_BYTES + 4096).next_multiple_of(4096);
        let memory = SealedWriter::create(&format!("expertd-weights-{}", index.rank))?;
        Ok(Packer { memory, index, first, next: first })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<Place, WeightsError> {
        if bytes.is_empty() {
            return Ok([0, 0]);
        }
        let place = [self.next, bytes.len() as u64];
        self.memory.write_at(self.next, bytes)?;
        self.next = (self.next + bytes.len() as u64).next_multiple_of(ALIGN);
        Ok(place)
    }

    fn matrix(&mut self, matrix: &PackedMatrix) -> Result<(), WeightsError> {
        let elements = self.write(matrix.elements())?;
        let scales = self.write(bytemuck::cast_slice(matrix.scales()))?;
        self.index.matrices.push(StoredMatrix { form: matrix.form(), elements, scales });
        Ok(())
    }

    fn vector<T: Pod>(&mut self, values: &[T]) -> Result<(), WeightsError> {
        let place = self.write(bytemuck::cast_slice(values))?;
        self.index.vectors.push(place);
        Ok(())
    }

    fn gate(&mut self, gate: &CpuGate) -> Result<(), WeightsError> {
        self.matrix(gate.weight())?;
        let (bias, correction, table) = gate.vectors();
        self.vector(bias.unwrap_or_default())?;
        self.vector(correction.unwrap_or_default())?;
        self.vector(table)
    }

    fn expert(&mut self, expert: &CpuExpert) -> Result<(), WeightsError> {
        for (matrix, bias) in expert.matrices().into_iter().zip(expert.biases()) {
            self.matrix(matrix)?;
            self.vector(bias)?;
        }
        Ok(())
    }

    fn seal(mut self, weight_bytes: u64) -> Result<PackedShare, WeightsError> {
        let contents =
            |found: String| WeightsError::Contents { expected: "room for the index".into(), found };
        let index = serde_json::to_vec(&self.index).map_err(|error| contents(error.to_string()))?;
        let start = size_of::<Header>() as u64;
        if start + index.len() as u64 > self.first {
            return Err(contents(format!("{} bytes of index for {}", index.len(), self.first)));
        }
        let header = Header { magic: MAGIC, layout: LAYOUT, reserved: 0, index_bytes: index.len() as u64 };
        self.memory.write_at(0, bytemuck::bytes_of(&header))?;
        self.memory.write_at(start, &index)?;
        let memory_bytes = self.memory.len();
        Ok(PackedShare { memory: vec![self.memory.seal()?], memory_bytes, weight_bytes, used: Box::new(()) })
    }
}

/// Maps the weights that a loader has packed for `rank` of `ranks`, of which `sources` get rows. They are packed alike whatever
/// `fp8_products` says.
pub(crate) fn map(
    fd: OwnedFd,
    rank: Rank,
    (ranks, sources): (usize, usize),
    fingerprint: &WeightFingerprint,
    fp8_products: Fp8Products,
) -> Result<RankWeights, WeightsError> {
    let memory = SealedMemory::map(fd)?;
    let bytes = (*memory).as_ref();
    let contents = |expected: String, found: String| WeightsError::Contents { expected, found };
    let start = size_of::<Header>();
    let header: Header = match bytes.get(..start) {
        Some(bytes) => bytemuck::pod_read_unaligned(bytes),
        None => return Err(contents(format!("a header of {start} bytes"), format!("{} bytes", bytes.len()))),
    };
    if (header.magic, header.layout) != (MAGIC, LAYOUT) {
        let found = format!("layout {} with magic {:02x?}", header.layout, header.magic);
        return Err(contents(format!("layout {LAYOUT} with magic {MAGIC:02x?}"), found));
    }
    let end = usize::try_from(header.index_bytes).ok().and_then(|length| start.checked_add(length));
    let json = end.and_then(|end| bytes.get(start..end));
    let json = json.ok_or_else(|| contents("an index".into(), format!("{} bytes", bytes.len())))?;
    let index: Index =
        serde_json::from_slice(json).map_err(|error| contents("an index".into(), error.to_string()))?;
    let group = (index.rank, index.ranks, index.sources);
    if (group, index.fingerprint) != ((rank, ranks, sources), *fingerprint) {
        let share = |(rank, ranks, sources): (Rank, usize, usize), fingerprint| {
            format!("rank {rank} of {ranks}, {sources} with rows, and fingerprint {fingerprint}")
        };
        return Err(contents(share((rank, ranks, sources), fingerprint), share(group, &index.fingerprint)));
    }
    let mut parts = UntakenParts {
        shared: Arc::clone(&memory) as SharedBytes,
        matrices: index.matrices.into_iter(),
        vectors: index.vectors.into_iter(),
        fp8_products,
    };
    let share = ExpertShare::of_rank(rank, ranks, index.placement).with_sources(sources);
    let layers = (0..).map(LayerId).zip(&index.spec.layers);
    let layers =
        layers.map(|(layer, moe)| moe.as_ref().map(|moe| parts.layer(layer, moe, &share)).transpose());
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    Ok(RankWeights { layers, spec: index.spec, weight_bytes: index.weight_bytes, memory })
}

/// The parts that were not taken yet.
struct UntakenParts {
    shared: SharedBytes,
    matrices: std::vec::IntoIter<StoredMatrix>,
    vectors: std::vec::IntoIter<Place>,
    /// The experts that multiply rows in FP8.
    fp8_products: Fp8Products,
}

fn range([offset, bytes]: Place) -> Range<usize> {
    // An offset beyond the address space lies outside the memory, too.
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    start..start.saturating_add(usize::try_from(bytes).unwrap_or(usize::MAX))
}

impl UntakenParts {
    fn ended(what: &str) -> WeightsError {
        WeightsError::Contents { expected: format!("another {what}"), found: "the end of the index".into() }
    }

    fn matrix(&mut self) -> Result<PackedMatrix, WeightsError> {
        let StoredMatrix { form, elements, scales } =
            self.matrices.next().ok_or_else(|| Self::ended("matrix"))?;
        Ok(PackedMatrix::in_memory(form, &self.shared, range(elements), range(scales))?)
    }

    fn vector<T: Pod>(&mut self) -> Result<Vec<T>, WeightsError> {
        let place = range(self.vectors.next().ok_or_else(|| Self::ended("vector"))?);
        let memory = (*self.shared).as_ref();
        let wrong = || WeightsError::Contents {
            expected: format!("a vector within {} bytes", memory.len()),
            found: format!("one at {place:?}"),
        };
        let bytes = memory.get(place.clone()).ok_or_else(wrong)?;
        Ok(bytemuck::try_cast_slice(bytes).map_err(|_| wrong())?.to_vec())
    }

    fn expert(&mut self, layer: &str) -> Result<CpuExpert, WeightsError> {
        let (gate_up, gate_up_bias) = (self.matrix()?, self.vector()?);
        let (down, down_bias) = (self.matrix()?, self.vector()?);
        let parts = ExpertParts { gate_up, down, gate_up_bias, down_bias };
        CpuExpert::from_parts(parts).map_err(|error| WeightsError::Contents {
            expected: format!("an expert of {layer}"),
            found: error.to_string(),
        })
    }

    fn gate(&mut self, moe: &MoeLayer) -> Result<CpuGate, WeightsError> {
        let (weight, bias, correction) = (self.matrix()?, self.vector()?, self.vector()?);
        let parts = GateParts {
            weight,
            bias: moe.gate.logit_bias.then_some(bias),
            correction: moe.gate.correction_bias.then_some(correction),
            table: self.vector()?,
        };
        CpuGate::from_parts(&moe.gate, parts).ok_or_else(|| WeightsError::Contents {
            expected: format!("a gate of {} experts", moe.gate.num_experts),
            found: "parts of another gate".into(),
        })
    }

    fn layer(
        &mut self,
        layer: LayerId,
        moe: &MoeLayer,
        share: &ExpertShare,
    ) -> Result<RankLayer, WeightsError> {
        let is_source = share.is_source();
        let gate = is_source.then(|| self.gate(moe)).transpose()?;
        let mine = share.experts(layer, moe);
        let experts = mine.iter().map(|expert| self.expert(&format!("layer {layer}, expert {expert}")));
        let experts = experts.collect::<Result<Vec<_>, _>>()?;
        let shared = match moe.shared.as_ref().filter(|_| is_source) {
            Some(spec) => {
                let mlp = self.expert("the layer's shared experts")?;
                let gate: Vec<f32> = self.vector()?;
                let kind = ExpertKind::shared(spec, self.fp8_products);
                Some(SharedMlp { kind, mlp, gate: spec.gated.then_some(gate) })
            }
            None => None,
        };
        let owners = share.layer(layer, moe).owners(moe.experts.count);
        let mut local = vec![NOT_HERE; moe.experts.count];
        for (index, expert) in (0..).zip(&mine) {
            *local.get_mut(*expert as usize).ok_or_else(|| WeightsError::Contents {
                expected: format!("experts below {} in layer {layer}", moe.experts.count),
                found: format!("expert {expert}"),
            })? = index;
        }
        let kind = ExpertKind::routed(&moe.experts, self.fp8_products);
        let is_whole = share.is_whole(layer);
        Ok(RankLayer { gate, owners, is_whole, mine, local, kind, experts, shared })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
