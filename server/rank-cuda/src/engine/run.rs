//! The life of a step on a GPU rank: launch, wait, report.

#![allow(unsafe_code, reason = "kernels work on memory that Rust only sees as addresses")]

use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUresult, cuStreamQuery};
use expertd_kernels::params::{Completion, DeviceFault, OTHER_PROCESSES, StepRequest};
use expertd_kernels::slot::combine_blocks;

use super::CudaEngine;
use super::copies::{UnchangedRows, unchanged};
use super::fault::CudaFault;
use super::graphs::{Half, RowPath, Variant};
use super::layers::Layer;
use super::memories::ClientCopy;
use super::pad::{pad, unpad};
use super::parts::Parts;
use super::tier::{Outward, Rest};
use expertd_ipc::{ExpertsNotice, RankChannel, RankStaging, StepDescriptor};
use expertd_rank::segments::CheckedSegment;
use expertd_rank::{ClientMemory, StepEngine, StepFault, StepReport};
use expertd_shm::ObservedTime;
use expertd_types::{DType, MemoryId, Phase, Sequence};

/// Interval at which a wait for the device asks the driver for errors.
const QUERY_INTERVAL: Duration = Duration::from_millis(2);

/// A launched step.
pub(super) struct Running {
    sequence: u64,
    slot: usize,
    segments: Vec<CheckedSegment>,
    gated: bool,
    /// Whether copy engines carry its rows.
    copied: bool,
    /// Number of parts in which its results are copied; 0: it was not cut.
    parts: usize,
    /// Whether the router was notified of the end of its experts phase.
    notified: bool,
    /// What is launched when the sums of CPU ranks have come.
    pub(super) rest: Option<Rest>,
    /// Bytes of weights that are copied to the device for it.
    copied_bytes: u64,
    /// Version of the table of expert slots.
    slot_version: u64,
    /// The number of a layer that has experts on CPU ranks.
    needed_cpus: Option<usize>,
}

/// The wait for the oldest running step.
pub(super) struct Watch {
    time: ObservedTime,
    next_query: Duration,
    looks: u32,
}

impl Watch {
    pub(super) fn start() -> Self {
        Watch { time: ObservedTime::start(Instant::now()), next_query: QUERY_INTERVAL, looks: 0 }
    }

    /// Time since the step became the oldest one, without pauses of this process.
    pub(super) fn waited(&mut self) -> Duration {
        self.time.look(Instant::now())
    }
}

impl CudaEngine {
    /// Launches a step whose rows travel unchanged, or its first half. Returns the number of parts in which its results are copied; 0 if
    /// it was not cut.
    fn launch_unchanged(
        &self,
        step: &StepDescriptor,
        layer: &Layer,
        variant: Variant,
        half: Half,
        copies: &[ClientCopy],
    ) -> Result<usize, CudaFault> {
        let Some(engines) = self.copies_of(variant) else {
            return Err(CudaFault::Stuck("a step without copy engines has rows for them".to_owned()));
        };
        let slot = step.slot as usize;
        let buffers = &self.buffers.slots[slot].kernels;
        let row_bytes = self.hidden * 2;
        let rows = UnchangedRows { copies, row_bytes, tokens: &buffers.tokens, out: &buffers.out };
        let is_alone = self.running.is_empty();
        engines.inward_unchanged(slot, &rows, is_alone, &self.stream)?;
        let arrived = engines.arrived(slot);
        if !is_alone || step.tokens < self.cut.from || self.aligned || half != Half::Whole {
            arrived.wait_event(&self.stream)?;
            self.launch_kernels(step, layer, variant, half, None)?;
            if half == Half::Whole {
                engines.outward_unchanged(slot, &rows, None, &self.stream)?;
            }
            return Ok(0);
        }
        let combine_blocks = combine_blocks(&self.shape, variant.rows, self.most_blocks);
        let ends = self.cut.ends(step.tokens, &self.shape, combine_blocks);
        let parts = Parts { arrived, ends: &ends, combined: engines.combined(slot) };
        self.launch_kernels(step, layer, variant, half, Some(parts))?;
        engines.outward_unchanged(slot, &rows, Some(parts), &self.stream)?;
        Ok(ends.len())
    }

    /// Launches the kernels of a step or of half of it.
    pub(super) fn launch_kernels(
        &self,
        step: &StepDescriptor,
        layer: &Layer,
        variant: Variant,
        half: Half,
        parts: Option<Parts<'_>>,
    ) -> Result<(), CudaFault> {
        let slot = step.slot as usize;
        match self.graphs.get(layer.class, slot, (variant, half)) {
            Some(graph)
                if parts.is_none()
                    && step.top_k as usize == layer.spec.gate.top_k
                    && !self.is_streamed(layer, slot) =>
            {
                Ok(graph.launch(&self.stream)?)
            }
            _ => {
                let launches = self.launches(layer, slot, step.top_k, variant, half, parts);
                // SAFETY: all addresses are of memory in `self` or in the slot's staging. Completion is reported after the step has
                // ended; after a fault the engine is dropped, which drains the streams first.
                unsafe { launches.enqueue(&self.layers, &self.buffers, &self.shape, &self.stream) }
            }
        }
    }

    /// Launches a step whose rows kernels convert, or its first half. Copy engines carry `bytes` bytes of staged rows.
    fn launch(
        &self,
        step: &StepDescriptor,
        layer: &Layer,
        (variant, half): (Variant, Half),
        (segments, bytes): (usize, usize),
        clients: &[ClientCopy],
    ) -> Result<(), CudaFault> {
        let slot = step.slot as usize;
        let copies = self.copies_of(variant);
        if let Some(copies) = copies {
            copies.inward(slot, segments, bytes, clients, &self.stream)?;
        }
        self.launch_kernels(step, layer, variant, half, None)?;
        if let Some(copies) = copies.filter(|_| half == Half::Whole) {
            copies.outward(slot, bytes, clients, &self.stream)?;
        }
        Ok(())
    }

    /// Whether the oldest running step has ended. Every [`QUERY_INTERVAL`] it also asks the driver for errors.
    fn has_ended(&mut self, sequence: u64, slot: usize, copied: bool) -> Result<bool, CudaFault> {
        if self.buffers.slots[slot].completion.first_word() == sequence {
            return match &self.copies {
                Some(copies) if copied => Ok(copies.is_back(slot)?),
                _ => Ok(true),
            };
        }
        std::hint::spin_loop();
        let watch = &mut self.watch;
        watch.looks = watch.looks.wrapping_add(1);
        if !watch.looks.is_multiple_of(256) {
            return Ok(false);
        }
        let waited = watch.waited();
        if waited > watch.next_query {
            watch.next_query = waited + QUERY_INTERVAL;
            // SAFETY: a live stream.
            let status = unsafe { cuStreamQuery(self.stream.raw()) };
            match status {
                CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY => {}
                error => return Err(CudaFault::Stuck(format!("the GPU failed: {error:?}"))),
            }
            if waited > self.step_deadline {
                return Err(CudaFault::Stuck(format!(
                    "the GPU has not finished the step after {waited:?}; {OTHER_PROCESSES}"
                )));
            }
            std::thread::yield_now();
        }
        Ok(false)
    }
}

/// Element type of result rows, if all rows share one. Otherwise results are f32 in device memory and then rounded to each row's
/// type.
fn out_dtype(segments: &[CheckedSegment]) -> Option<DType> {
    match segments.split_first() {
        None => Some(DType::Bf16),
        Some((first, rest)) => rest.iter().all(|segment| segment.dtype == first.dtype).then_some(first.dtype),
    }
}

impl StepEngine for CudaEngine {
    fn begin(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        _notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        let slot = step.slot as usize;
        if self.running.iter().any(|running| running.slot == slot) {
            return Err(StepFault::SlotInUse(step.slot));
        }
        let (tokens, staged_bytes) = (step.tokens as usize, staging.rows.len());
        let size = |memory| self.memories.size(memory);
        let segments = CheckedSegment::all(staging.segments, tokens, self.hidden, staged_bytes, size)?;
        let layer = self
            .layers
            .layers
            .get(step.layer as usize)
            .and_then(Option::as_ref)
            .ok_or(StepFault::Layer(step.layer))?;
        let wide = self.shape.hidden as usize;
        let padding = wide != self.hidden;
        if padding {
            // SAFETY: no running step occupies the slot (checked above).
            unsafe {
                let slot = &mut self.buffers.slots[slot];
                pad(&segments, staging.rows, &self.memories, self.hidden, wide, slot);
            }
        }
        let gated = segments.iter().any(|segment| segment.gated);
        let on_gpus = !padding && self.memories.are_on_gpus(&segments);
        self.buffers.slots[slot].request.put(StepRequest {
            step: step.sequence,
            tokens: step.tokens,
            layer: step.layer,
            given_routing: u32::from(!segments.is_empty() && !gated),
            out_dtype: if padding { DType::F32 } else { out_dtype(&segments).unwrap_or(DType::F32) } as u32,
            segments: step.segments,
            raises: step.raises,
            direct: u32::from(on_gpus && out_dtype(&segments).is_some()),
            reserved: [0; 3],
            raise: self.memories.words(staging.raises).map_err(StepFault::engine)?,
        });
        // Derived from the whole step, so that all ranks launch the grids of an exchange with equal sizes.
        let rows = step.step_tokens.div_ceil(self.shape.ranks).next_power_of_two().min(self.shape.max_tokens);
        let copies = match &self.copies {
            Some(copies) if self.may_be_copied(rows) && !on_gpus => Some(copies),
            _ => None,
        };
        let carried = copies.and_then(|copies| {
            unchanged(&segments, &self.memories, copies.staged_rows(slot), self.hidden * 2)
        });
        let path = match (copies, &carried) {
            (None, _) => RowPath::Mapped,
            (Some(_), None) => RowPath::Converted,
            (Some(_), Some(_)) => RowPath::Unchanged,
        };
        let variant = Variant {
            rows,
            gated,
            shared: layer.shared.is_some() && segments.iter().any(|segment| segment.shared),
            path,
        };
        // Grids cover `variant.rows`; further rows would silently be skipped.
        if step.tokens > variant.rows {
            return Err(StepFault::engine(format!(
                "the router sent {} rows of a step that has at most {} on each rank ({} in all)",
                step.tokens, variant.rows, step.step_tokens
            )));
        }
        let copied = copies.is_some();
        let converted = copies.filter(|_| path == RowPath::Converted).map(|copies| copies.row_bytes(slot));
        let clients = match padding {
            true => Vec::new(),
            false => self.memories.place(&segments, staging.segments, converted),
        };
        let mut half = self.halves(layer)[0];
        let (mut copied_bytes, mut slot_version) = (0, 0);
        let tables = self.layers.slot_tables();
        if let Some(tier) = self.tier.as_mut().filter(|_| half == Half::First) {
            let begun = tier.copied.as_mut().map(|copied| copied.begin(step, layer, tables, &self.stream));
            let (is_whole, bytes, version) = begun.transpose()?.unwrap_or((false, 0, 0));
            (copied_bytes, slot_version) = (bytes, version);
            if is_whole {
                half = Half::Whole;
                tier.spare(step);
            } else {
                tier.begin(slot);
            }
        }
        let of_layer = layer.index;
        let needs_cpus = self.tier_of(layer).is_some();
        let (parts, outward) = match carried {
            Some(copies) => {
                (self.launch_unchanged(step, layer, variant, half, &copies)?, Outward::Unchanged(copies))
            }
            None => {
                let bytes = segments.iter().map(CheckedSegment::staged_end).max().unwrap_or(0);
                self.launch(step, layer, (variant, half), (segments.len(), bytes), &clients)?;
                (0, if copied { Outward::Converted(bytes, clients) } else { Outward::None })
            }
        };
        let rest = (half == Half::First).then(|| Rest::new(step, variant, outward));
        self.inject_fault(slot)?;
        if self.running.is_empty() {
            self.watch = Watch::start();
        }
        self.running.push_back(Running {
            sequence: step.sequence,
            slot,
            segments,
            gated,
            copied,
            parts,
            notified: false,
            rest,
            copied_bytes,
            slot_version,
            needed_cpus: needs_cpus.then_some(of_layer),
        });
        Ok(None)
    }

    fn ended(
        &mut self,
        step: &StepDescriptor,
        channel: &mut RankChannel,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        self.launch_rests()?;
        for running in self.running.iter_mut().filter(|running| !running.notified) {
            if self.buffers.slots[running.slot].experts_done.first_word() != running.sequence {
                // Notify in order: if this thread was descheduled, a later step's word may be visible first.
                break;
            }
            running.notified = true;
            notice.experts_ended(running.sequence);
        }
        let Some(&Running { sequence, slot, copied, .. }) = self.running.front() else { return Ok(None) };
        if !self.has_ended(sequence, slot, copied)? {
            return Ok(None);
        }
        let Some(Running {
            segments,
            gated,
            notified,
            parts,
            mut copied_bytes,
            slot_version,
            needed_cpus,
            ..
        }) = self.running.pop_front()
        else {
            return Ok(None);
        };
        self.watch = Watch::start();
        let completion = self.buffers.slots[slot].completion.get();
        if let Some(fault) = DeviceFault::decode(completion.error) {
            return Err(CudaFault::from(fault).into());
        }
        if !notified {
            notice.experts_ended(sequence);
        }
        let of_cpus = self.tier.as_mut().and_then(|tier| tier.copied.as_mut());
        if let Some((of_cpus, layer)) = of_cpus.zip(needed_cpus) {
            copied_bytes += of_cpus.ended(layer, Sequence(sequence), slot)?;
        }
        let wide = self.shape.hidden as usize;
        if wide != self.hidden {
            let staged = channel.staging(step).rows;
            // SAFETY: the step has ended (`has_ended`), and the next one in the slot begins through `&mut self`.
            unsafe {
                let slot = &mut self.buffers.slots[slot];
                unpad(&segments, staged, &self.memories, self.hidden, wide, slot);
            }
        }
        let mut phases = phases(&completion, gated);
        if let Some(copies) = self.copies.as_ref().filter(|_| copied) {
            let (inward, outward) = copies.times(slot, parts).map_err(CudaFault::from)?;
            // In a step that is cut, the copies overlap the kernels of these phases.
            let both =
                |kernel: Duration, copy: Duration| if parts == 0 { kernel + copy } else { kernel.max(copy) };
            let (copy_in, copy_out) = (Phase::CopyIn as usize, Phase::CopyOut as usize);
            phases[copy_in] = both(phases[copy_in], inward);
            phases[copy_out] = both(phases[copy_out], outward);
        }
        Ok(Some(StepReport {
            phases,
            received_rows: completion.received as usize,
            expert_rows: completion.assignments as usize,
            copied_bytes,
            slot_version,
        }))
    }

    fn attach(&mut self, memory: MemoryId, client: ClientMemory) -> Result<(), String> {
        self.memories.attach(&self.device, memory, client)
    }

    fn detach(&mut self, memory: MemoryId) {
        self.memories.detach(memory);
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
        // Dispatch and prepare overlap; the experts phase begins when both have ended.
        Phase::Experts => between(end(Phase::Dispatch).max(end(Phase::Prepare)), begin(Phase::Combine)),
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
