//! Checks a whole step from pinned host memory and back, captured once and replayed with different sizes, types and routing.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicU64, Ordering};

use expertd_kernels::device::{Buffer, Device, Pinned};
use expertd_kernels::launch;
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{
    Completion, CopyInParams, CopyOutParams, DeviceFault, MAX_RAISES, ROW_PLACE_BYTES, Raise, Segment,
    StepRequest,
};
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};
use half::{bf16, f16};

use crate::exchange::{Loopback, SECOND, expect, most_blocks};
use crate::random::{Random, step};
use crate::{Options, Outcome};

/// Page-aligned host memory that the device can access. It stands in for a shared-memory mapping.
struct Staging {
    host: *mut u8,
    layout: Layout,
    pinned: Option<Pinned<'static>>,
}

impl Staging {
    fn new(device: &Device, bytes: usize) -> Result<Staging, Box<dyn std::error::Error>> {
        let layout = Layout::from_size_align(bytes.next_multiple_of(4096), 4096)?;
        // SAFETY: the size is not zero.
        let host = unsafe { alloc_zeroed(layout) };
        // SAFETY: the range is the allocation above, which is freed after the registration ends.
        let pinned = unsafe { Pinned::register(device, host, layout.size())? };
        Ok(Staging { host, layout, pinned: Some(pinned) })
    }

    fn address(&self) -> u64 {
        self.pinned.as_ref().expect("pinned until dropped").address()
    }

    fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.layout.size());
        // SAFETY: within the allocation; no step runs.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host, bytes.len()) };
    }

    fn read(&self, bytes: usize) -> Vec<u8> {
        assert!(bytes <= self.layout.size());
        // SAFETY: within the allocation; no step runs.
        unsafe { std::slice::from_raw_parts(self.host, bytes) }.to_vec()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.pinned = None;
        // SAFETY: the memory was allocated with this layout and is no longer registered.
        unsafe { dealloc(self.host, self.layout) };
    }
}

/// Segments begin at multiples of this.
const SEGMENT_ALIGN: usize = 64;

struct Stages {
    request: Staging,
    segments: Staging,
    places: Buffer<u8>,
    rows: Staging,
    /// A client's rows, then the places of their results.
    client: Staging,
    ids: Staging,
    weights: Staging,
    ids_out: Staging,
    weights_out: Staging,
    completion: Staging,
    row_counts: Buffer<u64>,
    row_counts_host: Staging,
    /// The word that gets the step's number, then a line with a completion word and its call's number for each raise.
    signals: Staging,
}

/// Number of layers in the tables of row counts.
const LAYERS: usize = 3;
/// Number of experts that a layer has room for in these tables, more than it has.
const STRIDE: usize = 37;

/// Bytes of a line of completion words.
const LINE: usize = 64;
/// Bytes of the signals of a rank.
const SIGNAL_BYTES: usize = (1 + MAX_RAISES) * LINE;

/// The words that a step with `raises` raises sets.
fn raises(signals: u64, step: u64, raises: usize) -> ([Raise; MAX_RAISES], Vec<u8>) {
    let mut all = [Raise::default(); MAX_RAISES];
    let mut wanted = vec![0; SIGNAL_BYTES];
    for (index, raise) in all.iter_mut().enumerate().take(raises) {
        let (line, call) = ((1 + index) * LINE, step * 10 + index as u64);
        *raise = Raise { word: signals + line as u64, number: signals + line as u64 + 32, call };
        wanted[line] = 1;
        wanted[line + 32..line + 40].copy_from_slice(&call.to_le_bytes());
    }
    if raises != 0 {
        wanted[..8].copy_from_slice(&step.to_le_bytes());
    }
    (all, wanted)
}

fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: plain integers and floats.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }.to_vec()
}

/// `[ranks]`: the experts of each rank in every layer, `[LAYERS, local experts]`.
fn local_ids(device: &Device, shape: &Shape) -> Result<Vec<Buffer<u32>>, Box<dyn std::error::Error>> {
    let of = |rank| {
        let (first, last) = shape.expert_range(rank);
        let ids: Vec<u32> = (0..LAYERS).flat_map(|_| first..last).collect();
        Ok(Buffer::from_slice(device, &ids)?)
    };
    (0..shape.ranks).map(of).collect()
}

pub fn check(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    let mut random = Random(options.number("seed", 21));
    let cases = options.number("cases", 6);
    let mut steps_run = 0;
    for case in 0..cases {
        let ranks = random.pick(&[1, 2, 4]);
        let hidden = random.pick(&[64, 2048, 2880]);
        // Steps of small rows have more segments than one load of the segment table holds.
        let most_tokens = if hidden == 64 { 3000 } else { 200 };
        let max_tokens = 1 + random.below(most_tokens) as u32;
        let shape = Shape { ranks, max_tokens, hidden, top_k: 4, experts: 30 };
        let mut group = Loopback::new(&device, shape, 0, 0)?;
        let deadline = options.number("deadline", 5) * SECOND;
        group.members.iter_mut().for_each(|member| member.group.deadline_ns = deadline);
        let (tokens, h, k) = (shape.max_tokens as usize, shape.hidden as usize, shape.top_k as usize);
        let max_segments = random.pick(&[1, 6, 400, tokens as u64]) as usize;
        let row_bytes = tokens * h * 4 + max_segments * SEGMENT_ALIGN;
        let stages: Vec<Stages> = (0..ranks)
            .map(|_| {
                Ok(Stages {
                    request: Staging::new(&device, size_of::<StepRequest>())?,
                    segments: Staging::new(&device, max_segments * size_of::<Segment>())?,
                    places: Buffer::zeroed(&device, tokens * ROW_PLACE_BYTES)?,
                    rows: Staging::new(&device, row_bytes)?,
                    client: Staging::new(&device, 2 * row_bytes)?,
                    ids: Staging::new(&device, tokens * k * 4)?,
                    weights: Staging::new(&device, tokens * k * 4)?,
                    ids_out: Staging::new(&device, tokens * k * 4)?,
                    weights_out: Staging::new(&device, tokens * k * 4)?,
                    completion: Staging::new(&device, size_of::<Completion>())?,
                    row_counts: Buffer::zeroed(&device, LAYERS * STRIDE)?,
                    row_counts_host: Staging::new(&device, LAYERS * STRIDE * 8)?,
                    signals: Staging::new(&device, SIGNAL_BYTES)?,
                })
            })
            .collect::<Result<_, Box<dyn std::error::Error>>>()?;
        let token_ids = Buffer::<i32>::zeroed(&device, tokens)?;
        // In some cases the experts whose rows are counted are listed, as by a placement.
        let local_ids = match random.below(2) == 0 {
            true => Some(local_ids(&device, &shape)?),
            false => None,
        };
        let (mut ins, mut outs) = (Vec::new(), Vec::new());
        let local = |rank: usize| {
            let (first, last) = shape.expert_range(rank as u32);
            u64::from(last - first)
        };
        for (rank, (member, stage)) in group.members.iter().zip(&stages).enumerate() {
            let b = &member.buffers;
            ins.push(CopyInParams {
                state: b.state.address(),
                request: stage.request.address(),
                segments: stage.segments.address(),
                staged_rows: stage.rows.address(),
                staged_ids: stage.ids.address(),
                staged_weights: stage.weights.address(),
                staged_token_ids: 0,
                tokens: b.tokens.address(),
                tokens_low: 0,
                topk_ids: b.topk_ids.address(),
                topk_weights: b.topk_weights.address(),
                token_ids: token_ids.address(),
                places: stage.places.address(),
                staged_bytes: row_bytes as u64,
                hidden: shape.hidden,
                top_k: shape.top_k,
                max_tokens: shape.max_tokens,
                experts: shape.experts,
                max_segments: max_segments as u32,
                row_elements: shape.hidden,
            });
            outs.push(CopyOutParams {
                group: member.group,
                out: b.out.address(),
                topk_ids: b.topk_ids.address(),
                topk_weights: b.topk_weights.address(),
                places: stage.places.address(),
                assignments: b.expert_offsets.address() + local(rank) * 4,
                staged_ids: stage.ids_out.address(),
                staged_weights: stage.weights_out.address(),
                completion: stage.completion.address(),
                raised: stage.signals.address(),
                expert_offsets: b.expert_offsets.address(),
                row_counts: stage.row_counts.address(),
                row_counts_host: stage.row_counts_host.address(),
                local_ids: local_ids.as_ref().map_or(0, |ids| ids[rank].address()),
                hidden: shape.hidden,
                top_k: shape.top_k,
                max_tokens: shape.max_tokens,
                first_expert: if local_ids.is_some() { u32::MAX } else { shape.expert_range(rank as u32).0 },
                local_experts: local(rank) as u32,
                count_stride: STRIDE as u32,
                row_elements: shape.hidden,
                reserved: 0,
            });
        }
        let most = most_blocks(&device, ranks)?;
        let blocks =
            (dispatch_blocks(&shape, shape.max_tokens, most), combine_blocks(&shape, shape.max_tokens, most));
        let record = || -> Outcome {
            // SAFETY: all addresses are of live buffers of this group.
            unsafe { launch::copy_in(&ins, 8, group.stream.raw())? };
            group.launch(blocks, &group.members)?;
            // SAFETY: as above.
            unsafe { launch::copy_out(&outs, 8, group.stream.raw())? };
            Ok(())
        };
        // Run once outside the capture, in which nothing may be initialised.
        record()?;
        group.stream.synchronize()?;
        let mut failed = None;
        let graph = group.stream.capture(|| {
            record().map_err(|error| {
                failed = Some(error.to_string());
                expertd_kernels::device::DeviceError::NoDriver
            })
        });
        if let Some(failed) = failed {
            return Err(failed.into());
        }
        let graph = graph?;
        // Rows of each expert of each layer, all ranks together.
        let mut counted = vec![0_u64; LAYERS * STRIDE];
        for index in 0..6_u64 {
            let steps = step(&mut random, &shape);
            let number = 1000 * case + index + 1;
            let layer = number as usize % LAYERS;
            for &id in steps.iter().flat_map(|step| &step.ids) {
                counted[layer * STRIDE + id as usize] += 1;
            }
            let mut layouts = Vec::new();
            let raised = random.below(MAX_RAISES as u64 + 1) as usize;
            let mut seen = steps.clone();
            for (rank, ((stage, step), seen)) in stages.iter().zip(&steps).zip(&mut seen).enumerate() {
                // Rows of several requests, each with its own type, and gaps between the segments.
                let (mut segments, mut bytes) = (Vec::new(), Vec::new());
                let mut row = 0;
                while row < step.tokens {
                    let left = step.tokens - row;
                    let rows = match max_segments - segments.len() {
                        1 => left,
                        2..=6 => 1 + random.below(left as u64) as usize,
                        _ => 1 + random.below(3.min(left as u64)) as usize,
                    };
                    let dtype = random.pick(&[1_u32, 2, 3]);
                    // Every place is used once: in staging, or at the same offset of the client's memory.
                    bytes.resize(bytes.len().next_multiple_of(SEGMENT_ALIGN), 0xee);
                    let (at, memory) = (bytes.len() as u64, random.pick(&[0_u32, 1]));
                    let client = u64::from(memory) * stage.client.address();
                    segments.push(Segment {
                        byte_offset: client + at,
                        output_offset: u64::from(memory) * (client + row_bytes as u64 + at),
                        first_row: row as u32,
                        rows: rows as u32,
                        dtype,
                        flags: 1,
                        memory,
                        reserved: 0,
                    });
                    for bits in &mut seen.rows[row * h..(row + rows) * h] {
                        let value = bf16::from_bits(*bits).to_f32();
                        match dtype {
                            1 => bytes.extend(bits.to_le_bytes()),
                            2 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                            _ => bytes.extend(value.to_le_bytes()),
                        }
                        if dtype == 2 {
                            // Round the value to f16.
                            *bits = bf16::from_f32(f16::from_f32(value).to_f32()).to_bits();
                        }
                    }
                    row += rows;
                }
                stage.rows.write(&vec![0xee; row_bytes]);
                stage.rows.write(&bytes);
                stage.client.write(&vec![0xee; 2 * row_bytes]);
                stage.client.write(&bytes);
                stage.ids.write(&bytes_of(&step.ids));
                stage.weights.write(&bytes_of(&step.weights));
                stage.segments.write(&bytes_of(&segments));
                stage.signals.write(&[0; SIGNAL_BYTES]);
                let raised = if rank == 0 { raised } else { 0 };
                let uniform = segments.iter().all(|s| s.dtype == segments[0].dtype);
                stage.request.write(&bytes_of(&[StepRequest {
                    step: number,
                    tokens: step.tokens as u32,
                    layer: layer as u32,
                    given_routing: 1,
                    out_dtype: if uniform { segments.first().map_or(3, |s| s.dtype) } else { 3 },
                    segments: segments.len() as u32,
                    raises: raised as u32,
                    direct: 0,
                    reserved: [0; 3],
                    raise: raises(stage.signals.address(), number, raised).0,
                }]));
                layouts.push((segments, bytes));
            }
            graph.launch(&group.stream)?;
            for (rank, stage) in stages.iter().enumerate() {
                // SAFETY: the first word of the completion record, which the device stores with release.
                let done = unsafe { AtomicU64::from_ptr(stage.completion.host.cast::<u64>()) };
                let start = std::time::Instant::now();
                while done.load(Ordering::Acquire) != number {
                    if start.elapsed().as_secs() > 10 {
                        return Err(format!("case {case}, step {index}: rank {rank} never completed").into());
                    }
                    std::hint::spin_loop();
                }
                let word = |at: usize| {
                    let bytes = stage.completion.read(at + 4);
                    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
                };
                if word(8) != 0 {
                    return Err(format!("rank {rank}: {:?}", DeviceFault::decode(word(8))).into());
                }
                let raised = if rank == 0 { raised } else { 0 };
                if stage.signals.read(SIGNAL_BYTES) != raises(stage.signals.address(), number, raised).1 {
                    return Err(
                        format!("case {case}, step {index}, rank {rank}: {raised} words to raise").into()
                    );
                }
                let expected = expect(&shape, &seen, rank as u32);
                let counts = (word(12) as usize, word(16) as usize);
                if counts != (expected.arrived.len(), expected.row_index.len()) {
                    return Err(format!("rank {rank}: received and assignments are {counts:?}").into());
                }
                // The expected staging: results in the places of their tokens, everything else unchanged.
                let (segments, mut wanted) = layouts[rank].clone();
                let mut wanted_client = wanted.clone();
                wanted_client.resize(2 * row_bytes, 0xee);
                for segment in &segments {
                    let values = &expected.out[segment.first_row as usize * h..][..segment.rows as usize * h];
                    let answer: Vec<u8> = match segment.dtype {
                        1 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
                        2 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
                        _ => values.iter().flat_map(|&v| v.to_le_bytes()).collect(),
                    };
                    let client = &mut wanted_client[..];
                    let (place, at) = match segment.memory {
                        0 => (&mut wanted[..], segment.byte_offset),
                        _ => (client, segment.output_offset - stage.client.address()),
                    };
                    place[at as usize..][..answer.len()].copy_from_slice(&answer);
                }
                if stage.client.read(2 * row_bytes) != wanted_client {
                    return Err(format!(
                        "case {case}, step {index}, rank {rank}: the client's memory differs"
                    )
                    .into());
                }
                let found = stage.rows.read(row_bytes);
                wanted.resize(found.len(), 0xee);
                if let Some(at) = found.iter().zip(&wanted).position(|(a, b)| a != b) {
                    return Err(format!(
                        "case {case}, step {index}, rank {rank}: byte {at} of staging, {shape:?}, {segments:?}"
                    )
                    .into());
                }
                let ids = bytes_of(&steps[rank].ids);
                if stage.ids_out.read(ids.len()) != ids {
                    return Err(
                        format!("case {case}, step {index}, rank {rank}: returned routing differs").into()
                    );
                }
                let (first, last) = shape.expert_range(rank as u32);
                let is_local = |cell: usize| (first..last).contains(&((cell % STRIDE) as u32));
                let own = counted.iter().enumerate().map(|(at, &rows)| if is_local(at) { rows } else { 0 });
                if stage.row_counts_host.read(LAYERS * STRIDE * 8) != bytes_of(&own.collect::<Vec<_>>()) {
                    return Err(format!("case {case}, step {index}, rank {rank}: row counts differ").into());
                }
                let weights = bytes_of(&steps[rank].weights);
                if stage.weights_out.read(weights.len()) != weights {
                    return Err(
                        format!("case {case}, step {index}, rank {rank}: returned weights differ").into()
                    );
                }
            }
            steps_run += 1;
        }
        group.stream.synchronize()?;
    }
    println!("staging: {steps_run} replayed steps came back bitwise right");
    Ok(())
}
