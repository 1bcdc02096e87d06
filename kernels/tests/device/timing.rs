//! Times dispatch and combine in replayed graphs, with different routing in every exchange of the graph.

use std::time::Instant;

use expertd_kernels::device::{Buffer, Device, Graph, Stream};
use expertd_kernels::launch;
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{CombineParams, DispatchParams, SlotState};
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};

use crate::exchange::{Loopback, Member, most_blocks};
use crate::placed::Placed;
use crate::random::{Random, Routing, choices};
use crate::{Options, Outcome};

/// Exchanges in one graph.
const PAIRS: usize = 32;

/// One timed configuration: the graph, and the buffers that it uses.
pub struct Timed {
    pub graph: Graph,
    _ids: Vec<Buffer<i32>>,
}

/// Captures `PAIRS` exchanges of `tokens` rows per rank. `stages` selects the kernels: 1 dispatch, 2 combine, 3 both.
pub fn capture(
    device: &Device,
    stream: &Stream,
    shape: &Shape,
    members: &[Member],
    tokens: u32,
    blocks: (u32, u32),
    seed: u64,
) -> Result<Timed, Box<dyn std::error::Error>> {
    let mut keep = Vec::new();
    let mut sets: Vec<(Vec<DispatchParams>, Vec<CombineParams>)> = Vec::new();
    for set in 0..8 {
        let (mut dispatch, mut combine) = (Vec::new(), Vec::new());
        for member in members {
            let mut random = Random(seed + 1000 * set + u64::from(member.rank));
            let ids = choices(&mut random, shape, Routing::Uniform, tokens as usize);
            let ids = Buffer::from_slice(device, &ids)?;
            let mut d = member.buffers.dispatch(member.group);
            let mut c = member.buffers.combine(member.group, 0);
            d.topk_ids = ids.address();
            c.topk_ids = ids.address();
            dispatch.push(d);
            combine.push(c);
            keep.push(ids);
        }
        sets.push((dispatch, combine));
    }
    for member in members {
        member.buffers.topk_weights.write(&vec![1.0; (tokens * shape.top_k) as usize])?;
        let mut state: SlotState = member.buffers.state.read()?[0];
        state.tokens = tokens;
        state.layer = member.layer;
        state.out_dtype = 1;
        member.buffers.state.write(&[state])?;
    }
    let record = |count: usize| -> Outcome {
        for pair in 0..count {
            let (dispatch, combine) = &sets[pair % sets.len()];
            // SAFETY: all addresses are of live buffers; the ids live as long as the graph.
            unsafe {
                launch::dispatch(dispatch, blocks.0, stream.raw())?;
                launch::combine(combine, blocks.1, stream.raw())?;
            }
        }
        Ok(())
    };
    record(2)?;
    stream.synchronize()?;
    let mut failed = None;
    let graph = stream.capture(|| {
        record(PAIRS).map_err(|error| {
            failed = Some(error.to_string());
            expertd_kernels::device::DeviceError::NoDriver
        })
    });
    if let Some(failed) = failed {
        return Err(failed.into());
    }
    Ok(Timed { graph: graph?, _ids: keep })
}

/// Microseconds per exchange: median over replays, and the last exchange's phases from device stamps.
pub fn measure(
    stream: &Stream,
    timed: &Timed,
    member: &Member,
    tokens: u32,
) -> Result<(f64, f64, [f64; 3]), Box<dyn std::error::Error>> {
    timed.graph.launch(stream)?;
    stream.synchronize()?;
    // The number is equal on every rank. Large steps vary less, so they need fewer repetitions.
    let replays = if tokens >= 512 { 7 } else { 31 };
    let mut times = Vec::new();
    for _ in 0..replays {
        let start = Instant::now();
        timed.graph.launch(stream)?;
        stream.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / PAIRS as f64);
    }
    times.sort_by(f64::total_cmp);
    let state = member.buffers.state.read()?[0];
    if state.error != 0 {
        return Err(format!("error word {:#x}", state.error).into());
    }
    let span = |a: u64, b: u64| b.wrapping_sub(a) as f64 / 1000.0;
    // Durations: dispatch until rows have arrived, dispatch until they are listed, combine.
    let phases = [
        span(state.begin_ns[3], state.end_ns[3]),
        span(state.begin_ns[3], state.end_ns[2]),
        span(state.begin_ns[5], state.end_ns[5]),
    ];
    Ok((times[times.len() / 2], times[0], phases))
}

pub fn header() {
    println!(
        "   H    E  k     T  blocks chunk    median      best   dispatch  list  combine  (us per exchange)"
    );
}

pub fn row(shape: &Shape, tokens: u32, blocks: (u32, u32), chunk: u32, result: (f64, f64, [f64; 3])) {
    let (median, best, [dispatch, list, combine]) = result;
    println!(
        "{:5} {:4} {:2} {tokens:5}  {:3} {:3} {chunk:3}  {median:9.2} {best:9.2}  {dispatch:8.1} {list:6.1} {combine:8.1}",
        shape.hidden, shape.experts, shape.top_k, blocks.0, blocks.1
    );
}

pub const SHAPES: [(u32, u32, u32); 3] = [(2048, 128, 8), (7168, 256, 8), (4096, 8, 2)];

pub fn loopback(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    // A rank alone needs another kernel between dispatch and combine.
    let ranks = (options.number("ranks", 4) as u32).max(2);
    let most = most_blocks(&device, ranks)?;
    header();
    for (hidden, experts, top_k) in SHAPES {
        for tokens in [1, 8, 32, 128, 512] {
            let shape = Shape { ranks, max_tokens: tokens, hidden, top_k, experts };
            let mut group = Loopback::new(&device, shape, 0, 0)?;
            // Ranges of equal length have the same physical experts with and without a table.
            let placed = Placed::contiguous(&device, &shape)?;
            if options.number("placed", 0) != 0 && placed.shape(&shape) == shape {
                placed.apply(&mut group);
            }
            let blocks = (dispatch_blocks(&shape, tokens, most), combine_blocks(&shape, tokens, most));
            let timed = capture(&device, &group.stream, &shape, &group.members, tokens, blocks, 3)?;
            row(&shape, tokens, blocks, 0, measure(&group.stream, &timed, &group.members[0], tokens)?);
        }
    }
    Ok(())
}
