//! A rank on a GPU: every phase of a step is a kernel on one stream, and the host only describes and waits.
//!
//! Steps may follow each other before the first has ended: the one stream of kernels keeps their order, which is the same
//! on every rank, and each has a slot's buffers to itself. Few rows go straight from and to the channel's staging, which
//! is pinned; many are copied beside the kernels of other steps (`copies`). If the hidden size has to be padded for the
//! kernels, the host widens rows to f32 in pinned memory of its own, and narrows the results.
//!
//! The launches of a step are captured as graphs before the rank is ready: one per kind of layer, slot, regime (the most
//! rows that any rank has, rounded up to a power of two), and whether there is a gate and are shared experts. Whatever
//! else differs between steps stands in memory: the request in a mailbox, rows and segments in staging, weights in tables
//! by layer. Steps with another k than the layer's, which callers may ask for, are launched kernel by kernel.

#![allow(unsafe_code, reason = "kernels work on memory that Rust only sees as addresses")]

mod copies;
mod fault;
#[cfg(test)]
mod gate_tests;
mod graphs;
mod layers;
mod pad;
mod probe;
mod run;
mod setup;
mod step;

pub(crate) use probe::probe;
pub(crate) use setup::load;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use expertd_kernels::device::{Device, Pinned, Stream};
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{Group, Segment as DeviceSegment};
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};

use self::copies::Copies;
use self::fault::CudaFault;
use self::graphs::{Graphs, Variant};
use self::layers::{Layer, Layers};
use self::run::{Running, Watch};
use self::step::{Buffers, COPY_BLOCKS, Sequence, SlotSet, Staged};
use crate as gpu;
use crate::windows::LsaWindows;
use expertd_ipc::control::RankSetup;
use expertd_ipc::{Segment, StagingAddresses};

/// Bytes of bf16 rows per rank from which on copy engines carry them: below, their latency costs more than it hides.
const COPIED_FROM: usize = 1 << 20;
/// Set: the same in rows, for measurements.
const COPIED_FROM_ENV: &str = "EXPERTD_CUDA_COPIED_FROM_ROWS";

/// The channel's staging as the device sees it.
struct Host {
    /// Address of the first pinned byte in this process.
    first: usize,
    bytes: usize,
    staging: Pinned<'static>,
}

impl Host {
    /// The device's address of memory in the staging.
    fn device<T>(&self, host: *const T) -> u64 {
        let at = host as usize - self.first;
        debug_assert!(at <= self.bytes, "an address outside the staging");
        self.staging.address() + at as u64
    }
}

/// One GPU rank. Fields are dropped in their order: the stream is drained first (see `drop`), memory goes last.
pub(super) struct CudaEngine {
    stream: Stream,
    graphs: Graphs,
    /// Where rows need no padding.
    copies: Option<Copies>,
    /// Regimes of at least so many rows use them.
    copied_from: u32,
    /// See [`gpu::ALIGNED`].
    aligned: bool,
    /// Oldest first.
    running: VecDeque<Running>,
    watch: Watch,
    windows: LsaWindows,
    groups: Vec<Group>,
    buffers: Buffers,
    layers: Layers,
    host: Host,
    shape: Shape,
    /// Elements of a row as callers know it.
    hidden: usize,
    /// Blocks of an exchange, at most.
    most_blocks: u32,
    /// How long the host waits for a step of the device, which gives up waits by itself before that.
    patience: Duration,
    device: Device,
    /// By slot.
    staged: Vec<Staged>,
}

/// What a rank's set-up has made for its engine.
struct Parts {
    shape: Shape,
    windows: LsaWindows,
    host: Host,
    layers: Layers,
    buffers: Buffers,
    copies: Option<Copies>,
}

impl CudaEngine {
    fn new(
        setup: &RankSetup,
        device: Device,
        parts: Parts,
        staged: &[StagingAddresses],
    ) -> Result<Self, CudaFault> {
        let Parts { shape, windows, host, layers, buffers, copies } = parts;
        let deadline = u64::try_from(setup.peer_timeout.as_nanos()).unwrap_or(u64::MAX);
        let groups = buffers.slots.iter().enumerate().map(|(slot, set)| {
            set.kernels.group(&shape, setup.rank.0, &windows.slot(slot), setup.generation.0, deadline)
        });
        let groups = groups.collect();
        let most_blocks = device.multiprocessors()?.min(expertd_kernels::params::MAX_BLOCKS as u32);
        let stream = device.stream()?;
        device.synchronize()?;
        let mut engine = CudaEngine {
            stream,
            graphs: Graphs::default(),
            copies,
            copied_from: copied_from(&shape),
            aligned: std::env::var_os(gpu::ALIGNED).is_some(),
            running: VecDeque::new(),
            watch: Watch::start(),
            windows,
            groups,
            buffers,
            layers,
            host,
            shape,
            hidden: setup.shape.hidden,
            most_blocks,
            patience: 3 * setup.peer_timeout + Duration::from_secs(5),
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

    /// What the kernels of a slot read and write on the host: the same for every step.
    fn staged(&self, slot: &SlotSet, place: &StagingAddresses) -> Staged {
        let routing = Staged {
            ids: self.host.device(place.ids),
            weights: self.host.device(place.weights),
            token_ids: self.host.device(place.token_ids),
            max_segments: place.max_segments as u32,
            ..Staged::default()
        };
        if self.shape.hidden as usize == self.hidden {
            Staged {
                segments: self.host.device(place.segments),
                rows: self.host.device(place.rows),
                row_bytes: place.row_bytes as u64,
                ..routing
            }
        } else {
            Staged {
                segments: slot.segments.address(),
                max_segments: (place.max_segments as u32).min(self.shape.max_tokens),
                rows: slot.rows.address(),
                row_bytes: u64::from(self.shape.max_tokens) * u64::from(self.shape.hidden) * 4,
                ..routing
            }
        }
    }

    /// The launches of a step.
    fn sequence<'a>(&'a self, layer: &'a Layer, slot: usize, top_k: u32, variant: Variant) -> Sequence<'a> {
        Sequence {
            layer,
            slot: &self.buffers.slots[slot],
            group: Group { top_k, experts: layer.spec.experts.count as u32, ..self.groups[slot] },
            staged: match self.copies_of(variant) {
                Some(copies) => copies.staged(slot, self.staged[slot]),
                None => self.staged[slot],
            },
            copy_blocks: if self.copies_of(variant).is_some() { self.most_blocks } else { COPY_BLOCKS },
            aligned: self.aligned && self.shape.ranks > 1,
            gate_rows: if variant.gated { variant.rows } else { 0 },
            shared: variant.shared,
            dispatch_blocks: dispatch_blocks(&self.shape, variant.rows, self.most_blocks),
            combine_blocks: combine_blocks(&self.shape, variant.rows, self.most_blocks),
        }
    }

    fn capture_all(&self) -> Result<Graphs, CudaFault> {
        let mut graphs = Graphs::default();
        let start = Instant::now();
        for (class, layer) in self.layers.classes() {
            for slot in 0..self.buffers.slots.len() {
                for variant in Variant::all(self.shape.max_tokens, layer.shared.is_some()) {
                    let sequence = self.sequence(layer, slot, layer.spec.gate.top_k as u32, variant);
                    let graph = self.stream.capture(|| {
                        // SAFETY: everything that the graph touches belongs to this engine, which drops its graphs
                        // first, or is staging, which outlives it.
                        unsafe {
                            sequence.enqueue(&self.layers, &self.buffers, &self.shape, self.stream.raw())?;
                        }
                        Ok::<_, CudaFault>(())
                    })?;
                    graph.upload(&self.stream)?;
                    graphs.insert(class, slot, variant, graph);
                }
            }
        }
        self.stream.synchronize()?;
        tracing::debug!(graphs = graphs.len(), took = ?start.elapsed(), "captured");
        Ok(graphs)
    }

    /// The copies that steps of this kind use, if they do.
    fn copies_of(&self, variant: Variant) -> Option<&Copies> {
        self.copies.as_ref().filter(|_| variant.rows >= self.copied_from)
    }
}

/// See [`COPIED_FROM`].
fn copied_from(shape: &Shape) -> u32 {
    let given = std::env::var(COPIED_FROM_ENV).ok().and_then(|rows| rows.parse().ok());
    given.unwrap_or_else(|| COPIED_FROM.div_ceil(shape.hidden as usize * 2) as u32)
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // Kernels and copies may still use what is freed next. An error has been reported by the step that met it.
        let _ = self.device.synchronize();
        if let Err(error) = self.windows.health() {
            tracing::debug!(%error, "the group at its end");
        }
    }
}

// The channel's segments are read by the device where they stand.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Segment>() == size_of::<DeviceSegment>());
    assert!(offset_of!(Segment, byte_offset) == offset_of!(DeviceSegment, byte_offset));
    assert!(offset_of!(Segment, first_row) == offset_of!(DeviceSegment, first_row));
    assert!(offset_of!(Segment, rows) == offset_of!(DeviceSegment, rows));
    assert!(offset_of!(Segment, dtype) == offset_of!(DeviceSegment, dtype));
    assert!(offset_of!(Segment, flags) == offset_of!(DeviceSegment, flags));
    assert!(Segment::GIVEN_ROUTING == 1 && Segment::SHARED_EXPERTS == 2);
};
