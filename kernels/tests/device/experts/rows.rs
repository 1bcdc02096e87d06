//! Rows with infinities, with values that are not numbers, and rows of very large and very small values, beside usual ones.

use expertd_kernels::device::Device;
use expertd_kernels::experts;
use half::bf16;

use super::launch::{FEW_ROWS, Step, load};
use super::mlp::{Case, Expert};
use super::{Expected, PLAIN, begin, compare_row, expected_of, shapes, tolerance};
use crate::random::Random;
use crate::{Options, Outcome};

/// One row in this number is special.
const SPECIAL: usize = 4;

/// Powers of two of large and of small rows.
const EXTREMES: [i32; 2] = [80, -48];
/// The same of MXFP4 with few rows, where elements of rows and of h, and sums of products, are infinite from 2^80 on and lose precision
/// below 2^-48; h is about the square of a small row.
const MXFP4_FEW_EXTREMES: [i32; 2] = [70, -20];

/// Makes every [`SPECIAL`]th row special, each kind in turn.
fn spoil(random: &mut Random, x: &mut [bf16], hidden: usize, extremes: [i32; 2]) {
    let scale = |row: &mut [bf16], exponent: i32| {
        row.iter_mut().for_each(|value| *value = bf16::from_f32(value.to_f32() * 2f32.powi(exponent)));
    };
    for (at, row) in x.chunks_mut(hidden).step_by(SPECIAL).enumerate() {
        let column = random.below(hidden as u64) as usize;
        match at % 5 {
            0 => row[column] = bf16::NAN,
            1 => row[column] = bf16::INFINITY,
            2 => row[column] = bf16::NEG_INFINITY,
            3 => scale(row, extremes[0]),
            _ => scale(row, extremes[1]),
        }
    }
}

/// Compares a special row. An infinity of the reference may also be no number.
fn compare_special(assignment: usize, wanted: &Expected, y: &[bf16], tolerance: f64) -> Result<(), String> {
    if wanted.y.iter().all(|value| value.is_finite()) {
        return compare_row(assignment, wanted, y, tolerance).map(|_| ());
    }
    let found = &y[assignment * wanted.y.len()..][..wanted.y.len()];
    match wanted
        .y
        .iter()
        .zip(found)
        .position(|(want, got)| want.is_nan() && !got.is_nan() || want.is_finite() != got.is_finite())
    {
        Some(at) => Err(format!("assignment {assignment} feature {at}: {} for {}", found[at], wanted.y[at])),
        None => Ok(()),
    }
}

fn check_case(device: &Device, random: &mut Random, case: &Case) -> Outcome {
    let all: Vec<Expert> = (0..3).map(|_| case.draw(random)).collect();
    let loaded = load(device, case, &all)?;
    let usual = Step::draw(random, case.hidden, &[9, 40, 150]);
    let mut spoiled = |extremes: [i32; 2]| {
        let mut x = usual.x.clone();
        spoil(random, &mut x, case.hidden, extremes);
        Step { counts: usual.counts.clone(), index: usual.index.clone(), weights: usual.weights.clone(), x }
    };
    let is_special = |assignment: &usize| (usual.index[*assignment] as usize).is_multiple_of(SPECIAL);
    let special: Vec<usize> = (0..usual.index.len()).filter(is_special).collect();
    let tolerance = tolerance(case.format);
    let few = if case.format == experts::MXFP4 { MXFP4_FEW_EXTREMES } else { EXTREMES };
    let (extreme, of_few) = (spoiled(EXTREMES), spoiled(few));
    let wanted = expected_of(case, &all, &extreme, &special);
    let wanted_of_few = expected_of(case, &all, &of_few, &special);
    for tiles in shapes(case) {
        let (spoiled, wanted) =
            if tiles == FEW_ROWS { (&of_few, &wanted_of_few) } else { (&extreme, &wanted) };
        let failed = |error: String| format!("rows, format {}, tiles {tiles:?}: {error}", case.format);
        let (y, alone) =
            (spoiled.run(device, case, &loaded, tiles)?, usual.run(device, case, &loaded, tiles)?);
        for (at, assignment) in special.iter().enumerate() {
            compare_special(*assignment, &wanted[at], &y, tolerance).map_err(failed)?;
        }
        for assignment in (0..usual.index.len()).filter(|assignment| !is_special(assignment)) {
            let range = assignment * case.hidden..(assignment + 1) * case.hidden;
            if y[range.clone()] != alone[range] {
                return Err(failed(format!("assignment {assignment} depends on other rows")).into());
            }
        }
    }
    println!(
        "rows: format {}, {} special rows beside {}: good",
        case.format,
        special.len(),
        usual.index.len() - special.len()
    );
    Ok(())
}

pub fn check(options: &Options) -> Outcome {
    let (device, mut random, formats) = begin(options)?;
    for format in formats {
        // Clamped activations of large rows are numbers.
        let case = Case { format, hidden: 256, inter: 128, activation: experts::SWIGLU_CLAMPED, ..PLAIN };
        check_case(&device, &mut random, &case)?;
        if format == experts::W8A8 {
            check_case(&device, &mut random, &Case { block_scales: true, ..case })?;
        }
    }
    Ok(())
}
