//! The launches of a step, in order.

#![allow(unsafe_code, reason = "launches kernels")]

mod experts;

use expertd_kernels::device::Stream;
use expertd_kernels::launch;
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{
    CombineParams, CopyInParams, CopyOutParams, DispatchParams, GateParams, Group, TierParams,
};

use super::{Buffers, SlotSet, StagedAddresses};
use crate::engine::counts::DeviceCounts;
use crate::engine::fault::CudaFault;
use crate::engine::graphs::Half;
use crate::engine::host_experts::{CopiedExperts, Slots, StreamedStep};
use crate::engine::layers::{Layer, Layers, gate_params};
use crate::engine::parts::Parts;

/// Where a slot's rows and choices go to CPU ranks, and where their sums come from; all but the first two in mapped memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct TierPlaces {
    /// i32 `[T, k]`, and f32 `[T, k]`: the choices that kernels of this rank see.
    pub(in crate::engine) local_ids: u64,
    pub(in crate::engine) local_weights: u64,
    pub(in crate::engine) sent_ids: u64,
    pub(in crate::engine) sent_weights: u64,
    pub(in crate::engine) sent_rows: u64,
    pub(in crate::engine) sent: u64,
    pub(in crate::engine) failed: u64,
    /// Generation in the place that it has in words.
    pub(in crate::engine) generation: u64,
    pub(in crate::engine) sums: u64,
    pub(in crate::engine) sums_stride: u64,
    pub(in crate::engine) sums_count: u32,
}

/// The launches of one step, or of half of it.
pub(in crate::engine) struct StepLaunches<'a> {
    pub(in crate::engine) half: Half,
    /// `None`: the step needs no CPU ranks.
    pub(in crate::engine) tier: Option<TierPlaces>,
    /// Slots with copies of experts of CPU ranks.
    pub(in crate::engine) slots: Option<&'a Slots>,
    /// How experts of CPU ranks come here, if some do. Such a step is not captured.
    pub(in crate::engine) streamed: Option<(&'a CopiedExperts, &'a StreamedStep)>,
    pub(in crate::engine) layer: &'a Layer,
    pub(in crate::engine) slot: &'a SlotSet,
    pub(in crate::engine) counts: &'a DeviceCounts,
    /// The group, with the layer's physical experts and the step's k.
    pub(in crate::engine) group: Group,
    pub(in crate::engine) staged: StagedAddresses,
    /// The largest number of rows per rank that the launches cover.
    pub(in crate::engine) rows: u32,
    /// Multiprocessors of the GPU.
    pub(in crate::engine) multiprocessors: u32,
    /// Whether ranks wait for each other between copy_in and the gate.
    pub(in crate::engine) aligned: bool,
    /// Rows that the gate's grid covers; 0 if the gate routes no row of this rank.
    pub(in crate::engine) gate_rows: u32,
    /// Whether shared experts run.
    pub(in crate::engine) shared: bool,
    /// Grid of dispatch, equal on every rank.
    pub(in crate::engine) dispatch_blocks: u32,
    /// Grid of combine, equal on every rank.
    pub(in crate::engine) combine_blocks: u32,
    /// Grid of copy_in and copy_out.
    pub(in crate::engine) copy_blocks: u32,
    /// Elements of a row without padding.
    pub(in crate::engine) row_elements: u32,
    /// Whether copy engines carry rows to where the gate and dispatch read them, and results from where combine writes them.
    pub(in crate::engine) unchanged: bool,
    /// Parts of a step, whose launches are not captured; `None`: the step is not cut, and its rows are on the device.
    pub(in crate::engine) parts: Option<Parts<'a>>,
}

impl StepLaunches<'_> {
    /// Enqueues the whole step: copy_in, the meeting of ranks, the wait for rows that copy engines carry, gate, tier, dispatch, routed
    /// experts, shared experts, combine in one launch or in parts, copy_out. Those that the step does not need are left out. Combine begins
    /// the second half.
    ///
    /// # Safety
    /// All addresses are live until the stream has run what is enqueued, and the device's context is current.
    pub(in crate::engine) unsafe fn enqueue(
        &self,
        layers: &Layers,
        buffers: &Buffers,
        shape: &Shape,
        on: &Stream,
    ) -> Result<(), CudaFault> {
        let step = Phases { step: self, layers, buffers, shape, on };
        if self.half != Half::Second {
            // SAFETY: the caller keeps all addresses live, for this and every launch below.
            unsafe { self.enqueue_first(&step)? };
        }
        if self.half == Half::First {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe {
            step.combine()?;
            step.copy_out()
        }
    }

    /// Whether all experts of CPU ranks come here.
    fn is_alone(&self) -> bool {
        self.streamed.is_some_and(|(_, of_step)| of_step.is_whole)
    }

    /// The launches up to the experts.
    ///
    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn enqueue_first(&self, step: &Phases<'_>) -> Result<(), CudaFault> {
        let Phases { on, .. } = step;
        // SAFETY: the caller keeps all addresses live, for this and every launch below.
        unsafe { step.copy_in()? };
        if self.aligned {
            // SAFETY: as above.
            unsafe { launch::meet(&[self.group], 1, on.raw())? };
        }
        if let Some(parts) = self.parts {
            parts.arrived.wait_event(on)?;
        }
        if self.gate_rows > 0 {
            // SAFETY: as above.
            unsafe { step.gate()? };
        }
        if let Some(tier) = &self.tier {
            // SAFETY: as above.
            unsafe { step.tier(tier)? };
        }
        // SAFETY: as above.
        unsafe { step.dispatch()? };
        // A rank alone has all experts: its combine must not follow dispatch directly.
        if step.held_experts() > 0 {
            // SAFETY: as above.
            unsafe { step.routed_experts()? };
        }
        if self.tier.is_some() {
            // SAFETY: as above.
            unsafe { step.copied_experts()? };
        }
        // SAFETY: as above.
        unsafe { step.shared_experts()? };
        match self.streamed.filter(|(_, of_step)| !of_step.is_whole) {
            Some((copied, of_step)) => copied.computed(of_step, on),
            None => Ok(()),
        }
    }
}

/// A step that is being enqueued. Each method enqueues the launches of a phase; all addresses must be live until the stream has run them.
struct Phases<'a> {
    step: &'a StepLaunches<'a>,
    layers: &'a Layers,
    buffers: &'a Buffers,
    shape: &'a Shape,
    on: &'a Stream,
}

impl Phases<'_> {
    unsafe fn copy_in(&self) -> Result<(), CudaFault> {
        let Phases { step, shape, .. } = self;
        let (slot, k) = (step.slot, &step.slot.kernels);
        let copy_in = CopyInParams {
            state: k.state.address(),
            request: slot.request.address(),
            segments: step.staged.segments,
            staged_rows: step.staged.rows,
            staged_ids: step.staged.ids,
            staged_weights: step.staged.weights,
            staged_token_ids: if step.layer.spec.gate.needs_token_ids() { step.staged.token_ids } else { 0 },
            tokens: if step.unchanged { 0 } else { k.tokens.address() },
            tokens_low: slot.tokens_low.address(),
            topk_ids: k.topk_ids.address(),
            topk_weights: k.topk_weights.address(),
            token_ids: slot.token_ids.address(),
            places: slot.places.address(),
            staged_bytes: step.staged.row_bytes,
            hidden: shape.hidden,
            top_k: step.group.top_k,
            max_tokens: shape.max_tokens,
            experts: step.layer.spec.experts.count as u32,
            max_segments: step.staged.max_segments,
            row_elements: step.row_elements,
        };
        // SAFETY: the caller keeps all addresses live.
        unsafe { launch::copy_in(&[copy_in], step.copy_blocks, self.on.raw())? };
        Ok(())
    }

    unsafe fn gate(&self) -> Result<(), CudaFault> {
        let Phases { step, layers, shape, .. } = self;
        let (slot, k) = (step.slot, &step.slot.kernels);
        let gate = GateParams {
            state: k.state.address(),
            layers: layers.gates.address(),
            tokens: k.tokens.address(),
            tokens_low: slot.tokens_low.address(),
            token_ids: slot.token_ids.address(),
            places: slot.places.address(),
            topk_ids: k.topk_ids.address(),
            topk_weights: k.topk_weights.address(),
            hidden: shape.hidden,
            max_tokens: shape.max_tokens,
            ..gate_params(&step.layer.spec.gate)
        };
        // SAFETY: the caller keeps all addresses live.
        unsafe { launch::gate(&[gate], step.gate_rows, self.on.raw())? };
        Ok(())
    }

    unsafe fn tier(&self, tier: &TierPlaces) -> Result<(), CudaFault> {
        let Phases { step, layers, shape, .. } = self;
        let k = &step.slot.kernels;
        let params = TierParams {
            state: k.state.address(),
            tokens: k.tokens.address(),
            topk_ids: k.topk_ids.address(),
            topk_weights: k.topk_weights.address(),
            resident: step.streamed.map_or_else(|| layers.resident(), |(_, step)| step.resident),
            local_ids: tier.local_ids,
            local_weights: tier.local_weights,
            sent_ids: tier.sent_ids,
            sent_weights: tier.sent_weights,
            sent_rows: tier.sent_rows,
            sent: if step.is_alone() { 0 } else { tier.sent },
            failed: tier.failed,
            generation: tier.generation,
            hidden: shape.hidden,
            top_k: step.group.top_k,
            max_tokens: shape.max_tokens,
            reserved: 0,
        };
        // SAFETY: the caller keeps all addresses live.
        unsafe { launch::tier(&[params], step.copy_blocks, self.on.raw())? };
        Ok(())
    }

    unsafe fn dispatch(&self) -> Result<(), CudaFault> {
        let step = self.step;
        let of_gate = step.slot.kernels.dispatch(step.group);
        let (topk_ids, topk_weights) = match &step.tier {
            Some(tier) => (tier.local_ids, tier.local_weights),
            None => (of_gate.topk_ids, of_gate.topk_weights),
        };
        let dispatch = DispatchParams {
            fp8_rows: u32::from(self.quantises_rows()),
            power_of_two_scales: u32::from(step.layer.spec.experts.power_of_two_scales),
            topk_ids,
            topk_weights,
            ..of_gate
        };
        // SAFETY: the caller keeps all addresses live.
        unsafe { launch::dispatch(&[dispatch], step.dispatch_blocks, self.on.raw())? };
        Ok(())
    }

    unsafe fn combine(&self) -> Result<(), CudaFault> {
        let step = self.step;
        let shared_out = self.shared().map_or(0, |_| step.slot.shared_out.address());
        let (places, experts_done) = (step.slot.places.address(), step.slot.experts_done.address());
        let combine =
            CombineParams { places, experts_done, ..step.slot.kernels.combine(step.group, shared_out) };
        let combine = match &step.tier {
            Some(tier) => CombineParams {
                topk_ids: tier.local_ids,
                topk_weights: tier.local_weights,
                sums: tier.sums,
                sums_stride: tier.sums_stride,
                sums_count: if step.is_alone() { 0 } else { tier.sums_count },
                ..combine
            },
            None => combine,
        };
        let ends = step.parts.map_or(&[][..], |parts| &parts.ends[..parts.ends.len() - 1]);
        let firsts = std::iter::once(0).chain(ends.iter().copied());
        for (part, first_row) in firsts.enumerate() {
            let end_row = ends.get(part).copied().unwrap_or(0);
            let combine = CombineParams { first_row, end_row, ..combine };
            // SAFETY: the caller keeps all addresses live.
            unsafe { launch::combine(&[combine], step.combine_blocks, self.on.raw())? };
            if let Some(parts) = step.parts {
                parts.combined.of(part).record(self.on)?;
            }
        }
        Ok(())
    }

    unsafe fn copy_out(&self) -> Result<(), CudaFault> {
        let Phases { step, layers, shape, .. } = self;
        let (slot, k) = (step.slot, &step.slot.kernels);
        let local_experts =
            step.streamed.map_or_else(|| layers.local_experts(step.layer), |(_, step)| step.count());
        let copy_out = CopyOutParams {
            group: step.group,
            out: if step.unchanged { 0 } else { k.out.address() },
            topk_ids: k.topk_ids.address(),
            topk_weights: k.topk_weights.address(),
            places: slot.places.address(),
            assignments: k.expert_offsets.address() + u64::from(local_experts) * 4,
            staged_ids: step.staged.ids,
            staged_weights: step.staged.weights,
            completion: slot.completion.address(),
            raised: step.staged.raised,
            hidden: shape.hidden,
            top_k: step.group.top_k,
            max_tokens: shape.max_tokens,
            first_expert: step.layer.mine.first().copied().unwrap_or(0),
            local_experts,
            local_ids: step.streamed.map_or_else(|| layers.local_ids(), |(_, step)| step.local_ids),
            row_elements: step.row_elements,
            ..step.counts.params(k.expert_offsets.address())
        };
        // SAFETY: the caller keeps all addresses live.
        unsafe { launch::copy_out(&[copy_out], step.copy_blocks, self.on.raw())? };
        Ok(())
    }
}
