//! Sizes at which the small checks say nothing: the shapes of released models, offsets beyond 2^32 bytes and 2^31 elements, and rows that
//! crowd on a few of many experts.

use expertd_kernels::device::Device;
use expertd_kernels::experts;
use expertd_kernels::path::KernelPath;
use half::bf16;

use super::launch::{DRAWN_TILES, Launch, Step, load};
use super::mlp::{Case, Expert};
use super::{PLAIN, begin, compare, compare_row, expected, expected_of, in_parallel, kernels, tolerance};
use crate::random::Random;
use crate::{Options, Outcome};

/// Runs all kernels, compares some assignments with the reference, and checks that every element was written.
fn sampled(
    device: &Device,
    case: &Case,
    all: &[Expert],
    step: &Step,
    sample: &[usize],
) -> Result<f64, Box<dyn std::error::Error>> {
    let loaded = load(device, case, all)?;
    let wanted = expected_of(case, all, step, sample);
    let mut worst = 0.0_f64;
    for &tiles in kernels(case.format) {
        let y = step.run(device, case, &loaded, tiles)?;
        let of = |at: usize| compare_row(sample[at], &wanted[at], &y, tolerance(case.format));
        let (good, bad): (Vec<_>, Vec<_>) =
            in_parallel(sample.len(), of).into_iter().partition(Result::is_ok);
        let bad: Vec<String> = bad.into_iter().filter_map(Result::err).collect();
        if !bad.is_empty() {
            return Err(format!("format {}, tiles {tiles:?}: {}", case.format, bad.join("; ")).into());
        }
        worst = good.into_iter().flatten().fold(worst, f64::max);
        if let Some(at) = y.iter().position(|value| value.is_nan()) {
            return Err(
                format!("format {}, tiles {tiles:?}: element {at} was not written", case.format).into()
            );
        }
    }
    Ok(worst)
}

/// A layer of a released model in each format.
pub fn full(options: &Options) -> Outcome {
    let (device, mut random, formats) = begin(options)?;
    for format in formats {
        let (model, hidden, inter) = match format {
            experts::BF16 => ("Qwen3-30B", 2048, 768),
            experts::MXFP4 => ("gpt-oss-120b", 2880, 2880),
            experts::W4A8 => ("gpt-oss-120b", 2880, 2944), // as loaders pad it
            _ => ("DeepSeek-V3", 7168, 2048),
        };
        let oai = matches!(format, experts::MXFP4 | experts::W4A8);
        let activation = if oai { experts::SWIGLU_OAI } else { experts::SWIGLU };
        let block_scales = format == experts::W8A8;
        let case = Case { format, hidden, inter, activation, biases: oai, block_scales, ..PLAIN };
        let all: Vec<Expert> = (0..4).map(|_| case.draw(&mut random)).collect();
        let step = Step::draw(&mut random, hidden, &[9, 0, 300, 70]);
        let total = step.index.len();
        let sample: Vec<usize> =
            [0, 8, 9, 308, 309, total - 1].into_iter().chain((20..total).step_by(37)).collect();
        let worst = sampled(&device, &case, &all, &step, &sample)?;
        println!(
            "full: {model}, format {format}, {} of {total} rows: largest error {worst:.1e}",
            sample.len()
        );
    }
    Ok(())
}

/// Rows of 7168 elements, of which 2^31 elements, 2^32 bytes, are 299,593 rows.
pub fn wide(options: &Options) -> Outcome {
    const ASSIGNMENTS: usize = 300_000;
    const ROWS: usize = 512;
    let (device, mut random, formats) = begin(options)?;
    for format in formats {
        let case = Case { format, hidden: 7168, inter: 128, block_scales: format == experts::W8A8, ..PLAIN };
        let all: Vec<Expert> = (0..2).map(|_| case.draw(&mut random)).collect();
        let step = Step {
            counts: vec![ASSIGNMENTS / 2; 2],
            index: (0..ASSIGNMENTS).map(|_| random.below(ROWS as u64) as i32).collect(),
            weights: (0..ASSIGNMENTS).map(|_| 0.05 + random.unit()).collect(),
            x: (0..ROWS * case.hidden).map(|_| bf16::from_f32(random.unit() * 3.4 - 1.7)).collect(),
        };
        let boundary = (1_usize << 31) / case.hidden;
        let sample =
            [0, ASSIGNMENTS / 2 - 1, ASSIGNMENTS / 2, boundary - 1, boundary, boundary + 1, ASSIGNMENTS - 1];
        let sample: Vec<usize> =
            sample.into_iter().chain((0..20).map(|_| random.below(ASSIGNMENTS as u64) as usize)).collect();
        let worst = sampled(&device, &case, &all, &step, &sample)?;
        println!(
            "wide: format {format}, {ASSIGNMENTS} rows of {} elements: largest error {worst:.1e}",
            case.hidden
        );
    }
    Ok(())
}

/// 128 rows on each of four among 128 experts, a mean of four.
pub fn skew(options: &Options) -> Outcome {
    let (device, mut random, formats) = begin(options)?;
    for format in formats {
        let case = Case { format, hidden: 192, inter: 128, ..PLAIN };
        let all: Vec<Expert> = (0..128).map(|_| case.draw(&mut random)).collect();
        let mut counts = [0; 128];
        for expert in [0, 1, 77, 127] {
            counts[expert] = 128;
        }
        let step = Step::draw(&mut random, case.hidden, &counts);
        let (loaded, wanted) = (load(&device, &case, &all)?, expected(&case, &all, &step));
        let mut worst = 0.0_f64;
        for &tiles in kernels(format) {
            let y = step.run(&device, &case, &loaded, tiles)?;
            worst = worst.max(
                compare(&wanted, &y, tolerance(format))
                    .map_err(|error| format!("format {format}, tiles {tiles:?}: {error}"))?,
            );
        }
        println!("skew: format {format}: largest error {worst:.1e}");
        if KernelPath::chosen() == KernelPath::Portable {
            drawn(&device, &mut random, format)?;
        }
        behind_others(&device, &mut random, format)?;
    }
    Ok(())
}

/// Skewed counts on few blocks, which draw most of their tiles. Rows on one expert and on all take about the same number of tiles.
fn drawn(device: &Device, random: &mut Random, format: i32) -> Outcome {
    // The last strip of both matrices is not full. More panels than copies are ahead, and fewer.
    for (hidden, inter) in [(448, 320), (320, 64)] {
        let case = Case { format, hidden, inter, biases: true, ..PLAIN };
        let all: Vec<Expert> = (0..8).map(|_| case.draw(random)).collect();
        let loaded = load(device, &case, &all)?;
        let mut worst = 0.0_f64;
        for counts in
            [[0, 700, 1, 0, 45, 333, 16, 2], [1200, 0, 0, 0, 0, 0, 0, 9], [1, 1, 1, 1, 1, 1, 1, 900]]
        {
            let step = Step::draw(random, hidden, &counts);
            let wanted = expected(&case, &all, &step);
            // Most tokens of a tile, and tiles with which a block begins at most. Strips have 256 weight rows.
            for (tiles, most, begun) in [([0, 0], 160, 5), ([0, 48], 48, 8)] {
                let token_tiles: usize = counts.iter().map(|count| count.div_ceil(most)).sum();
                let least = token_tiles * hidden.div_ceil(256);
                for blocks in [1, 2, 3].into_iter().filter(|_| format != experts::BF16 || tiles == [0, 0]) {
                    let mut launch = Launch::new(device, &step, &case, &loaded, tiles)?;
                    launch.params.blocks = blocks;
                    let found = compare(&wanted, &launch.run()?, tolerance(format)).map_err(|error| {
                        format!("drawn: format {format}, {counts:?}, {tiles:?}, {blocks} blocks: {error}")
                    })?;
                    worst = worst.max(found);
                    let drawn = launch.state.read()?[DRAWN_TILES[1]] as usize;
                    if drawn + begun * (blocks as usize) < least {
                        return Err(format!("drawn: {blocks} blocks drew {drawn} of {least} tiles").into());
                    }
                }
            }
        }
        println!("drawn: format {format}, {hidden} x {inter}: largest error {worst:.1e}");
    }
    Ok(())
}

/// Experts behind others in a list of assignments, as copies of experts are: their offsets do not begin at 0.
fn behind_others(device: &Device, random: &mut Random, format: i32) -> Outcome {
    const COUNTS: [usize; 4] = [5, 200, 0, 17];
    let case = Case { format, hidden: 192, inter: 128, ..PLAIN };
    let all: Vec<Expert> = (0..COUNTS.len()).map(|_| case.draw(random)).collect();
    let loaded = load(device, &case, &all[1..])?;
    let step = Step::draw(random, case.hidden, &COUNTS);
    let assignments: Vec<usize> = (COUNTS[0]..step.index.len()).collect();
    let wanted = expected_of(&case, &all, &step, &assignments);
    for &tiles in kernels(format) {
        let mut launch = Launch::new(device, &step, &case, &loaded, tiles)?;
        launch.params.expert_offsets += size_of::<i32>() as u64;
        launch.params.experts -= 1;
        let y = launch.run()?;
        if y[..COUNTS[0] * case.hidden].iter().any(|value| value.to_bits() != 0xffff) {
            return Err(format!(
                "behind others: format {format}, tiles {tiles:?}: written before the first row"
            )
            .into());
        }
        for (&assignment, wanted) in assignments.iter().zip(&wanted) {
            compare_row(assignment, wanted, &y, tolerance(format))
                .map_err(|error| format!("behind others: format {format}, tiles {tiles:?}: {error}"))?;
        }
    }
    Ok(())
}

/// Random rows for the other files of this module.
pub(super) fn draw(
    random: &mut Random,
    case: &Case,
    counts: &[usize],
    experts: usize,
) -> (Vec<Expert>, Step) {
    let all = (0..experts).map(|_| case.draw(random)).collect();
    (all, Step::draw(random, case.hidden, counts))
}
