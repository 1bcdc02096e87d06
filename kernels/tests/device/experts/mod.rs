//! Compares the expert kernel, in every weight format, with a plain MLP in f64 on the host, which decodes the checkpoint's bytes by
//! the definitions of the formats.

mod launch;
mod mlp;
pub mod paths;
pub mod rows;
pub mod sizes;
mod stored;
mod w4a8;
pub mod word;

use expertd_kernels::device::Device;
use expertd_kernels::experts;
use expertd_kernels::path::KernelPath;
use half::{bf16, f16};

use self::launch::{FEW_ROWS, MANY_ROWS, Step, load};
use self::mlp::{Case, Expert, Range};
use crate::random::Random;
use crate::{Options, Outcome};

/// Largest relative L2 error of a row.
const TOLERANCE: f64 = 1e-2;
/// The same of FP8 products, against a reference that quantises, too.
const TOLERANCE_FP8: f64 = 2e-2;
/// The same of INT4, against the better of two references ([`rounds_elements`]). A kernel that also rounds scales is further from both.
const TOLERANCE_INT4: f64 = 7e-3;

fn tolerance(format: i32) -> f64 {
    match format {
        _ if is_fp8(format) => TOLERANCE_FP8,
        _ if is_int4(format) => TOLERANCE_INT4,
        _ => TOLERANCE,
    }
}

/// Whether rows and h are quantised to FP8.
fn is_fp8(format: i32) -> bool {
    matches!(format, experts::W8A8 | experts::W4A8)
}

fn is_int4(format: i32) -> bool {
    matches!(format, experts::INT4 | experts::INT4_ZEROS)
}

/// Whether some tiles multiply elements by their scales and round each product to bf16 once, while others have its value: rows are
/// compared with a reference of each kind.
fn rounds_elements(format: i32) -> bool {
    is_int4(format) || format == experts::FP8 && KernelPath::chosen() == KernelPath::Portable
}

/// Takes the changes out of `error` that make it smaller, the best one first. Each is what an element of h contributes that the kernel
/// may have rounded to the neighbouring code.
fn without_undecided(error: &mut [f64], mut changes: Vec<Vec<f64>>) {
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    loop {
        let gains = changes.iter().map(|change| 2.0 * dot(error, change) - dot(change, change));
        let best = gains.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
        let Some((best, _)) = best.filter(|(_, gain)| *gain > 0.0) else { return };
        let change = changes.swap_remove(best);
        error.iter_mut().zip(change).for_each(|(error, change)| *error -= change);
    }
}

/// What the outputs of one assignment should be.
struct Expected<'a> {
    expert: usize,
    y: Vec<f64>,
    /// The same with [`Expert::rounded`], of formats that [`rounds_elements`] names.
    rounded: Option<Vec<f64>>,
    /// [`Range::undecided`], of FP8 products.
    undecided: Vec<Vec<f64>>,
    /// Of FP8 products.
    range: Option<Range<'a>>,
}

fn expected<'a>(case: &Case, all: &'a [Expert], step: &Step) -> Vec<Expected<'a>> {
    let assignments: Vec<usize> = (0..step.index.len()).collect();
    expected_of(case, all, step, &assignments)
}

/// The same for some assignments.
fn expected_of<'a>(case: &Case, all: &'a [Expert], step: &Step, assignments: &[usize]) -> Vec<Expected<'a>> {
    let experts =
        step.counts.iter().enumerate().flat_map(|(expert, count)| std::iter::repeat_n(expert, *count));
    let experts: Vec<usize> = experts.collect();
    let rounded: Vec<Expert> =
        if rounds_elements(case.format) { all.iter().map(Expert::rounded).collect() } else { Vec::new() };
    let of = |at: usize| {
        let assignment = assignments[at];
        let expert = experts[assignment];
        let (x, weight) = (step.row(assignment, case.hidden), step.weights[assignment]);
        let (y, _) = case.reference(&all[expert], &x, weight);
        let rounded = rounded.get(expert).map(|expert| case.reference(expert, &x, weight).0);
        let range = is_fp8(case.format).then(|| case.range(&all[expert], &x, weight));
        let undecided = range.as_ref().map(Range::undecided).unwrap_or_default();
        Expected { expert, y, rounded, undecided, range }
    };
    in_parallel(assignments.len(), of)
}

/// `of` all numbers below `count`, in order.
fn in_parallel<T: Send>(count: usize, of: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = count.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let of = &of;
        let parts: Vec<_> = (0..count)
            .step_by(each)
            .map(|from| scope.spawn(move || (from..count.min(from + each)).map(of).collect::<Vec<T>>()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().expect("a thread of the reference panicked")).collect()
    })
}

/// Compares all rows; returns the largest relative error.
fn compare(expected: &[Expected], y: &[bf16], tolerance: f64) -> Result<f64, String> {
    let of = |assignment: usize| compare_row(assignment, &expected[assignment], y, tolerance);
    in_parallel(expected.len(), of).into_iter().try_fold(0.0, |worst: f64, error| Ok(worst.max(error?)))
}

fn compare_row(assignment: usize, row: &Expected, y: &[bf16], tolerance: f64) -> Result<f64, String> {
    let found = &y[assignment * row.y.len()..][..row.y.len()];
    let mut relative = relative_error(&row.y, &row.undecided, found)
        .map_err(|error| format!("assignment {assignment} {error}"))?;
    if let Some(rounded) = &row.rounded {
        relative = relative.min(relative_error(rounded, &[], found).unwrap_or(f64::INFINITY));
    }
    // Rounding of sums may also decide the scale of a group of h, and with it many codes at once.
    if let Some(range) = row.range.as_ref().filter(|_| relative > tolerance) {
        for scales in range.scales() {
            let (y, undecided) = range.with_scales(&scales);
            relative = relative.min(relative_error(&y, &undecided, found).unwrap_or(f64::INFINITY));
        }
    }
    if relative > tolerance {
        let expert = row.expert;
        let wrong = wrong_features(&row.y, found, tolerance);
        return Err(format!(
            "assignment {assignment} of expert {expert}: relative error {relative:.2e}, {wrong}"
        ));
    }
    Ok(relative)
}

/// Which features of a row are wrong by more than `tolerance` of the row's root mean square.
fn wrong_features(wanted: &[f64], found: &[bf16], tolerance: f64) -> String {
    let size = (wanted.iter().map(|value| value.powi(2)).sum::<f64>() / wanted.len() as f64).sqrt();
    let is_wrong = |at: &usize| (found[*at].to_f64() - wanted[*at]).abs() > 4.0 * tolerance * size;
    let wrong: Vec<usize> = (0..wanted.len()).filter(is_wrong).collect();
    match (wrong.first(), wrong.last()) {
        (Some(first), Some(last)) => format!("{} of features {first} to {last}", wrong.len()),
        _ => "no feature by much".into(),
    }
}

/// The relative error of a row; an error if other elements are no numbers than in `wanted`.
fn relative_error(wanted: &[f64], undecided: &[Vec<f64>], found: &[bf16]) -> Result<f64, String> {
    let (mut errors, mut norm) = (Vec::with_capacity(wanted.len()), 0.0);
    for (feature, (want, got)) in wanted.iter().zip(found).enumerate() {
        if want.is_nan() != got.is_nan() {
            return Err(format!("feature {feature}: {got} for {want}"));
        }
        if !want.is_nan() {
            errors.push(got.to_f64() - want);
            norm += want.powi(2);
        }
    }
    without_undecided(&mut errors, undecided.to_vec());
    let error = errors.iter().map(|error| error.powi(2)).sum::<f64>();
    Ok(if norm == 0.0 { error } else { (error / norm).sqrt() })
}

/// The kernels of a format with the tiles that the device chooses.
fn kernels(format: i32) -> &'static [[i32; 2]] {
    match KernelPath::chosen() {
        KernelPath::Hopper if format == experts::W4A8 => &[[0, 0], MANY_ROWS, [experts::TILE_TOKEN_PAIRS, 0]],
        KernelPath::Hopper => &[[0, 0], FEW_ROWS],
        KernelPath::Portable => &[[0, 0], [0, 48], FEW_ROWS],
    }
}

/// Every tile shape of the format, `[tile_rows, tile_tokens]`, and the kernel for few rows.
fn shapes(case: &Case) -> Vec<[i32; 2]> {
    if KernelPath::chosen() == KernelPath::Portable {
        return kernels(case.format).to_vec();
    }
    let mut shapes = vec![[0, 0], [16, 32], [64, 64], [128, 128], [256, 128]];
    if case.format == experts::W8A8 {
        shapes = vec![[0, 0], [0, 32], [experts::TILE_TALL, 128], [256, 32], [256, 128]];
        if case.block_scales {
            shapes.extend([[experts::TILE_TOKEN_ROWS, 0], [experts::TILE_TOKEN_PAIRS, 0]]);
        }
    }
    if case.format == experts::W4A8 {
        let many = [MANY_ROWS, [experts::TILE_TOKEN_ROWS, 0], [experts::TILE_TOKEN_PAIRS, 0]];
        return [&[[0, 0], [0, 32], [0, 64], [experts::TILE_TALL, 128]], &many[..]].concat();
    }
    if case.format == experts::BF16 {
        shapes.extend([[experts::TILE_TALL, 128], [experts::TILE_TURNS, 32], [experts::TILE_TURNS, 128]]);
        shapes.extend([[experts::TILE_TOKEN_ROWS, 0], [experts::TILE_TOKEN_PAIRS, 0]]);
    }
    shapes.push(FEW_ROWS);
    shapes
}

/// Random weights, ragged counts, every tile shape.
fn ragged(device: &Device, random: &mut Random, case: &Case) -> Outcome {
    let all: Vec<Expert> = (0..4).map(|_| case.draw(random)).collect();
    let loaded = load(device, case, &all)?;
    let mut worst = 0.0_f64;
    let shapes = shapes(case);
    for counts in
        [[0, 0, 0, 0], [1, 0, 0, 0], [3, 0, 41, 9], [0, 0, 0, 150], [8, 17, 64, 33], [130, 0, 97, 460]]
    {
        let step = Step::draw(random, case.hidden, &counts);
        let expected = expected(case, &all, &step);
        let tolerance = tolerance(case.format);
        for &tiles in &shapes {
            let y = step.run(device, case, &loaded, tiles)?;
            let found = compare(&expected, &y, tolerance)
                .map_err(|e| format!("counts {counts:?} tiles {tiles:?}: {e}"))?;
            worst = worst.max(found);
            if step.run(device, case, &loaded, tiles)? != y && !y.iter().any(|v| v.is_nan()) {
                return Err(format!("counts {counts:?} tiles {tiles:?}: two runs differ").into());
            }
        }
    }
    println!(
        "experts format {} hidden {} inter {} activation {}: largest error {worst:.1e}",
        case.format, case.hidden, case.inter, case.activation
    );
    Ok(())
}

/// Codes and scales that are not numbers, zeros, extreme scales.
fn specials(device: &Device, random: &mut Random, case: &Case) -> Outcome {
    let mut all: Vec<Expert> = (0..4).map(|_| case.draw(random)).collect();
    let [first, second, third, fourth] = &mut all[..] else { unreachable!("four were made") };
    if case.format == experts::FP8 {
        let k = first.down.k;
        first.down.codes[5 * k + 3] = 0x7f;
        first.down.codes[17 * k + k - 1] = 0xff;
        second.down.codes.fill(0x80); // -0 everywhere
        second.down.codes[..k].fill(0x01); // a row of the smallest subnormal
        third.down.multipliers[0] = 1e20;
        third.down.multipliers[1] = 1e-30;
        third.gate.row_scales[7] = 0.0;
        fourth.up.codes[3 * fourth.up.k] = 0xff; // reaches every output
    } else if case.format == experts::NVFP4 {
        let groups = first.down.k / experts::NVFP4_GROUP;
        first.down.exponents[5 * groups] = 0x7f;
        first.down.exponents[17 * groups + groups - 1] = 0xff;
        second.down.exponents.fill(0x80); // -0 everywhere
        second.down.exponents[groups] = 0x01;
        // Every scale that is a number, each on all elements of a group.
        let scales = (0..=255_u8).filter(|code| code & 0x7f != 0x7f).cycle();
        third.down.exponents.iter_mut().zip(scales).for_each(|(to, scale)| *to = scale);
        third.gate.row_scales[7] = 0.0;
        third.up.row_scales[9] = 1e20;
        fourth.gate.exponents[3] = 0x7f; // reaches every output
    } else if is_int4(case.format) {
        let groups = first.down.k / experts::INT4_GROUP;
        first.down.group_scales[5 * groups] = f16::NAN;
        first.down.group_scales[17 * groups + groups - 1] = f16::NAN;
        second.down.group_scales.fill(f16::ZERO);
        second.down.group_scales[groups] = f16::MIN_POSITIVE_SUBNORMAL;
        third.down.group_scales[..groups].fill(f16::MAX);
        third.down.group_scales[1] = f16::from_f32(2f32.powi(-24));
        third.gate.row_scales[7] = 0.0;
        third.up.row_scales[9] = 1e20;
        fourth.gate.group_scales[3] = f16::NAN; // reaches every output
    } else {
        let k = first.down.k;
        first.down.exponents[5 * (k / 32)] = 255;
        first.down.exponents[17 * (k / 32) + k / 32 - 1] = 255;
        if case.format == experts::MXFP8 {
            first.down.codes[9 * k + 1] = 0x7f;
            second.down.codes.fill(0x80); // -0 everywhere
            second.down.codes[..k].fill(0x01); // a row of the smallest subnormal
        } else {
            second.down.codes.fill(0x88); // -0 everywhere
            second.down.codes[..k / 2].fill(0x11); // a row of 0.5
        }
        // Scales beyond what the multiplier carries, beside small ones; and a row of tiny ones.
        third.down.exponents[..k / 32].fill(200);
        third.down.exponents[1] = 190;
        third.down.exponents[k / 32..2 * (k / 32)].fill(40);
        third.down.exponents[2 * (k / 32)] = 0;
        third.gate.exponents[0] = 0;
        fourth.gate.exponents[3] = 255; // reaches every output
    }
    let loaded = load(device, case, &all)?;
    let step = Step::draw(random, case.hidden, &[9, 20, 70, 5]);
    // Features differ in size by dozens of powers of two here: each is compared on its own. Rounding h and y to bf16 moves
    // an output by less than 2^-7 of its terms.
    let part = 2f64.powi(-7);
    for &tiles in kernels(case.format) {
        let y = step.run(device, case, &loaded, tiles)?;
        let mut assignment = 0;
        for (expert, count) in step.counts.iter().enumerate() {
            let rounded = rounds_elements(case.format).then(|| all[expert].rounded());
            for _ in 0..*count {
                let (x, weight) = (step.row(assignment, case.hidden), step.weights[assignment]);
                let (expected, sizes) = case.reference(&all[expert], &x, weight);
                // It has sizes of its own, because rounding can make a sum near zero many times larger.
                let rounded = rounded.as_ref().map(|expert| case.reference(expert, &x, weight));
                for (feature, want) in expected.iter().enumerate() {
                    let got = y[assignment * case.hidden + feature].to_f64();
                    let close = |y: &[f64], sizes: &[f64]| (got - y[feature]).abs() <= sizes[feature] * part;
                    let good = if want.is_nan() {
                        got.is_nan()
                    } else {
                        close(&expected, &sizes) || rounded.as_ref().is_some_and(|(y, sizes)| close(y, sizes))
                    };
                    if !good {
                        return Err(format!(
                            "specials, format {}, tiles {tiles:?}: expert {expert} feature {feature}: {got} for {want}",
                            case.format
                        )
                        .into());
                    }
                }
                assignment += 1;
            }
        }
    }
    println!(
        "experts format {}: codes and scales that are not numbers, zeros, extreme scales: good",
        case.format
    );
    Ok(())
}

/// Small sizes, without biases.
const PLAIN: Case = Case {
    format: experts::BF16,
    hidden: 128,
    inter: 64,
    activation: experts::SWIGLU,
    biases: false,
    weight_on_input: false,
    block_scales: false,
};

/// The device, random numbers, and formats.
type Begun = (Device, Random, Vec<i32>);

/// The device, with the kernels set up, and random numbers. `formats`: those that the options name (`format=2`), otherwise all.
fn begin(options: &Options) -> Result<Begun, Box<dyn std::error::Error>> {
    let device = Device::open(0)?;
    experts::setup()?;
    let chosen = (experts::BF16..=experts::W4A8)
        .filter(|&format| options.number("format", format as u64) == format as u64);
    // The portable kernels have no products of FP8.
    let chosen = chosen.filter(|&format| KernelPath::chosen() == KernelPath::Hopper || !is_fp8(format));
    Ok((device, Random(options.number("seed", 31)), chosen.collect()))
}

pub fn check(options: &Options) -> Outcome {
    let (device, mut random, formats) = begin(options)?;
    let plain = PLAIN;
    for format in formats.iter().copied().filter(|&format| !is_fp8(format)) {
        ragged(&device, &mut random, &Case { format, ..plain })?;
        // An odd number of panels in both, more rows than a tile, biases.
        let other =
            Case { hidden: 192, inter: 320, activation: experts::SWIGLU_OAI, biases: true, format, ..plain };
        ragged(&device, &mut random, &other)?;
        let clamped = Case {
            hidden: 256,
            inter: 192,
            activation: experts::SWIGLU_CLAMPED,
            weight_on_input: true,
            format,
            ..plain
        };
        ragged(&device, &mut random, &clamped)?;
    }
    let is_special = |&format: &i32| format != experts::BF16 && !is_fp8(format);
    for format in formats.iter().copied().filter(is_special) {
        specials(&device, &mut random, &Case { format, hidden: 128, inter: 256, ..plain })?;
    }
    for format in formats.iter().copied().filter(|&format| is_fp8(format)) {
        // Intermediate sizes are multiples of 128 there; hidden sizes need not be.
        let fp8 = Case { format, hidden: 192, inter: 128, ..plain };
        ragged(&device, &mut random, &fp8)?;
        ragged(
            &device,
            &mut random,
            &Case { hidden: 320, inter: 384, activation: experts::SWIGLU_OAI, biases: true, ..fp8 },
        )?;
        ragged(
            &device,
            &mut random,
            &Case { hidden: 256, activation: experts::SWIGLU_CLAMPED, weight_on_input: true, ..fp8 },
        )?;
    }
    if formats.contains(&experts::W4A8) {
        w4a8::codes(&device, &mut random)?;
    }
    if !formats.contains(&experts::W8A8) {
        return Ok(());
    }
    let fp8 = Case { format: experts::W8A8, inter: 128, ..plain };
    let blocks = Case { block_scales: true, hidden: 320, inter: 256, ..fp8 };
    ragged(&device, &mut random, &blocks)?;
    ragged(&device, &mut random, &Case { activation: experts::SWIGLU_OAI, biases: true, ..blocks })?;
    ragged(
        &device,
        &mut random,
        &Case { hidden: 192, activation: experts::SWIGLU_CLAMPED, weight_on_input: true, ..blocks },
    )
}
