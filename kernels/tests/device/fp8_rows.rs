//! Dispatch with FP8 rows: what ranks send, and what a rank alone leaves in its window, against the reference of docs/models.md.

use expertd_compute::experts::reference::quantised;
use expertd_kernels::device::{Device, read_device};
use expertd_kernels::launch;
use expertd_kernels::layout::{Shape, WindowLayout};
use expertd_kernels::params::{DeviceFault, DispatchParams, fp8_row_bytes};
use expertd_kernels::slot::dispatch_blocks;
use half::bf16;

use crate::exchange::{Loopback, Member, expect, most_blocks};
use crate::random::{Random, RankStep, step};
use crate::{Options, Outcome};

/// The value of an e4m3 code that is no NaN.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2.0_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if code & 128 == 0 { magnitude } else { -magnitude }
}

/// A row of a window: its codes times their scales.
fn values(row: &[u8], hidden: usize) -> Vec<f32> {
    let scale = |group: usize| {
        let at = hidden + group * 4;
        f32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]])
    };
    (0..hidden).map(|i| e4m3(row[i]) * scale(i / 128)).collect()
}

fn verify(member: &Member, shape: &Shape, steps: &[RankStep], power_of_two: bool) -> Outcome {
    let (rank, b) = (member.rank, &member.buffers);
    let expected = expect(shape, steps, rank);
    let state = b.state.read()?[0];
    if state.error != 0 {
        return Err(format!("rank {rank}: {:?}", DeviceFault::decode(state.error)).into());
    }
    let count = expected.row_index.len();
    if b.expert_offsets.read()?[..expected.offsets.len()] != expected.offsets[..]
        || b.row_index.read()?[..count] != expected.row_index[..]
        || b.row_weight.read()?[..count] != expected.row_weight[..]
    {
        return Err(format!("rank {rank}: the lists differ").into());
    }
    let hidden = shape.hidden as usize;
    let row_bytes = fp8_row_bytes(hidden);
    let mut window = vec![0_u8; shape.window_rows() * row_bytes];
    // SAFETY: the rows of this rank's own window, while no step runs.
    unsafe { read_device(member.window + WindowLayout::new(shape).0.rows, &mut window)? };
    // What a row becomes that is not finite is not defined.
    let is_finite = |row: &[u16]| row.iter().all(|bits| bf16::from_bits(*bits).is_finite());
    for (index, row) in expected.arrived.iter().filter(|(_, row)| is_finite(row)) {
        let wide: Vec<f64> = row.iter().map(|bits| f64::from(bf16::from_bits(*bits).to_f32())).collect();
        let wanted: Vec<f32> = quantised(&wide, power_of_two).into_iter().map(|x| x as f32).collect();
        if values(&window[index * row_bytes..][..row_bytes], hidden) != wanted {
            return Err(format!("rank {rank}: row {index} has wrong contents").into());
        }
    }
    Ok(())
}

pub fn check(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    let mut random = Random(options.number("seed", 3));
    let cases = options.number("cases", 24);
    let mut rows = 0;
    for case in 0..cases {
        let ranks = random.pick(&[1, 1, 1, 2, 4]);
        let experts = random.pick(&[4, 8, 60, 128, 257]);
        let shape = Shape {
            ranks,
            max_tokens: 1 + random.below(options.number("tokens", 900)) as u32,
            hidden: random.pick(&[64, 192, 512, 2048, 2880]),
            top_k: random.pick(&[1, 4, 8]).min(experts),
            experts,
        };
        let group = Loopback::new(&device, shape, 0, 0)?;
        let most = most_blocks(&device, ranks)?;
        for index in 0..3 {
            let steps = step(&mut random, &shape);
            let power_of_two = random.below(2) == 1;
            for (member, step) in group.members.iter().zip(&steps) {
                member.load(&shape, step, 1, true)?;
            }
            let blocks = match random.below(2) {
                0 => dispatch_blocks(&shape, shape.max_tokens, most),
                _ => 2 + random.below(u64::from(most) - 1) as u32,
            };
            let dispatch: Vec<_> = group
                .members
                .iter()
                .map(|m| DispatchParams {
                    fp8_rows: 1,
                    power_of_two_scales: u32::from(power_of_two),
                    ..m.buffers.dispatch(m.group)
                })
                .collect();
            let combine: Vec<_> = group.members.iter().map(|m| m.buffers.combine(m.group, 0)).collect();
            // SAFETY: all addresses are of live buffers of this group.
            unsafe { launch::dispatch(&dispatch, blocks, group.stream.raw())? };
            group.stream.synchronize()?;
            for member in &group.members {
                verify(member, &shape, &steps, power_of_two).map_err(|error| {
                    format!("case {case}, step {index}, {shape:?}, blocks {blocks}, power of two {power_of_two}: {error}")
                })?;
            }
            rows += steps.iter().map(|step| step.tokens).sum::<usize>();
            // Combine advances the sequence.
            // SAFETY: as above.
            unsafe { launch::combine(&combine, most, group.stream.raw())? };
            group.stream.synchronize()?;
        }
    }
    println!("fp8_rows: {rows} rows in {cases} groups are bitwise right");
    Ok(())
}
