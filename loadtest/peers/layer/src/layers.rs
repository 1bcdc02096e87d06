//! The layers of a handle: packed weights, buffers and launches.

use cudarc::driver::sys::CUstream;
use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::experts::{self, ExpertsParams, LayerWeights, PackNarrowParams, PackParams};
use expertd_kernels::launch::{self, LaunchError};
use expertd_kernels::layout::{Shape, ShapeError, WindowLayout};
use expertd_kernels::params::{
    CombineParams, DeviceFault, DispatchParams, GateLayer, GateParams, MAX_BLOCKS, SlotState, fp8_row_bytes,
};
use expertd_kernels::path::KernelPath;
use expertd_kernels::slot::{SlotBuffers, combine_blocks, dispatch_blocks};
use expertd_rank_cuda::DeviceFormat;
use expertd_rank_cuda::kernel_choice::ExpertsLoad;

use crate::{LayerShape, LayerTensors};

/// Longest wait inside a kernel, in nanoseconds.
const DEADLINE_NS: u64 = 2_000_000_000;
/// The factor of NVFP4 matrices.
const NVFP4_FACTOR: f32 = 1.0 / 512.0;
/// Wire code of bf16.
const BF16: u32 = 1;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A launch was refused.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The kernels do not support the sizes.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The caller's arguments do not fit together.
    #[error("{0}")]
    Arguments(String),
    /// A step failed.
    #[error("a step failed: {0:?}")]
    Step(Option<DeviceFault>),
}

/// Packed matrices and scales of one layer.
#[derive(Debug)]
struct Packed {
    gate_up: Buffer<u8>,
    down: Buffer<u8>,
    gate_up_scale: Buffer<f32>,
    down_scale: Buffer<f32>,
}

/// See [`crate::expertd_layers_open`].
#[derive(Debug)]
pub struct Layers {
    about: LayerShape,
    format: DeviceFormat,
    path: KernelPath,
    shape: Shape,
    device: Device,
    stream: Stream,
    multiprocessors: u32,
    rows: u32,
    packed: Vec<Packed>,
    gates: Vec<GateLayer>,
    weights: Vec<LayerWeights>,
    gate_table: Buffer<GateLayer>,
    weight_table: Buffer<LayerWeights>,
    /// One state for each layer, so that no launch has to change the layer's number.
    states: Buffer<SlotState>,
    slot: SlotBuffers,
    window: Buffer<u8>,
    panel_rows: usize,
    x_panels: Buffer<u16>,
    h: Buffer<u16>,
    x_scales: Buffer<f32>,
    h_scales: Buffer<f32>,
    counters: Buffer<u32>,
    /// What multiplies each row of a matrix.
    factors: Buffer<f32>,
}

impl Layers {
    pub(crate) fn open(about: LayerShape) -> Result<Self, Error> {
        let format = match about.format {
            0 => DeviceFormat::Bf16,
            1 if about.portable != 0 => DeviceFormat::Fp8,
            1 => DeviceFormat::W8a8,
            2 => DeviceFormat::Mxfp4,
            3 => DeviceFormat::Int4,
            4 => DeviceFormat::Nvfp4,
            other => return Err(Error::Arguments(format!("the format is {other}, expected 0 to 4"))),
        };
        let (hidden, width, experts) = (about.hidden as usize, about.width as usize, about.experts as usize);
        if !hidden.is_multiple_of(64) || format.padded_inter(width) != width {
            let sizes = format!("hidden {hidden} and width {width} of {format:?} need padding");
            return Err(Error::Arguments(sizes));
        }
        let shape = Shape {
            ranks: 1,
            max_tokens: about.max_tokens,
            hidden: about.hidden,
            top_k: about.top_k,
            experts: about.experts,
        };
        shape.check()?;
        let device = Device::open(0)?;
        let path = if about.portable == 0 { KernelPath::Hopper } else { KernelPath::Portable };
        path.choose();
        experts::setup()?;
        let panel_rows = (shape.max_assignments() + 7 * experts).next_multiple_of(8);
        let groups = |size: usize| size.div_ceil(experts::SCALE_ELEMENTS) * panel_rows;
        let layers = about.layers as usize;
        let (_, window_bytes) = WindowLayout::new(&shape);
        Ok(Layers {
            about,
            format,
            path,
            shape,
            stream: device.stream()?,
            multiprocessors: device.multiprocessors()?,
            rows: 0,
            packed: Vec::new(),
            gates: Vec::new(),
            weights: Vec::new(),
            gate_table: Buffer::zeroed(&device, layers)?,
            weight_table: Buffer::zeroed(&device, layers)?,
            states: Buffer::zeroed(&device, layers)?,
            slot: SlotBuffers::new(&device, &shape)?,
            window: Buffer::zeroed(&device, window_bytes as usize)?,
            panel_rows,
            x_panels: Buffer::zeroed(&device, panel_rows * hidden.next_multiple_of(128))?,
            h: Buffer::zeroed(&device, panel_rows * width)?,
            x_scales: Buffer::zeroed(&device, groups(hidden))?,
            h_scales: Buffer::zeroed(&device, groups(width))?,
            counters: Buffer::zeroed(&device, experts::state_words(experts))?,
            factors: Buffer::from_slice(
                &device,
                &vec![
                    if format == DeviceFormat::Nvfp4 { NVFP4_FACTOR } else { 1.0 };
                    (2 * width).max(hidden)
                ],
            )?,
            device,
        })
    }

    /// # Safety
    /// See [`crate::expertd_layers_add`].
    pub(crate) unsafe fn add(&mut self, tensors: &LayerTensors) -> Result<(), Error> {
        if self.packed.len() == self.about.layers as usize {
            return Err(Error::Arguments(format!("all {} layers are there", self.packed.len())));
        }
        let (hidden, width, experts) =
            (self.about.hidden as usize, self.about.width as usize, self.about.experts as usize);
        let [gate_up_bytes, down_bytes] = self.format.matrix_bytes(hidden, width);
        let scaled = usize::from(self.format != DeviceFormat::Bf16);
        let packed = Packed {
            gate_up: Buffer::zeroed(&self.device, experts * gate_up_bytes)?,
            down: Buffer::zeroed(&self.device, experts * down_bytes)?,
            gate_up_scale: Buffer::zeroed(&self.device, scaled * experts * 2 * width)?,
            down_scale: Buffer::zeroed(&self.device, scaled * experts * hidden)?,
        };
        self.path.choose();
        // SAFETY: the caller promises the tensors; the destinations have the sizes of the kernels' layouts.
        unsafe {
            match self.format {
                DeviceFormat::Bf16 => self.pack_bf16(tensors, &packed)?,
                _ => self.pack_narrow(tensors, &packed, [gate_up_bytes, down_bytes])?,
            }
        }
        self.stream.synchronize()?;
        self.gates.push(GateLayer {
            weight: tensors.gate,
            logit_bias: tensors.gate_bias,
            ..GateLayer::default()
        });
        self.weights.push(LayerWeights {
            gate_up: packed.gate_up.address(),
            down: packed.down.address(),
            gate_up_bias: tensors.gate_up_bias,
            down_bias: tensors.down_bias,
            gate_up_scale: packed.gate_up_scale.address(),
            down_scale: packed.down_scale.address(),
            block_scales: u64::from(self.format == DeviceFormat::W8a8),
        });
        self.packed.push(packed);
        if self.packed.len() == self.about.layers as usize {
            self.gate_table.write(&self.gates)?;
            self.weight_table.write(&self.weights)?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Self::add`].
    unsafe fn pack_bf16(&self, tensors: &LayerTensors, packed: &Packed) -> Result<(), Error> {
        let (hidden, inter) = (self.about.hidden as i32, self.about.width as i32);
        let matrix = u64::from(self.about.hidden) * u64::from(self.about.width);
        let all = PackParams { experts: self.about.experts as i32, hidden, inter, ..PackParams::default() };
        let gate_up = PackParams {
            first: tensors.gate_up,
            second: tensors.gate_up + matrix * 2,
            panels: packed.gate_up.address(),
            expert_stride: 2 * matrix,
            kind: experts::PACK_GATE_UP,
            ..all
        };
        let down = PackParams {
            first: tensors.down,
            panels: packed.down.address(),
            expert_stride: matrix,
            kind: experts::PACK_DOWN,
            ..all
        };
        // SAFETY: the caller's promise.
        unsafe {
            experts::pack(&gate_up, self.stream.raw())?;
            experts::pack(&down, self.stream.raw())?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Self::add`].
    unsafe fn pack_narrow(
        &self,
        tensors: &LayerTensors,
        packed: &Packed,
        [gate_up_bytes, down_bytes]: [usize; 2],
    ) -> Result<(), Error> {
        let (hidden, width) = (u64::from(self.about.hidden), u64::from(self.about.width));
        let fp8 = matches!(self.format, DeviceFormat::W8a8 | DeviceFormat::Fp8);
        // Bytes of a row of `k` codes, and of its scales.
        let codes = |k: u64| if fp8 { k } else { k / 2 };
        let scales = |k: u64| match self.format {
            DeviceFormat::W8a8 | DeviceFormat::Fp8 => k.div_ceil(128) * 4,
            DeviceFormat::Int4 | DeviceFormat::Nvfp4 => k / 16,
            _ => k / 32,
        };
        let all = PackNarrowParams {
            row_scales_in: self.factors.address(),
            hidden: hidden as i32,
            inter: width as i32,
            format: self.format.code(),
            ..PackNarrowParams::default()
        };
        for expert in 0..u64::from(self.about.experts) {
            let (first, first_scales) = (
                tensors.gate_up + expert * 2 * width * codes(hidden),
                tensors.gate_up_scales + expert * 2 * width * scales(hidden),
            );
            let gate_up = PackNarrowParams {
                first,
                second: first + width * codes(hidden),
                first_scales,
                second_scales: first_scales + width * scales(hidden),
                row_scales: packed.gate_up_scale.address() + expert * 2 * width * 4,
                units: packed.gate_up.address() + expert * gate_up_bytes as u64,
                kind: experts::PACK_GATE_UP,
                ..all
            };
            let down = PackNarrowParams {
                first: tensors.down + expert * hidden * codes(width),
                first_scales: tensors.down_scales + expert * hidden * scales(width),
                row_scales: packed.down_scale.address() + expert * hidden * 4,
                units: packed.down.address() + expert * down_bytes as u64,
                kind: experts::PACK_DOWN,
                ..all
            };
            // SAFETY: the caller's promise.
            unsafe {
                experts::pack_narrow(&gate_up, self.stream.raw())?;
                experts::pack_narrow(&down, self.stream.raw())?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// See [`crate::expertd_layers_rows`].
    pub(crate) unsafe fn set_rows(&mut self, rows: u32) -> Result<(), Error> {
        let added = self.packed.len();
        if added != self.about.layers as usize || rows == 0 || rows > self.about.max_tokens {
            let found = format!("{rows} rows, {added} layers; expected those of {:?}", self.about);
            return Err(Error::Arguments(found));
        }
        let state = |layer: usize| SlotState {
            sequence: 1,
            tokens: rows,
            layer: layer as u32,
            out_dtype: BF16,
            ..SlotState::default()
        };
        self.states.write(&(0..added).map(state).collect::<Vec<_>>())?;
        self.rows = rows;
        Ok(())
    }

    /// # Safety
    /// See [`crate::expertd_layers_check`].
    pub(crate) unsafe fn check(&self) -> Result<(), Error> {
        let failed = self.states.read()?.into_iter().find(|state| state.error != 0);
        failed.map_or(Ok(()), |state| Err(Error::Step(DeviceFault::decode(state.error))))
    }

    /// # Safety
    /// See [`crate::expertd_layers_step`].
    pub(crate) unsafe fn step(
        &self,
        layer: u32,
        tokens: u64,
        out: u64,
        stream: CUstream,
    ) -> Result<(), Error> {
        self.path.choose();
        let (about, shape) = (&self.about, &self.shape);
        if layer >= about.layers || self.rows == 0 {
            return Err(Error::Arguments(format!("layer {layer}, {} rows", self.rows)));
        }
        let (hidden, width) = (about.hidden as usize, about.width as usize);
        let state = self.states.address() + u64::from(layer) * size_of::<SlotState>() as u64;
        let mut group = self.slot.group(shape, 0, &[self.window.address()], 1, DEADLINE_NS);
        group.state = state;
        let gate = GateParams {
            state,
            layers: self.gate_table.address(),
            tokens,
            topk_ids: self.slot.topk_ids.address(),
            topk_weights: self.slot.topk_weights.address(),
            hidden: about.hidden,
            experts: about.experts,
            top_k: about.top_k,
            max_tokens: about.max_tokens,
            normalise: 1,
            scale: 1.0,
            ..GateParams::default()
        };
        // As in the service, launches cover the next power of two.
        let covered = self.rows.next_power_of_two().min(about.max_tokens);
        let load = ExpertsLoad {
            assignments: u64::from(covered) * u64::from(about.top_k),
            experts: about.experts as usize,
            local_experts: about.experts as usize,
            expert_bytes: self.format.expert_bytes(hidden, width, about.gpt_oss != 0),
            multiprocessors: self.multiprocessors,
            kernels: KernelPath::chosen(),
        };
        let few_rows = self.format.has_few_rows(&load);
        let fp8 = self.format == DeviceFormat::W8a8 && about.rows_by_experts == 0 && !few_rows;
        let dispatch = DispatchParams { tokens, fp8_rows: u32::from(fp8), ..self.slot.dispatch(group) };
        let routed = ExpertsParams {
            layers: self.weight_table.address(),
            layer: state + std::mem::offset_of!(SlotState, layer) as u64,
            error: state + std::mem::offset_of!(SlotState, error) as u64,
            expert_offsets: self.slot.expert_offsets.address(),
            row_index: self.slot.row_index.address(),
            row_weight: self.slot.row_weight.address(),
            x: if fp8 { self.slot.rows(&group, true) } else { tokens },
            x_format: if fp8 { experts::ROWS_FP8 } else { experts::ROWS_BF16 },
            x_stride: if fp8 { fp8_row_bytes(hidden) } else { hidden * 2 } as u64,
            y: self.slot.expert_out.address(),
            x_panels: self.x_panels.address(),
            h: self.h.address(),
            x_scales: self.x_scales.address(),
            h_scales: self.h_scales.address(),
            state: self.counters.address(),
            deadline_ns: DEADLINE_NS,
            panel_rows: self.panel_rows as i32,
            experts: about.experts as i32,
            hidden: about.hidden as i32,
            inter: about.width as i32,
            activation: if about.gpt_oss == 0 { experts::SWIGLU } else { experts::SWIGLU_OAI },
            alpha: 1.702,
            tile_tokens: self.format.tile_tokens(&load),
            limit: 7.0,
            format: self.format.code(),
            flags: experts::PROGRAMMATIC | self.format.kernel_flags(&load),
            ..ExpertsParams::default()
        };
        let combine = CombineParams { out, ..self.slot.combine(group, 0) };
        let most = self.multiprocessors.min(MAX_BLOCKS as u32);
        // SAFETY: the caller promises rows and results; everything else belongs to this handle.
        unsafe {
            launch::gate(&[gate], covered, stream)?;
            launch::dispatch(&[dispatch], dispatch_blocks(shape, covered, most), stream)?;
            experts::experts(&routed, stream)?;
            launch::combine(&[combine], combine_blocks(shape, covered, most), stream)?;
        }
        Ok(())
    }
}
