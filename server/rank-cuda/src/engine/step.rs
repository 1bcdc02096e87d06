//! The buffers of a step's kernels, and their launches in order.

#![allow(unsafe_code, reason = "launches kernels")]

use expertd_kernels::device::{Buffer, Device, DeviceError, Mailbox, Stream};
use expertd_kernels::experts::{self, ExpertsParams};
use expertd_kernels::launch;
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{
    CombineParams, Completion, CopyInParams, CopyOutParams, DispatchParams, GateParams, Group,
    ROW_PLACE_BYTES, Segment, SharedParams, SlotState, StepRequest, fp8_row_bytes,
};
use expertd_kernels::slot::SlotBuffers;

use super::counts::DeviceCounts;
use super::fault::CudaFault;
use super::layers::{Layer, Layers, gate_params};
use super::parts::Parts;
use crate::experts::{DeviceFormat, HostBuffer, Panels, activation_code};
use expertd_model::Activation;

/// Blocks of the kernels that copy rows between host and device: enough to saturate the link, and few enough to leave most
/// multiprocessors to other kernels.
pub(super) const COPY_BLOCKS: u32 = 16;
/// Blocks of the kernel that lists the rows of shared experts.
const LIST_BLOCKS: u32 = 32;

/// The buffers of one slot.
pub(super) struct SlotSet {
    pub(super) kernels: SlotBuffers,
    token_ids: Buffer<i32>,
    /// bf16 `[max_tokens, hidden]`: the part of f32 and f16 rows that rounding to bf16 removed.
    tokens_low: Buffer<u16>,
    /// `RowPlace` of each row.
    places: Buffer<u8>,
    shared_offsets: Buffer<u32>,
    shared_index: Buffer<u32>,
    shared_weight: Buffer<f32>,
    shared_out: Buffer<u16>,
    pub(super) request: Mailbox<StepRequest>,
    pub(super) completion: Mailbox<Completion>,
    /// Sequence number of the last step whose experts phase has ended.
    pub(super) experts_done: Mailbox<u64>,
    /// Padded rows, f32 `[max_tokens, hidden]`; one page if rows need no padding.
    pub(super) rows: HostBuffer,
    /// Segments of [`rows`](Self::rows).
    pub(super) segments: HostBuffer,
}

/// All buffers of steps, apart from weights and windows.
pub(super) struct Buffers {
    pub(super) slots: Vec<SlotSet>,
    logits: Buffer<f32>,
    tickets: Buffer<u32>,
    x_panels: Panels,
    h: Panels,
    /// Scales of `x_panels` for FP8 products; empty without them.
    x_scales: Buffer<f32>,
    /// Scales of `h` for FP8 products; empty without them.
    h_scales: Buffer<f32>,
    state: Buffer<u32>,
    panel_rows: usize,
}

/// Rows of a workspace for `assignments` rows of `experts` experts. Each expert's rows start at a multiple of 8.
const fn panel_rows(assignments: usize, experts: usize) -> usize {
    (assignments + 7 * experts).next_multiple_of(8)
}

/// Sizes of buffers that do not follow from the group's shape.
pub(super) struct Sizes {
    /// The largest intermediate size of any layer, padded.
    pub(super) inter: usize,
    pub(super) slots: u32,
    /// Whether the kernels' rows are longer than the callers'.
    pub(super) padding: bool,
    /// Whether any layer's experts compute products in FP8.
    pub(super) fp8_products: bool,
}

impl Buffers {
    /// Allocates the buffers for a group of this shape.
    pub(super) fn new(device: &Device, shape: &Shape, sizes: &Sizes) -> Result<Self, DeviceError> {
        let &Sizes { inter, slots, padding, fp8_products } = sizes;
        let tokens = shape.max_tokens as usize;
        let hidden = shape.hidden as usize;
        let converted = if padding { tokens } else { 0 };
        let slot = || {
            Ok::<_, DeviceError>(SlotSet {
                kernels: SlotBuffers::new(device, shape)?,
                token_ids: Buffer::zeroed(device, tokens)?,
                tokens_low: Buffer::zeroed(device, tokens * hidden)?,
                places: Buffer::zeroed(device, tokens * ROW_PLACE_BYTES)?,
                shared_offsets: Buffer::zeroed(device, 2)?,
                shared_index: Buffer::zeroed(device, tokens)?,
                shared_weight: Buffer::zeroed(device, tokens)?,
                shared_out: Buffer::zeroed(device, tokens * hidden)?,
                request: Mailbox::new(device, StepRequest::default())?,
                completion: Mailbox::new(device, Completion::default())?,
                experts_done: Mailbox::new(device, 0)?,
                rows: HostBuffer::new(device, converted * hidden * 4)?,
                segments: HostBuffer::new(device, converted * size_of::<Segment>())?,
            })
        };
        let local = shape.max_local_experts() as usize;
        let routed_rows = panel_rows(shape.max_assignments(), local);
        let shared_rows = panel_rows(tokens, 1);
        // Routed and shared experts use the same workspace with the same distance between panels.
        let rows = routed_rows.max(shared_rows);
        let scales = |k: usize| if fp8_products { k.div_ceil(experts::SCALE_ELEMENTS) * rows } else { 0 };
        Ok(Buffers {
            slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?,
            logits: Buffer::zeroed(device, tokens * shape.experts as usize)?,
            tickets: Buffer::zeroed(device, tokens.div_ceil(16) + 1)?,
            x_panels: Panels::new(device, rows * hidden)?,
            h: Panels::new(device, rows * inter)?,
            x_scales: Buffer::zeroed(device, scales(hidden))?,
            h_scales: Buffer::zeroed(device, scales(inter))?,
            state: Buffer::zeroed(device, experts::state_words(local.max(1)))?,
            panel_rows: rows,
        })
    }
}

/// Device addresses of a slot's segments, rows and routing on the host, or of their copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StagedAddresses {
    pub(super) segments: u64,
    pub(super) max_segments: u32,
    pub(super) rows: u64,
    pub(super) row_bytes: u64,
    pub(super) ids: u64,
    pub(super) weights: u64,
    pub(super) token_ids: u64,
    /// The word that gets the step's sequence before its completion words are raised.
    pub(super) raised: u64,
}

/// The launches of one step.
pub(super) struct StepLaunches<'a> {
    pub(super) layer: &'a Layer,
    pub(super) slot: &'a SlotSet,
    pub(super) counts: &'a DeviceCounts,
    /// The group, with the layer's physical experts and the step's k.
    pub(super) group: Group,
    pub(super) staged: StagedAddresses,
    /// Whether ranks wait for each other between copy_in and the gate.
    pub(super) aligned: bool,
    /// Rows that the gate's grid covers; 0 if the gate routes no row of this rank.
    pub(super) gate_rows: u32,
    /// Whether shared experts run.
    pub(super) shared: bool,
    /// Grid of dispatch, equal on every rank.
    pub(super) dispatch_blocks: u32,
    /// Grid of combine, equal on every rank.
    pub(super) combine_blocks: u32,
    /// Grid of copy_in and copy_out.
    pub(super) copy_blocks: u32,
    /// Elements of a row without padding.
    pub(super) row_elements: u32,
    /// Whether copy engines carry rows to where the gate and dispatch read them, and results from where combine writes them.
    pub(super) unchanged: bool,
    /// Parts of a step, whose launches are not captured; `None`: the step is not cut, and its rows are on the device.
    pub(super) parts: Option<Parts<'a>>,
}

impl StepLaunches<'_> {
    /// Enqueues the whole step.
    ///
    /// # Safety
    /// All addresses are live until the stream has run what is enqueued, and the device's context is current.
    pub(super) unsafe fn enqueue(
        &self,
        layers: &Layers,
        buffers: &Buffers,
        shape: &Shape,
        on: &Stream,
    ) -> Result<(), CudaFault> {
        let stream = on.raw();
        let k = &self.slot.kernels;
        let state = k.state.address();
        let places = self.slot.places.address();
        let (hidden, max_tokens, top_k) = (shape.hidden, shape.max_tokens, self.group.top_k);
        let copy_in = CopyInParams {
            state,
            request: self.slot.request.address(),
            segments: self.staged.segments,
            staged_rows: self.staged.rows,
            staged_ids: self.staged.ids,
            staged_weights: self.staged.weights,
            staged_token_ids: if self.layer.spec.gate.needs_token_ids() { self.staged.token_ids } else { 0 },
            tokens: if self.unchanged { 0 } else { k.tokens.address() },
            tokens_low: self.slot.tokens_low.address(),
            topk_ids: k.topk_ids.address(),
            topk_weights: k.topk_weights.address(),
            token_ids: self.slot.token_ids.address(),
            places,
            staged_bytes: self.staged.row_bytes,
            hidden,
            top_k,
            max_tokens,
            experts: self.layer.spec.experts.count as u32,
            max_segments: self.staged.max_segments,
            row_elements: self.row_elements,
        };
        // SAFETY: the caller keeps all addresses live, for this and every launch below.
        unsafe { launch::copy_in(&[copy_in], self.copy_blocks, stream)? };
        if self.aligned {
            // SAFETY: as above.
            unsafe { launch::meet(&[self.group], 1, stream)? };
        }
        if let Some(parts) = self.parts {
            parts.arrived.wait_event(on)?;
        }
        if self.gate_rows > 0 {
            let gate = GateParams {
                state,
                layers: layers.gates.address(),
                tokens: k.tokens.address(),
                tokens_low: self.slot.tokens_low.address(),
                token_ids: self.slot.token_ids.address(),
                logits: buffers.logits.address(),
                tickets: buffers.tickets.address(),
                places,
                topk_ids: k.topk_ids.address(),
                topk_weights: k.topk_weights.address(),
                hidden,
                max_tokens,
                ..gate_params(&self.layer.spec.gate)
            };
            // SAFETY: as above.
            unsafe { launch::gate(&[gate], self.gate_rows, stream)? };
        }
        // All ranks send rows in the format of the layer's experts. A group of one rank sends no rows.
        let fp8_rows = self.layer.format == DeviceFormat::W8a8 && self.group.ranks > 1;
        let dispatch = DispatchParams {
            fp8_rows: u32::from(fp8_rows),
            power_of_two_scales: u32::from(self.layer.spec.experts.power_of_two_scales),
            ..k.dispatch(self.group)
        };
        // SAFETY: as above.
        unsafe { launch::dispatch(&[dispatch], self.dispatch_blocks, stream)? };
        let local_experts = layers.local_experts(self.layer);
        if local_experts > 0 {
            let routed = ExpertsParams {
                layers: layers.experts.address(),
                expert_offsets: k.expert_offsets.address(),
                row_index: k.row_index.address(),
                row_weight: k.row_weight.address(),
                x: k.rows(&self.group),
                y: k.expert_out.address(),
                experts: local_experts as i32,
                inter: self.layer.format.padded_inter(self.layer.spec.experts.width) as i32,
                weight_on_input: i32::from(self.layer.spec.experts.weight_on_input),
                power_of_two_scales: i32::from(self.layer.spec.experts.power_of_two_scales),
                format: self.layer.format.code(),
                x_format: if fp8_rows { experts::ROWS_FP8 } else { experts::ROWS_BF16 },
                x_stride: if fp8_rows {
                    fp8_row_bytes(hidden as usize) as u64
                } else {
                    u64::from(hidden) * 2
                },
                ..self.mlp(buffers, shape, self.layer.spec.experts.activation)
            };
            // SAFETY: as above.
            unsafe { experts::experts(&routed, stream)? };
        }
        let mut shared_out = 0;
        if let Some(shared) = self.layer.shared.as_ref().filter(|_| self.shared) {
            shared_out = self.slot.shared_out.address();
            let list = SharedParams {
                state,
                tokens: k.tokens.address(),
                gates: layers.shared_gates.address(),
                expert_offsets: self.slot.shared_offsets.address(),
                row_index: self.slot.shared_index.address(),
                row_weight: self.slot.shared_weight.address(),
                hidden,
                max_tokens,
            };
            let spec = self.layer.spec.shared.as_ref();
            let activation = spec.map_or(Activation::SwiGlu, |s| s.activation);
            let all = ExpertsParams {
                layers: layers.shared.address(),
                expert_offsets: list.expert_offsets,
                row_index: list.row_index,
                row_weight: list.row_weight,
                x: list.tokens,
                y: shared_out,
                experts: 1,
                inter: shared.experts.inter() as i32,
                power_of_two_scales: i32::from(spec.is_some_and(|s| s.power_of_two_scales)),
                format: shared.experts.format().code(),
                ..self.mlp(buffers, shape, activation)
            };
            // SAFETY: as above.
            unsafe {
                launch::shared(&[list], LIST_BLOCKS, stream)?;
                experts::experts(&all, stream)?;
            }
        }
        let experts_done = self.slot.experts_done.address();
        let combine = CombineParams { places, experts_done, ..k.combine(self.group, shared_out) };
        let ends = self.parts.map_or(&[][..], |parts| &parts.ends[..parts.ends.len() - 1]);
        let firsts = std::iter::once(0).chain(ends.iter().copied());
        for (part, first_row) in firsts.enumerate() {
            let end_row = ends.get(part).copied().unwrap_or(0);
            let combine = CombineParams { first_row, end_row, ..combine };
            // SAFETY: as above.
            unsafe { launch::combine(&[combine], self.combine_blocks, stream)? };
            if let Some(parts) = self.parts {
                parts.combined.of(part).record(on)?;
            }
        }
        let copy_out = CopyOutParams {
            group: self.group,
            out: if self.unchanged { 0 } else { k.out.address() },
            topk_ids: k.topk_ids.address(),
            topk_weights: k.topk_weights.address(),
            places,
            assignments: k.expert_offsets.address() + u64::from(local_experts) * 4,
            staged_ids: self.staged.ids,
            staged_weights: self.staged.weights,
            completion: self.slot.completion.address(),
            raised: self.staged.raised,
            hidden,
            top_k,
            max_tokens,
            first_expert: self.layer.mine.first().copied().unwrap_or(0),
            local_experts,
            local_ids: layers.local_ids(),
            row_elements: self.row_elements,
            ..self.counts.params(k.expert_offsets.address())
        };
        // SAFETY: as above.
        unsafe { launch::copy_out(&[copy_out], self.copy_blocks, stream)? };
        Ok(())
    }

    /// The parameters that routed and shared experts have in common.
    fn mlp(&self, buffers: &Buffers, shape: &Shape, activation: Activation) -> ExpertsParams {
        let (activation, alpha, limit) = activation_code(activation);
        let state = self.slot.kernels.state.address();
        ExpertsParams {
            layer: state + std::mem::offset_of!(SlotState, layer) as u64,
            error: state + std::mem::offset_of!(SlotState, error) as u64,
            x_panels: buffers.x_panels.address(),
            h: buffers.h.address(),
            x_scales: buffers.x_scales.address(),
            h_scales: buffers.h_scales.address(),
            state: buffers.state.address(),
            x_stride: u64::from(shape.hidden) * 2,
            deadline_ns: self.group.deadline_ns,
            panel_rows: buffers.panel_rows as i32,
            hidden: shape.hidden as i32,
            activation,
            alpha,
            limit,
            flags: experts::PROGRAMMATIC,
            ..ExpertsParams::default()
        }
    }
}
