//! The step engine of a GPU rank. Every phase of a step is a kernel on one stream; the host describes the step and waits.
//!
//! A step may start before the previous one has ended: the stream runs their kernels in the same order on every rank, and each
//! step has the buffers of its slot to itself. For few rows, kernels read and write the channel's staging, which is pinned.
//! For many rows, copy engines work beside the kernels of other steps (`copies`), or of the same step, if it runs alone (`parts`).
//! Rows in the host memory of a client are accessed there in the same two ways, rows in the memory of a client's GPU by kernels only
//! (`memories`). If the kernels need a padded hidden size,
//! the host widens rows to f32 in pinned memory of its own, and narrows the results.
//!
//! The launches of a step are captured as graphs before the rank is ready: one graph for each class of layers, slot and
//! [`Variant`]. Everything else that differs between steps is data in memory: the request in a mailbox, rows and segments in
//! staging, weights in tables by layer. Steps whose k differs from the layer's, and steps in parts, are launched kernel by kernel.

#![allow(unsafe_code, reason = "kernels work on memory that Rust only sees as addresses")]

mod copies;
mod counts;
mod fault;
#[cfg(test)]
mod gate_tests;
mod graphs;
mod host_experts;
mod injected;
mod layers;
pub(crate) mod memories;
pub(crate) mod open;
mod pad;
mod parts;
mod probe;
mod run;
mod setup;
mod step;
mod tier;
mod upload;
mod usage;
mod weights;
mod weights_error;

pub(crate) use probe::{check_ceilings, inventory, probe};
pub(crate) use setup::load;
pub(crate) use weights::pack;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use expertd_kernels::device::{Device, Pinned, Stream};
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{Group, Segment as DeviceSegment};
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};

use self::copies::Copies;
use self::counts::DeviceCounts;
use self::fault::CudaFault;
use self::graphs::{Graphs, Half, RowPath, Variant};
use self::host_experts::CopiedExperts;
use self::layers::{Layer, Layers};
use self::memories::Memories;
use self::parts::{Cut, Parts};
use self::run::{Running, Watch};
use self::step::{Buffers, COPY_BLOCKS, SlotSet, StagedAddresses, StepLaunches, copy_blocks};
use self::tier::Tier;
use crate as gpu;
use crate::windows::LsaWindows;
use expertd_ipc::control::RankSetup;
use expertd_ipc::{Segment, StagingAddresses};
use expertd_types::Rank;

/// Copy engines carry the rows of a step with at least this many bytes of bf16 rows per rank. For fewer bytes their latency
/// exceeds the time that they hide.
const COPIED_FROM: usize = 1 << 20;
/// For tests (see [`expertd_shm::faults`]): copy engines carry the rows of all steps, into memory that is filled with NaN before, so
/// that a kernel that reads too early gives a wrong result. The value is that of [`Cut::parse`].
const POISON: &str = "EXPERTD_CUDA_POISON";

/// The pinned staging of the channel.
struct PinnedStaging {
    /// Address of the first pinned byte in this process.
    first: usize,
    bytes: usize,
    staging: Pinned<'static>,
}

impl PinnedStaging {
    /// Device address of a host address in the staging.
    fn device<T>(&self, host: *const T) -> u64 {
        let at = host as usize - self.first;
        debug_assert!(at <= self.bytes, "an address outside the staging");
        self.staging.address() + at as u64
    }
}

/// The engine of one GPU rank. `drop` drains the streams; then fields are dropped in their order, memory last.
pub(super) struct CudaEngine {
    stream: Stream,
    graphs: Graphs,
    /// `None` if rows are padded on the host.
    copies: Option<Copies>,
    /// Smallest number of rows per rank of a variant that uses `copies`.
    copied_from: u32,
    cut: Cut,
    /// See [`gpu::ALIGNED`].
    aligned: bool,
    /// Steps in flight, oldest first.
    running: VecDeque<Running>,
    watch: Watch,
    windows: LsaWindows,
    groups: Vec<Group>,
    buffers: Buffers,
    layers: Layers,
    counts: DeviceCounts,
    host: PinnedStaging,
    /// The wire to the CPU ranks of a mixed group.
    tier: Option<Tier>,
    memories: Memories,
    shape: Shape,
    /// Elements of a row without padding.
    hidden: usize,
    multiprocessors: u32,
    /// Largest number of blocks of an exchange.
    most_blocks: u32,
    /// Longest time that the host waits for a step. The deadlines of device waits are shorter.
    step_deadline: Duration,
    device: Device,
    /// `[slots]`: addresses that the kernels of a slot read and write on the host.
    staged: Vec<StagedAddresses>,
}

/// The parts that set-up makes before the engine.
struct EngineParts {
    shape: Shape,
    windows: LsaWindows,
    host: PinnedStaging,
    tier: Option<Tier>,
    counts: DeviceCounts,
    layers: Layers,
    buffers: Buffers,
    copies: Option<Copies>,
}

impl CudaEngine {
    fn new(
        setup: &RankSetup,
        device: Device,
        parts: EngineParts,
        staged: &[StagingAddresses],
    ) -> Result<Self, CudaFault> {
        let EngineParts { shape, windows, host, tier, counts, layers, buffers, copies } = parts;
        let deadline = u64::try_from(setup.peer_timeout.as_nanos()).unwrap_or(u64::MAX);
        let groups = buffers.slots.iter().enumerate().map(|(slot, set)| {
            set.kernels.group(&shape, setup.rank.0, &windows.slot(slot), setup.generation.0, deadline)
        });
        let groups = groups.collect();
        let multiprocessors = device.multiprocessors()?;
        let most_blocks = multiprocessors.min(expertd_kernels::params::MAX_BLOCKS as u32);
        let stream = device.stream()?;
        device.synchronize()?;
        let row_bytes = shape.hidden as usize * 2;
        let mut engine = CudaEngine {
            stream,
            graphs: Graphs::default(),
            copies,
            copied_from: if poison().is_some() { 1 } else { COPIED_FROM.div_ceil(row_bytes) as u32 },
            cut: poison().unwrap_or_else(|| Cut::new(setup.shape.hidden)),
            aligned: std::env::var_os(gpu::ALIGNED).is_some(),
            running: VecDeque::new(),
            watch: Watch::start(),
            windows,
            groups,
            buffers,
            layers,
            counts,
            host,
            tier,
            memories: Memories::new(setup.rank == Rank(0)),
            shape,
            hidden: setup.shape.hidden,
            multiprocessors,
            most_blocks,
            step_deadline: 3 * setup.peer_timeout
                + Duration::from_secs(5)
                + if setup.shape.is_mixed() { setup.step_timeout } else { Duration::ZERO },
            device,
            staged: Vec::new(),
        };
        let slots = engine.buffers.slots.iter().zip(staged);
        engine.staged = slots.map(|(slot, place)| engine.staged(slot, place)).collect();
        if std::env::var_os(gpu::EAGER).is_none() {
            engine.graphs = engine.capture_all()?;
        }
        Ok(engine)
    }

    /// Addresses that the kernels of a slot read and write on the host, the same for every step.
    fn staged(&self, slot: &SlotSet, place: &StagingAddresses) -> StagedAddresses {
        let routing = StagedAddresses {
            ids: self.host.device(place.ids),
            weights: self.host.device(place.weights),
            token_ids: self.host.device(place.token_ids),
            raised: self.host.device(place.raised),
            max_segments: place.max_segments as u32,
            ..StagedAddresses::default()
        };
        if self.shape.hidden as usize == self.hidden {
            StagedAddresses {
                segments: self.host.device(place.segments),
                rows: self.host.device(place.rows),
                row_bytes: place.row_bytes as u64,
                ..routing
            }
        } else {
            StagedAddresses {
                segments: slot.segments.address(),
                max_segments: (place.max_segments as u32).min(self.shape.max_tokens),
                rows: slot.rows.address(),
                row_bytes: u64::from(self.shape.max_tokens) * u64::from(self.shape.hidden) * 4,
                ..routing
            }
        }
    }

    /// Begins to pin the memory of CPU ranks.
    fn start_copies(&mut self) {
        if let Some(copied) = self.tier.as_mut().and_then(|tier| tier.copied.as_mut()) {
            copied.start(&self.device);
        }
    }

    /// The launches of a step.
    fn launches<'a>(
        &'a self,
        layer: &'a Layer,
        slot: usize,
        top_k: u32,
        variant: Variant,
        half: Half,
        parts: Option<Parts<'a>>,
    ) -> StepLaunches<'a> {
        let tier = self.tier_of(layer);
        let copied = tier.and_then(|tier| tier.copied.as_ref());
        let streamed = copied.and_then(|copied| Some((copied, copied.step(slot)?)));
        let group = self.layers.group(layer, self.groups[slot]);
        StepLaunches {
            half,
            tier: tier.map(|tier| tier.places(slot)),
            slots: copied.and_then(CopiedExperts::slots),
            streamed,
            layer,
            slot: &self.buffers.slots[slot],
            counts: &self.counts,
            group: Group {
                top_k,
                experts: streamed.map_or(group.experts, |(_, step)| step.count()),
                ..group
            },
            staged: match self.copies_of(variant) {
                Some(copies) if variant.path == RowPath::Converted => copies.staged(slot, self.staged[slot]),
                _ => self.staged[slot],
            },
            copy_blocks: if self.may_be_copied(variant.rows) && variant.path != RowPath::Unchanged {
                copy_blocks(variant.rows, self.most_blocks)
            } else {
                COPY_BLOCKS
            },
            rows: variant.rows,
            multiprocessors: self.multiprocessors,
            aligned: self.aligned && self.shape.ranks > 1,
            gate_rows: if variant.gated { variant.rows } else { 0 },
            shared: variant.shared,
            dispatch_blocks: dispatch_blocks(&self.shape, variant.rows, self.most_blocks),
            combine_blocks: combine_blocks(&self.shape, variant.rows, self.most_blocks),
            row_elements: self.hidden as u32,
            unchanged: variant.path == RowPath::Unchanged,
            parts,
        }
    }

    fn capture_all(&self) -> Result<Graphs, CudaFault> {
        let mut graphs = Graphs::default();
        let start = Instant::now();
        let copied_from = self.copies.as_ref().map(|_| self.copied_from);
        for (class, layer) in self.layers.classes() {
            for slot in 0..self.buffers.slots.len() {
                for variant in Variant::all(self.shape.max_tokens, layer.shared.is_some(), copied_from) {
                    for &half in self.halves(layer) {
                        let top_k = layer.spec.gate.top_k as u32;
                        let launches = self.launches(layer, slot, top_k, variant, half, None);
                        let graph = self.stream.capture(|| {
                            // SAFETY: the graph accesses memory of this engine, which drops its graphs first, and staging, which
                            // outlives the engine.
                            unsafe {
                                launches.enqueue(&self.layers, &self.buffers, &self.shape, &self.stream)?;
                            }
                            Ok::<_, CudaFault>(())
                        })?;
                        graph.upload(&self.stream)?;
                        graphs.insert(class, slot, (variant, half), graph);
                    }
                }
            }
        }
        self.stream.synchronize()?;
        tracing::debug!(graphs = graphs.len(), took = ?start.elapsed(), "captured");
        Ok(graphs)
    }

    /// Whether experts come to this GPU for the last step of a slot, which is one of this layer.
    fn is_streamed(&self, layer: &Layer, slot: usize) -> bool {
        let copied = self.tier_of(layer).and_then(|tier| tier.copied.as_ref());
        copied.is_some_and(|copied| copied.step(slot).is_some())
    }

    /// The wire, if steps of the layer need CPU ranks.
    fn tier_of(&self, layer: &Layer) -> Option<&Tier> {
        self.tier.as_ref().filter(|_| !layer.is_whole)
    }

    /// The halves in which steps of the layer are launched.
    fn halves(&self, layer: &Layer) -> &'static [Half] {
        if self.tier_of(layer).is_some() { &[Half::First, Half::Second] } else { &[Half::Whole] }
    }

    /// The copy engines' buffers and streams, if steps of this variant use them.
    fn copies_of(&self, variant: Variant) -> Option<&Copies> {
        self.copies.as_ref().filter(|_| variant.path != RowPath::Mapped)
    }

    /// Whether copy engines carry the rows of steps with up to `rows` rows per rank, unless all lie in the memory of GPUs.
    fn may_be_copied(&self, rows: u32) -> bool {
        self.copies.is_some() && rows >= self.copied_from
    }
}

/// Where a test that sets [`POISON`] cuts results.
fn poison() -> Option<Cut> {
    expertd_shm::faults::setting(POISON).and_then(|text| Cut::parse(&text))
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // Kernels and copies may still use the memory that is freed next. The step that failed has reported its error.
        let _ = self.device.synchronize();
        if let Some(copied) = self.tier.as_ref().and_then(|tier| tier.copied.as_ref()) {
            copied.drain();
        }
        if let Err(error) = self.windows.health() {
            tracing::debug!(%error, "NCCL error at the end of the group");
        }
    }
}

// Kernels read the channel's segments in place, so both types need the same layout.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Segment>() == size_of::<DeviceSegment>());
    assert!(offset_of!(Segment, output_offset) == offset_of!(DeviceSegment, output_offset));
    assert!(offset_of!(Segment, memory) == offset_of!(DeviceSegment, memory));
    assert!(offset_of!(Segment, byte_offset) == offset_of!(DeviceSegment, byte_offset));
    assert!(offset_of!(Segment, first_row) == offset_of!(DeviceSegment, first_row));
    assert!(offset_of!(Segment, rows) == offset_of!(DeviceSegment, rows));
    assert!(offset_of!(Segment, dtype) == offset_of!(DeviceSegment, dtype));
    assert!(offset_of!(Segment, flags) == offset_of!(DeviceSegment, flags));
    assert!(expertd_ipc::MAX_RAISES == expertd_kernels::params::MAX_RAISES);
    assert!(Segment::GIVEN_ROUTING == 1 && Segment::SHARED_EXPERTS == 2);
};
