//! The launches of routed experts, of copies, and of shared experts.

#![allow(unsafe_code, reason = "launches kernels")]

use expertd_kernels::experts::{self, ExpertsParams};
use expertd_kernels::launch;
use expertd_kernels::params::{SharedParams, SlotState, fp8_row_bytes};
use expertd_kernels::path::KernelPath;
use expertd_model::Activation;

use super::Phases;
use crate::engine::fault::CudaFault;
use crate::engine::host_experts::{Chunk, Slots};
use crate::engine::layers::SharedExperts;
use crate::experts::activation_code;
use crate::format::DeviceFormat;
use crate::kernel_choice::ExpertsLoad;

/// Blocks of the kernel that lists the rows of shared experts.
const LIST_BLOCKS: u32 = 32;

impl Phases<'_> {
    pub(super) unsafe fn routed_experts(&self) -> Result<(), CudaFault> {
        let Phases { layers, on, .. } = self;
        let held =
            ExpertsParams { layers: layers.experts.address(), ..self.experts_from(0, self.held_experts()) };
        // SAFETY: the caller keeps all addresses live.
        unsafe { experts::experts(&held, on.raw())? };
        Ok(())
    }

    /// The experts of CPU ranks of which this GPU has a copy, and those that come for the step.
    pub(super) unsafe fn copied_experts(&self) -> Result<(), CudaFault> {
        let step = self.step;
        let first = self.held_experts();
        let of_step = step.streamed.map(|(_, of_step)| of_step);
        let used = |slots: &&Slots| of_step.is_none_or(|of_step| of_step.slots == slots.count());
        if let Some(slots) = step.slots.filter(used) {
            let copies = ExpertsParams { layers: slots.weights(), ..self.experts_from(first, slots.count()) };
            // SAFETY: the caller keeps all addresses live.
            unsafe { experts::experts(&copies, self.on.raw())? };
        }
        let Some((copied, of_step)) = step.streamed else { return Ok(()) };
        let compute = |chunk: Chunk| {
            let params = self.experts_from(chunk.first, chunk.count);
            // The kernel before writes the weights, so that this one must not begin early.
            let flags = params.flags & !experts::PROGRAMMATIC;
            // SAFETY: the caller keeps all addresses live.
            unsafe {
                experts::experts(&ExpertsParams { layers: chunk.weights, flags, ..params }, self.on.raw())?
            };
            Ok(())
        };
        // SAFETY: all work of steps is on this stream, and so is that of `compute`.
        unsafe { copied.enqueue(of_step, self.on, compute) }
    }

    /// Number of experts that this rank holds, as kernels count them.
    pub(super) fn held_experts(&self) -> u32 {
        let Phases { step, layers, .. } = self;
        match (&step.tier, step.streamed) {
            (_, Some((_, of_step))) => of_step.held,
            (Some(_), None) => layers.held_experts(step.layer),
            (None, None) => layers.local_experts(step.layer),
        }
    }

    /// The products of `count` experts from number `first` on, without the address of weights.
    fn experts_from(&self, first: u32, count: u32) -> ExpertsParams {
        let step = self.step;
        let (k, spec) = (&step.slot.kernels, &step.layer.spec.experts);
        let (x_format, x_stride) = self.row_format(self.quantises_rows());
        let format = step.layer.format;
        ExpertsParams {
            expert_offsets: k.expert_offsets.address() + u64::from(first) * 4,
            row_index: k.row_index.address(),
            row_weight: k.row_weight.address(),
            x: k.rows(&step.group, self.quantises_rows()),
            y: k.expert_out.address(),
            experts: count as i32,
            inter: format.padded_inter(spec.width) as i32,
            weight_on_input: i32::from(spec.weight_on_input),
            power_of_two_scales: i32::from(spec.power_of_two_scales),
            format: format.code(),
            x_format,
            x_stride,
            ..self.mlp(spec.activation, format, &self.routed_load())
        }
    }

    /// The shared experts, if they run.
    pub(super) fn shared(&self) -> Option<&SharedExperts> {
        self.step.layer.shared.as_ref().filter(|_| self.step.shared)
    }

    pub(super) unsafe fn shared_experts(&self) -> Result<(), CudaFault> {
        let Phases { step, layers, shape, .. } = self;
        let Some(shared) = self.shared() else { return Ok(()) };
        let (slot, stream) = (step.slot, self.on.raw());
        let shared_out = slot.shared_out.address();
        let list = SharedParams {
            state: slot.kernels.state.address(),
            tokens: slot.kernels.tokens.address(),
            gates: layers.shared_gates.address(),
            expert_offsets: slot.shared_offsets.address(),
            row_index: slot.shared_index.address(),
            row_weight: slot.shared_weight.address(),
            hidden: shape.hidden,
            max_tokens: shape.max_tokens,
        };
        let spec = step.layer.spec.shared.as_ref();
        let activation = spec.map_or(Activation::SwiGlu, |s| s.activation);
        let format = shared.experts.format();
        let load = ExpertsLoad {
            assignments: u64::from(step.rows),
            experts: 1,
            local_experts: 1,
            expert_bytes: format.expert_bytes(shape.hidden as usize, shared.experts.inter(), false),
            multiprocessors: step.multiprocessors,
            kernels: KernelPath::chosen(),
        };
        let power_of_two_scales = spec.is_some_and(|s| s.power_of_two_scales);
        // In a group of one rank, rows are already in FP8 if its routed experts take FP8 rows.
        let fp8 = format.has_fp8_rows()
            && step.group.ranks == 1
            && self.quantises_rows()
            && power_of_two_scales == step.layer.spec.experts.power_of_two_scales;
        let (x_format, x_stride) = self.row_format(fp8);
        let all = ExpertsParams {
            layers: layers.shared.address(),
            expert_offsets: list.expert_offsets,
            row_index: list.row_index,
            row_weight: list.row_weight,
            x: if fp8 { slot.kernels.rows(&step.group, true) } else { list.tokens },
            y: shared_out,
            experts: 1,
            inter: shared.experts.inter() as i32,
            power_of_two_scales: i32::from(power_of_two_scales),
            format: format.code(),
            x_format,
            x_stride,
            ..self.mlp(activation, format, &load)
        };
        // SAFETY: the caller keeps all addresses live.
        unsafe {
            launch::shared(&[list], LIST_BLOCKS, stream)?;
            experts::experts(&all, stream)?;
        }
        Ok(())
    }

    /// The work of this rank's routed experts.
    fn routed_load(&self) -> ExpertsLoad {
        let Phases { step, shape, .. } = self;
        let (spec, format) = (&step.layer.spec.experts, step.layer.format);
        ExpertsLoad {
            assignments: u64::from(step.rows) * u64::from(step.group.ranks) * u64::from(step.group.top_k),
            experts: spec.count,
            local_experts: self.held_experts() as usize,
            expert_bytes: format.expert_bytes(shape.hidden as usize, spec.width, spec.biases),
            multiprocessors: step.multiprocessors,
            kernels: KernelPath::chosen(),
        }
    }

    /// Whether dispatch quantises rows, each once. All ranks send rows in the format of the layer's experts. A rank alone leaves few rows
    /// in bf16, because its experts quantise them while they wait for weights.
    pub(super) fn quantises_rows(&self) -> bool {
        let (format, ranks) = (self.step.layer.format, self.step.group.ranks);
        format.has_fp8_rows() && (ranks > 1 || !format.has_few_rows(&self.routed_load()))
    }

    /// Format and stride of the rows that experts read.
    fn row_format(&self, fp8: bool) -> (i32, u64) {
        let hidden = self.shape.hidden;
        match fp8 {
            true => (experts::ROWS_FP8, fp8_row_bytes(hidden as usize) as u64),
            false => (experts::ROWS_BF16, u64::from(hidden) * 2),
        }
    }

    /// The parameters that routed and shared experts have in common.
    fn mlp(&self, activation: Activation, format: DeviceFormat, load: &ExpertsLoad) -> ExpertsParams {
        let Phases { step, buffers, shape, .. } = self;
        let (activation, alpha, limit) = activation_code(activation);
        let state = step.slot.kernels.state.address();
        ExpertsParams {
            layer: state + std::mem::offset_of!(SlotState, layer) as u64,
            error: state + std::mem::offset_of!(SlotState, error) as u64,
            x_panels: buffers.x_panels.address(),
            h: buffers.h.address(),
            x_scales: buffers.x_scales.address(),
            h_scales: buffers.h_scales.address(),
            state: buffers.state.address(),
            x_stride: u64::from(shape.hidden) * 2,
            deadline_ns: step.group.deadline_ns,
            panel_rows: buffers.panel_rows as i32,
            hidden: shape.hidden as i32,
            activation,
            alpha,
            limit,
            tile_tokens: format.tile_tokens(load),
            flags: experts::PROGRAMMATIC | format.kernel_flags(load),
            ..ExpertsParams::default()
        }
    }
}
