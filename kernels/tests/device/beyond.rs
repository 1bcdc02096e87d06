//! An exchange whose expert outputs lie beyond 2^32 bytes and 2^31 elements.

use expertd_kernels::device::Device;
use expertd_kernels::layout::Shape;
use expertd_kernels::slot::{combine_blocks, dispatch_blocks};
use half::bf16;

use crate::exchange::{Loopback, expected_row, most_blocks};
use crate::random::{Random, RankStep, rows};
use crate::{Options, Outcome};

/// Rows that differ; tokens repeat them.
const ROWS: usize = 512;

/// All tokens of two ranks choose the eight experts of rank 0, which has 328,000 rows of 7168 elements.
pub fn check(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    let mut random = Random(options.number("seed", 41));
    let shape = Shape { ranks: 2, max_tokens: 20_500, hidden: 7168, top_k: 8, experts: 16 };
    let (tokens, h, k) = (shape.max_tokens as usize, shape.hidden as usize, shape.top_k as usize);
    assert!(2 * tokens * k * h > 1 << 31);
    let some = rows(&mut random, ROWS * h);
    let mut step = || RankStep {
        tokens,
        rows: (0..tokens).flat_map(|token| &some[token % ROWS * h..][..h]).copied().collect(),
        ids: (0..tokens * k).map(|entry| ((entry + entry / k) % k) as i32).collect(),
        weights: (0..tokens * k).map(|_| random.unit() * 2.0 - 0.5).collect(),
    };
    let steps = [step(), step()];
    let group = Loopback::new(&device, shape, 0, 0)?;
    for (member, step) in group.members.iter().zip(&steps) {
        member.load(&shape, step, 1, true)?;
    }
    let most = most_blocks(&device, shape.ranks)?;
    let blocks =
        (dispatch_blocks(&shape, shape.max_tokens, most), combine_blocks(&shape, shape.max_tokens, most));
    group.launch(blocks, &group.members)?;
    group.stream.synchronize()?;
    for (member, step) in group.members.iter().zip(&steps) {
        let error = member.buffers.state.read()?[0].error;
        if error != 0 {
            return Err(format!("rank {}: error word {error:#x}", member.rank).into());
        }
        let out = member.buffers.out.read()?;
        let sample = (0..200).map(|_| random.below(tokens as u64) as usize).chain([0, tokens - 1]);
        for token in sample.collect::<Vec<_>>() {
            for (column, wanted) in expected_row(&shape, step, token).into_iter().enumerate() {
                let at = token * h + column;
                let found = (out[at / 2] >> (16 * (at % 2))) as u16;
                if found != bf16::from_f32(wanted).to_bits() {
                    return Err(format!(
                        "rank {}, token {token}, column {column}: {found:#06x} for {wanted}",
                        member.rank
                    )
                    .into());
                }
            }
        }
    }
    println!("beyond: an exchange of {} rows of {h} elements at one rank is bitwise right", 2 * tokens * k);
    Ok(())
}
