//! The portable kernels beside those for Hopper, on the same packed weights: equal bits of the kernel for few rows, and times of both.

use std::time::Duration;

use expertd_kernels::device::{Device, Stream};
use expertd_kernels::event::Event;
use expertd_kernels::experts;
use expertd_kernels::path::KernelPath;
use half::bf16;

use super::launch::{FEW_ROWS, Launch, Loaded, Step, load};
use super::mlp::{Case, Expert};
use super::{Begun, PLAIN, begin};
use crate::{Options, Outcome};

const PATHS: [KernelPath; 2] = [KernelPath::Hopper, KernelPath::Portable];

/// Runs `work` with a path's kernels, then goes back to the one that was chosen.
fn with<T>(path: KernelPath, work: impl FnOnce() -> T) -> T {
    let before = KernelPath::chosen();
    path.choose();
    let result = work();
    before.choose();
    result
}

/// Sets up both paths; `None` where the card has only one of them.
fn both(options: &Options) -> Result<Option<Begun>, Box<dyn std::error::Error>> {
    if Device::open(0)?.capability()? != (9, 0) {
        println!("both paths: not on this card");
        return Ok(None);
    }
    with(KernelPath::Hopper, experts::setup)?;
    let (device, random, formats) = with(KernelPath::Portable, || begin(options))?;
    Ok(Some((device, random, formats)))
}

/// The kernels for few rows of both paths, in every format and for many counts.
pub fn same_bits(options: &Options) -> Outcome {
    let Some((device, mut random, formats)) = both(options)? else { return Ok(()) };
    for format in formats {
        for (hidden, inter, weight_on_input) in [(192, 320, false), (1024, 384, true), (2880, 2880, false)] {
            let case = Case {
                format,
                hidden,
                inter,
                activation: experts::SWIGLU_OAI,
                biases: true,
                weight_on_input,
                ..PLAIN
            };
            let all: Vec<Expert> = (0..4).map(|_| case.draw(&mut random)).collect();
            let loaded = load(&device, &case, &all)?;
            for counts in [[1, 0, 0, 0], [0, 3, 0, 1], [8, 9, 0, 17], [2, 5, 7, 40]] {
                let step = Step::draw(&mut random, hidden, &counts);
                let [one, other] =
                    PATHS.map(|path| with(path, || step.run(&device, &case, &loaded, FEW_ROWS)));
                let bits = |y: Vec<bf16>| y.into_iter().map(bf16::to_bits).collect::<Vec<u16>>();
                let (one, other) = (bits(one?), bits(other?));
                if let Some(at) = (0..one.len()).find(|&at| one[at] != other[at]) {
                    return Err(format!(
                        "same bits: format {format}, {hidden} x {inter}, counts {counts:?}: element {at} is {:#06x} and {:#06x}",
                        one[at], other[at]
                    )
                    .into());
                }
            }
        }
        println!("same bits: format {format}: few rows give the same bits on both paths");
    }
    Ok(())
}

/// Median time of a launch, where several take turns so that their weights are not in L2.
fn time(
    device: &Device,
    stream: &Stream,
    launches: &[Launch],
    rounds: usize,
) -> Result<Duration, Box<dyn std::error::Error>> {
    let mut times = Vec::new();
    let (begin, end) = (Event::new(device)?, Event::new(device)?);
    for round in 0..=rounds {
        begin.record(stream)?;
        for launch in launches {
            launch.enqueue_on(stream)?;
        }
        end.record(stream)?;
        stream.synchronize()?;
        if round > 0 {
            times.push(end.since(&begin)? / launches.len() as u32);
        }
    }
    times.sort();
    Ok(times[times.len() / 2])
}

/// Times of both paths for Qwen3-30B-A3B's experts, 128 of 2048 x 768 of which a row has eight.
pub fn rates(options: &Options) -> Outcome {
    const EXPERTS: usize = 128;
    const TOP_K: usize = 8;
    let Some((device, mut random, formats)) = both(options)? else { return Ok(()) };
    let stream = device.stream()?;
    for format in formats {
        let case = Case { format, hidden: 2048, inter: 768, ..PLAIN };
        let all: Vec<Expert> = (0..2).map(|_| case.draw(&mut random)).collect();
        let loaded = Loaded::repeated(&device, &case, &all, EXPERTS)?;
        for rows in [1, 8, 32, 128, 1024, 4096] {
            let mut step = || {
                let mut counts = vec![0; EXPERTS];
                for _ in 0..rows {
                    let mut left: Vec<usize> = (0..EXPERTS).collect();
                    for _ in 0..TOP_K {
                        counts[left.swap_remove(random.below(left.len() as u64) as usize)] += 1;
                    }
                }
                Step::draw(&mut random, case.hidden, &counts)
            };
            let steps: Vec<Step> = (0..if rows > 128 { 1 } else { 6 }).map(|_| step()).collect();
            let tiles = if rows <= 32 { FEW_ROWS } else { [0, 0] };
            let mut found = Vec::new();
            for path in PATHS {
                let launches = steps.iter().map(|step| Launch::new(&device, step, &case, &loaded, tiles));
                let launches = launches.collect::<Result<Vec<_>, _>>()?;
                found.push(with(path, || time(&device, &stream, &launches, 15))?);
            }
            let flops = (rows * TOP_K * 3 * 2 * case.hidden * case.inter) as f64;
            let rate = |time: &Duration| flops / time.as_secs_f64() / 1e12;
            let micros = |time: &Duration| time.as_secs_f64() * 1e6;
            println!(
                "rates: format {format}, {rows} rows: Hopper {:.1} us ({:.0} TFLOP/s), portable {:.1} us ({:.0} TFLOP/s), ratio {:.2}",
                micros(&found[0]),
                rate(&found[0]),
                micros(&found[1]),
                rate(&found[1]),
                found[1].as_secs_f64() / found[0].as_secs_f64()
            );
        }
    }
    Ok(())
}
