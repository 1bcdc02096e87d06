//! Experts and rows in device memory, poisoned where the kernel writes, and launches.

use expertd_kernels::device::{Buffer, Device, Stream, read_device, write_device};
use expertd_kernels::experts::{
    self, ExpertsParams, LayerWeights, PACK_DOWN, PACK_GATE_UP, PackNarrowParams, PackParams,
};
use half::bf16;

use super::mlp::{ALPHA, Case, Expert, LIMIT};
use super::stored::Stored;
use crate::Outcome;
use crate::random::Random;

/// Words of the state in which the portable products count drawn tiles, by phase.
pub const DRAWN_TILES: [usize; 2] = [8, 16];

/// In place of `tile_rows` and `tile_tokens`: the kernel for few rows.
pub const FEW_ROWS: [i32; 2] = [-1, 0];
/// In place of them: the kernel for many rows ([`experts::W4A8`]) with the tiles that the device chooses.
pub const MANY_ROWS: [i32; 2] = [-2, 0];

/// Experts in device memory.
pub struct Loaded {
    weights: LayerWeights,
    #[expect(dead_code, reason = "held for the addresses in `weights`")]
    held: (Vec<Buffer<u8>>, Vec<Buffer<f32>>),
}

/// Bytes on the device, aligned as panels have to be.
fn room(device: &Device, bytes: u64) -> Result<(Buffer<u8>, u64), Box<dyn std::error::Error>> {
    let buffer = Buffer::<u8>::zeroed(device, bytes as usize + 1024)?;
    buffer.fill_bytes(0xff)?;
    let address = buffer.address().next_multiple_of(1024);
    Ok((buffer, address))
}

pub fn load(device: &Device, case: &Case, all: &[Expert]) -> Result<Loaded, Box<dyn std::error::Error>> {
    let (hidden, inter) = (case.hidden, case.inter);
    let bytes = [PACK_GATE_UP, PACK_DOWN].map(|kind| experts::matrix_bytes(case.format, kind, hidden, inter));
    let (gate_up_held, gate_up) = room(device, bytes[0] * all.len() as u64)?;
    let (down_held, down) = room(device, bytes[1] * all.len() as u64)?;
    let floats = |of: &dyn Fn(&Expert) -> Vec<f32>| -> Vec<f32> { all.iter().flat_map(of).collect() };
    let gate_up_bias =
        Buffer::from_slice(device, &floats(&|e| [e.gate_bias.clone(), e.up_bias.clone()].concat()))?;
    let down_bias = Buffer::from_slice(device, &floats(&|e| e.down_bias.clone()))?;
    let gate_up_scale = Buffer::<f32>::zeroed(device, all.len() * 2 * inter)?;
    let down_scale = Buffer::<f32>::zeroed(device, all.len() * hidden)?;
    let stream = device.stream()?;
    for (i, expert) in all.iter().enumerate() {
        let send = |stored: &Stored| Buffer::from_slice(device, &stored.codes);
        let (g, u, d) = (send(&expert.gate)?, send(&expert.up)?, send(&expert.down)?);
        let i = i as u64;
        if case.format == experts::BF16 {
            let matrix = (hidden * inter) as u64;
            let pack = PackParams {
                first: g.address(),
                second: u.address(),
                panels: gate_up + i * bytes[0],
                expert_stride: matrix,
                experts: 1,
                hidden: hidden as i32,
                inter: inter as i32,
                kind: PACK_GATE_UP,
            };
            let last = PackParams {
                first: d.address(),
                second: 0,
                panels: down + i * bytes[1],
                kind: PACK_DOWN,
                ..pack
            };
            // SAFETY: buffers of those sizes, alive until the stream is drained below.
            unsafe {
                experts::pack(&pack, stream.raw())?;
                experts::pack(&last, stream.raw())?;
            }
            stream.synchronize()?;
            continue;
        }
        let send = |stored: &Stored| Buffer::from_slice(device, &stored.scale_bytes());
        let (g_scales, u_scales, d_scales) = (send(&expert.gate)?, send(&expert.up)?, send(&expert.down)?);
        let send = |stored: &Stored| Buffer::from_slice(device, &stored.zeros);
        let (g_zeros, u_zeros, d_zeros) = (send(&expert.gate)?, send(&expert.up)?, send(&expert.down)?);
        let inputs = [expert.gate.row_scales.clone(), expert.up.row_scales.clone()].concat();
        let (inputs, outputs) =
            (Buffer::from_slice(device, &inputs)?, Buffer::from_slice(device, &expert.down.row_scales)?);
        let pack = PackNarrowParams {
            first: g.address(),
            second: u.address(),
            first_scales: g_scales.address(),
            second_scales: u_scales.address(),
            first_zeros: g_zeros.address(),
            second_zeros: u_zeros.address(),
            row_scales_in: inputs.address(),
            row_scales: gate_up_scale.address() + i * 2 * inter as u64 * 4,
            units: gate_up + i * bytes[0],
            hidden: hidden as i32,
            inter: inter as i32,
            kind: PACK_GATE_UP,
            format: case.format,
        };
        let last = PackNarrowParams {
            first: d.address(),
            second: 0,
            first_scales: d_scales.address(),
            second_scales: 0,
            first_zeros: d_zeros.address(),
            second_zeros: 0,
            row_scales_in: outputs.address(),
            row_scales: down_scale.address() + i * hidden as u64 * 4,
            units: down + i * bytes[1],
            kind: PACK_DOWN,
            ..pack
        };
        // SAFETY: as above.
        unsafe {
            experts::pack_narrow(&pack, stream.raw())?;
            experts::pack_narrow(&last, stream.raw())?;
        }
        stream.synchronize()?;
    }
    let weights = LayerWeights {
        gate_up,
        down,
        gate_up_bias: if case.biases { gate_up_bias.address() } else { 0 },
        down_bias: if case.biases { down_bias.address() } else { 0 },
        gate_up_scale: gate_up_scale.address(),
        down_scale: down_scale.address(),
        block_scales: u64::from(case.block_scales),
    };
    let held = (vec![gate_up_held, down_held], vec![gate_up_bias, down_bias, gate_up_scale, down_scale]);
    Ok(Loaded { weights, held })
}

impl Loaded {
    /// `count` experts in device memory, each of which is one of `all`.
    pub fn repeated(
        device: &Device,
        case: &Case,
        all: &[Expert],
        count: usize,
    ) -> Result<Loaded, Box<dyn std::error::Error>> {
        let some = load(device, case, all)?;
        let mut bytes_held = Vec::new();
        let mut repeat = |address: u64, bytes: usize| -> Result<u64, Box<dyn std::error::Error>> {
            let mut host = vec![0_u8; bytes * all.len()];
            // SAFETY: the loaded experts have these bytes.
            unsafe { read_device(address, &mut host)? };
            let (held, to) = room(device, (bytes * count) as u64)?;
            for expert in 0..count {
                let from = &host[expert % all.len() * bytes..][..bytes];
                // SAFETY: the memory has room for `count` of them.
                unsafe { write_device(to + (expert * bytes) as u64, from)? };
            }
            bytes_held.push(held);
            Ok(to)
        };
        let matrix = |kind| experts::matrix_bytes(case.format, kind, case.hidden, case.inter) as usize;
        let of = some.weights;
        let weights = LayerWeights {
            gate_up: repeat(of.gate_up, matrix(PACK_GATE_UP))?,
            down: repeat(of.down, matrix(PACK_DOWN))?,
            gate_up_scale: repeat(of.gate_up_scale, 2 * case.inter * 4)?,
            down_scale: repeat(of.down_scale, case.hidden * 4)?,
            gate_up_bias: 0,
            down_bias: 0,
            ..of
        };
        Ok(Loaded { weights, held: (bytes_held, Vec::new()) })
    }
}

/// Routing and rows of a launch, and what comes of it.
pub struct Step {
    pub counts: Vec<usize>,
    /// Rows of x.
    pub index: Vec<i32>,
    pub weights: Vec<f32>,
    pub x: Vec<bf16>,
}

impl Step {
    pub fn draw(random: &mut Random, hidden: usize, counts: &[usize]) -> Step {
        let total: usize = counts.iter().sum();
        let rows = total.max(3);
        Step {
            counts: counts.to_vec(),
            index: (0..total).map(|_| random.below(rows as u64) as i32).collect(),
            weights: (0..total).map(|_| 0.05 + random.unit()).collect(),
            x: (0..rows * hidden).map(|_| bf16::from_f32(random.unit() * 3.4 - 1.7)).collect(),
        }
    }

    pub fn row(&self, assignment: usize, hidden: usize) -> Vec<f64> {
        let at = self.index[assignment] as usize * hidden;
        self.x[at..at + hidden].iter().map(|v| v.to_f64()).collect()
    }

    /// One bf16 row per assignment; checks that nothing else is written and that counters are left clean.
    pub fn run(
        &self,
        device: &Device,
        case: &Case,
        loaded: &Loaded,
        tiles: [i32; 2],
    ) -> Result<Vec<bf16>, Box<dyn std::error::Error>> {
        Launch::new(device, self, case, loaded, tiles)?.run()
    }
}

/// The buffers of a launch.
struct Held {
    _panels: [Buffer<u8>; 2],
    _x: Buffer<u16>,
    _routing: [Buffer<i32>; 2],
    _layer: Buffer<u32>,
    _floats: [Buffer<f32>; 3],
    _layers: Buffer<LayerWeights>,
}

/// A launch and its buffers.
pub struct Launch {
    pub params: ExpertsParams,
    /// The counters that blocks share.
    pub state: Buffer<u32>,
    stream: Stream,
    y: Buffer<u16>,
    /// Number of elements of y that the kernel writes.
    written: usize,
    #[expect(dead_code, reason = "held for the addresses in `params`")]
    held: Held,
}

impl Launch {
    pub fn new(
        device: &Device,
        step: &Step,
        case: &Case,
        loaded: &Loaded,
        tiles: [i32; 2],
    ) -> Result<Launch, Box<dyn std::error::Error>> {
        const BEHIND: usize = 64;
        let many = case.format == experts::W4A8
            && matches!(tiles[0], experts::TILE_TOKEN_ROWS | experts::TILE_TOKEN_PAIRS);
        let (flags, [tile_rows, tile_tokens]) = match tiles {
            FEW_ROWS => (experts::FEW_ROWS, [0, 0]),
            MANY_ROWS => (experts::MANY_ROWS, [0, 0]),
            _ if many => (experts::MANY_ROWS, tiles),
            _ => (0, tiles),
        };
        let (hidden, inter) = (case.hidden, case.inter);
        let (total, count) = (step.index.len(), step.counts.len());
        let mut offsets = vec![0_i32];
        for c in &step.counts {
            offsets.push(offsets.last().unwrap_or(&0) + *c as i32);
        }
        let panel_rows = (total + 7 * count + 8).next_multiple_of(8);
        let bits: Vec<u16> = step.x.iter().map(|v| v.to_bits()).collect();
        let (x, offsets) = (Buffer::from_slice(device, &bits)?, Buffer::from_slice(device, &offsets)?);
        let index = Buffer::from_slice(device, &[&step.index[..], &[0]].concat())?;
        let weights = Buffer::from_slice(device, &[&step.weights[..], &[0.0]].concat())?;
        let layers = Buffer::from_slice(device, &[LayerWeights::default(), loaded.weights])?;
        let layer = Buffer::from_slice(device, &[1_u32])?;
        let state = Buffer::<u32>::zeroed(device, experts::state_words(count))?;
        let y = Buffer::<u16>::zeroed(device, total * hidden + BEHIND)?;
        y.fill_bytes(0xff)?;
        let (x_held, x_panels) = room(device, (panel_rows * hidden * 2) as u64)?;
        let (h_held, h) = room(device, (panel_rows * inter * 2) as u64)?;
        let scales =
            |k: usize| Buffer::<f32>::zeroed(device, k.div_ceil(experts::SCALE_ELEMENTS) * panel_rows);
        let (x_scales, h_scales) = (scales(hidden)?, scales(inter)?);
        let params = ExpertsParams {
            layers: layers.address(),
            layer: layer.address(),
            expert_offsets: offsets.address(),
            row_index: index.address(),
            row_weight: weights.address(),
            x: x.address(),
            y: y.address(),
            x_panels,
            x_scales: x_scales.address(),
            h_scales: h_scales.address(),
            h,
            state: state.address(),
            x_stride: hidden as u64 * 2,
            panel_rows: panel_rows as i32,
            experts: count as i32,
            hidden: hidden as i32,
            inter: inter as i32,
            activation: case.activation,
            alpha: ALPHA,
            limit: LIMIT,
            weight_on_input: i32::from(case.weight_on_input),
            tile_rows,
            tile_tokens,
            format: case.format,
            flags,
            ..ExpertsParams::default()
        };
        let held = Held {
            _panels: [x_held, h_held],
            _x: x,
            _routing: [offsets, index],
            _layer: layer,
            _floats: [weights, x_scales, h_scales],
            _layers: layers,
        };
        Ok(Launch { params, state, stream: device.stream()?, y, written: total * hidden, held })
    }

    /// Enqueues the launch.
    pub fn enqueue(&self) -> Outcome {
        self.enqueue_on(&self.stream)
    }

    /// Enqueues the launch on another stream, which must be drained before the buffers are dropped.
    pub fn enqueue_on(&self, stream: &Stream) -> Outcome {
        // SAFETY: buffers of those sizes, alive until the stream is drained.
        unsafe { experts::experts(&self.params, stream.raw())? };
        Ok(())
    }

    pub fn wait(&self) -> Outcome {
        self.stream.synchronize()?;
        Ok(())
    }

    /// One bf16 row per assignment; checks that nothing else is written and that counters are left clean.
    pub fn run(&self) -> Result<Vec<bf16>, Box<dyn std::error::Error>> {
        self.enqueue()?;
        self.wait()?;
        // A phase of the portable products leaves its counter of tiles for the other one to clear.
        let is_dirty = |(at, word): (usize, &u32)| *word != 0 && !DRAWN_TILES.contains(&at);
        if self.state.read()?.iter().enumerate().any(is_dirty) {
            return Err("counters are left dirty".into());
        }
        let mut y = self.y.read()?;
        if y[self.written..].iter().any(|bits| *bits != 0xffff) {
            return Err("written behind the last row".into());
        }
        y.truncate(self.written);
        Ok(y.into_iter().map(bf16::from_bits).collect())
    }
}
