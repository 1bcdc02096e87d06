//! A rank on a GPU: every phase of a step is a kernel on one stream, and the host only describes and waits.
//!
//! Rows go straight from and to the channel's staging, which is pinned, unless the hidden size has to be padded for the
//! kernels; then the host widens rows to f32 in pinned memory of its own, and narrows the results.
//!
//! The launches of a step are captured as graphs before the rank is ready: one per kind of layer, slot, regime (the most
//! rows that any rank has, rounded up to a power of two), and whether there is a gate and are shared experts. Whatever
//! else differs between steps stands in memory: the request in a mailbox, rows and segments in staging, weights in tables
//! by layer. Steps with another k than the layer's, which callers may ask for, are launched kernel by kernel.

#![allow(unsafe_code, reason = "kernels work on memory that Rust only sees as addresses")]

mod graphs;
mod layers;
mod probe;
mod setup;
mod step;

pub(super) use probe::probe;
pub(super) use setup::load;

use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUresult, cuStreamQuery};
use expertd_kernels::device::{Device, Pinned, Stream};
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{Completion, DeviceFault, Group, Segment as DeviceSegment, StepRequest};
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};

use self::graphs::{Graphs, Variant};
use self::layers::{Layer, Layers};
use self::step::{Buffers, Sequence, SlotSet, Staged};
use super::control::RankSetup;
use super::convert::{narrow, widen};
use super::segments::Run;
use super::{StepEngine, StepFault, StepReport};
use crate::ep::lsa::LsaWindows;
use crate::shm::{ExpertsNotice, RankStaging, Segment, StagingPlace, StepDescriptor};
use crate::telemetry::Phase;
use crate::types::DType;

/// How often a wait for the device looks for an error of the driver.
const QUERY_INTERVAL: Duration = Duration::from_millis(2);

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

/// Set: steps are launched kernel by kernel, for debugging.
const EAGER_ENV: &str = "EXPERTD_CUDA_EAGER";

impl CudaEngine {
    fn new(
        setup: &RankSetup,
        device: Device,
        shape: Shape,
        windows: LsaWindows,
        host: Host,
        layers: Layers,
        buffers: Buffers,
        staged: &[StagingPlace],
    ) -> Result<Self, StepFault> {
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
        if std::env::var_os(EAGER_ENV).is_none() {
            engine.graphs = engine.capture_all()?;
        }
        Ok(engine)
    }

    /// What the kernels of a slot read and write on the host: the same for every step.
    fn staged(&self, slot: &SlotSet, place: &StagingPlace) -> Staged {
        let routing = Staged {
            ids: self.host.device(place.ids),
            weights: self.host.device(place.weights),
            token_ids: self.host.device(place.token_ids),
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
            staged: self.staged[slot],
            gate_rows: if variant.gated { variant.rows } else { 0 },
            shared: variant.shared,
            dispatch_blocks: dispatch_blocks(&self.shape, variant.rows, self.most_blocks),
            combine_blocks: combine_blocks(&self.shape, variant.rows, self.most_blocks),
        }
    }

    fn capture_all(&self) -> Result<Graphs, StepFault> {
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
                        Ok::<_, StepFault>(())
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

    /// Waits for the completion record of `step`.
    fn wait(&self, slot: &SlotSet, step: u64) -> Result<Completion, StepFault> {
        let start = Instant::now();
        let mut next_query = QUERY_INTERVAL;
        let mut spins = 0u32;
        while slot.completion.first_word() != step {
            std::hint::spin_loop();
            spins = spins.wrapping_add(1);
            if !spins.is_multiple_of(256) {
                continue;
            }
            let waited = start.elapsed();
            if waited > next_query {
                next_query = waited + QUERY_INTERVAL;
                // SAFETY: a live stream.
                let status = unsafe { cuStreamQuery(self.stream.raw()) };
                match status {
                    CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY => {}
                    error => return Err(StepFault::Device(format!("the GPU failed: {error:?}"))),
                }
                if waited > self.patience {
                    return Err(StepFault::Device(format!(
                        "the GPU has not finished the step after {waited:?}"
                    )));
                }
                std::thread::yield_now();
            }
        }
        Ok(slot.completion.get())
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // Kernels may still read what is freed next. An error has been reported by the step that met it.
        let _ = self.device.bind().and_then(|()| self.stream.synchronize());
        if let Err(error) = self.windows.health() {
            tracing::debug!(%error, "the group at its end");
        }
    }
}

/// Rows of a step as kernels want them: f32, padded with zeros.
fn pad(runs: &[Run], staged: &[u8], hidden: usize, wide: usize, slot: &mut SlotSet) {
    let end = runs.last().map_or(0, |run| run.rows.end);
    let rows = slot.rows.as_mut_slice::<f32>(end * wide);
    for run in runs {
        let row_bytes = hidden * run.dtype.size();
        for (at, row) in run.rows.clone().zip(staged[run.bytes.clone()].chunks_exact(row_bytes)) {
            let (values, padding) = rows[at * wide..(at + 1) * wide].split_at_mut(hidden);
            widen(row, run.dtype, values);
            padding.fill(0.0);
        }
    }
    // Of the same layout as the kernels' segment.
    let segments = slot.segments.as_mut_slice::<Segment>(runs.len());
    for (segment, run) in segments.iter_mut().zip(runs) {
        *segment = Segment {
            byte_offset: (run.rows.start * wide * 4) as u64,
            first_row: run.rows.start as u32,
            rows: run.rows.len() as u32,
            dtype: DType::F32 as u32,
            flags: if run.gated { 0 } else { Segment::GIVEN_ROUTING }
                | if run.shared { Segment::SHARED_EXPERTS } else { 0 },
        };
    }
}

/// The inverse of [`pad`], for results.
fn unpad(runs: &[Run], staged: &mut [u8], hidden: usize, wide: usize, slot: &mut SlotSet) {
    let end = runs.last().map_or(0, |run| run.rows.end);
    let rows = slot.rows.as_mut_slice::<f32>(end * wide);
    for run in runs {
        let row_bytes = hidden * run.dtype.size();
        let into = staged[run.bytes.clone()].chunks_exact_mut(row_bytes);
        for (at, row) in run.rows.clone().zip(into) {
            narrow(&rows[at * wide..][..hidden], run.dtype, row);
        }
    }
}

/// The type of result rows in device memory: the one type of all rows, or f32, from which all others are rounded.
fn out_dtype(runs: &[Run]) -> DType {
    match runs.split_first() {
        None => DType::Bf16,
        Some((first, rest)) if rest.iter().all(|run| run.dtype == first.dtype) => first.dtype,
        Some(_) => DType::F32,
    }
}

impl StepEngine for CudaEngine {
    fn run(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<StepReport, StepFault> {
        let slot_index = step.slot as usize;
        let runs = Run::all(staging.segments, step.tokens as usize, self.hidden, staging.rows.len())?;
        let layer = self
            .layers
            .layers
            .get(step.layer as usize)
            .and_then(Option::as_ref)
            .ok_or(StepFault::Layer(step.layer))?;
        let wide = self.shape.hidden as usize;
        let padding = wide != self.hidden;
        if padding {
            pad(&runs, staging.rows, self.hidden, wide, &mut self.buffers.slots[slot_index]);
        }
        let slot = &self.buffers.slots[slot_index];
        let gated = runs.iter().any(|run| run.gated);
        slot.request.put(StepRequest {
            step: step.sequence,
            tokens: step.tokens,
            layer: step.layer,
            given_routing: u32::from(!runs.is_empty() && !gated),
            out_dtype: if padding { DType::F32 } else { out_dtype(&runs) } as u32,
            segments: step.segments,
            reserved: 0,
        });
        let variant = Variant {
            // The same on every rank, whatever its own number of rows: grids of an exchange must agree.
            rows: step.step_tokens.div_ceil(self.shape.ranks).next_power_of_two().min(self.shape.max_tokens),
            gated,
            shared: layer.shared.is_some() && runs.iter().any(|run| run.shared),
        };
        match self.graphs.get(layer.class, slot_index, variant) {
            Some(graph) if step.top_k as usize == layer.spec.gate.top_k => graph.launch(&self.stream)?,
            _ => {
                let sequence = self.sequence(layer, slot_index, step.top_k, variant);
                // SAFETY: all of it lives in `self` or in the step's staging, and the step is over before this returns,
                // but for faults, after which the engine is dropped, which drains the stream first.
                unsafe {
                    sequence.enqueue(&self.layers, &self.buffers, &self.shape, self.stream.raw())?;
                }
            }
        }
        let completion = self.wait(slot, step.sequence)?;
        notice.tell(step.sequence);
        if let Some(fault) = DeviceFault::decode(completion.error) {
            return Err(fault.into());
        }
        if padding {
            unpad(&runs, staging.rows, self.hidden, wide, &mut self.buffers.slots[slot_index]);
        }
        Ok(StepReport {
            phases: phases(&completion, gated),
            received_rows: completion.received as usize,
            expert_rows: completion.assignments as usize,
        })
    }
}

/// Durations by the device's clock. Shared experts run in the experts phase.
fn phases(record: &Completion, gated: bool) -> [Duration; Phase::ALL.len()] {
    let begin = |phase: Phase| record.begin_ns[phase as usize];
    let end = |phase: Phase| record.end_ns[phase as usize];
    let between = |from: u64, to: u64| Duration::from_nanos(to.saturating_sub(from));
    Phase::ALL.map(|phase| match phase {
        Phase::Gate if !gated => Duration::ZERO,
        Phase::Prepare => between(end(Phase::Dispatch), end(Phase::Prepare)),
        Phase::Experts => between(end(Phase::Prepare), begin(Phase::Combine)),
        _ => between(begin(phase), end(phase)),
    })
}

const _: () = {
    use expertd_kernels::params::Phase as Device;
    assert!(Phase::CopyIn as u32 == Device::CopyIn as u32 && Phase::Gate as u32 == Device::Gate as u32);
    assert!(
        Phase::Prepare as u32 == Device::Prepare as u32 && Phase::Dispatch as u32 == Device::Dispatch as u32
    );
    assert!(
        Phase::Experts as u32 == Device::Experts as u32 && Phase::Combine as u32 == Device::Combine as u32
    );
    assert!(Phase::CopyOut as u32 == Device::CopyOut as u32);
};

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
