//! Every MXFP4 code with every distance of its scale from the row's largest, as FP8 products multiply it.

use expertd_kernels::device::Device;
use expertd_kernels::experts;
use half::bf16;

use super::launch::{Step, load};
use super::mlp::Case;
use super::{PLAIN, kernels};
use crate::Outcome;
use crate::random::Random;

/// Distances of the scale from the row's largest; from 19 on every element is rounded to zero.
const SHIFTS: usize = 40;
/// The largest E8M0 exponents of rows, in turn. The first two are below the least one that counts.
const TOPS: [usize; 6] = [0, 3, 40, 127, 150, 200];

/// Every row of down has one element of each code and distance. Two elements with the row's largest scale, 128 columns before it,
/// add up to nothing, as all features of h are equal.
pub fn codes(device: &Device, random: &mut Random) -> Outcome {
    let (hidden, inter) = (16 * SHIFTS, 256);
    let case = Case { format: experts::W4A8, hidden, inter, ..PLAIN };
    for top in TOPS {
        let mut expert = case.draw(random);
        for matrix in [&mut expert.gate, &mut expert.up] {
            // 0.5 in every place, so that every feature is the same.
            matrix.codes.fill(0x11);
            matrix.exponents.fill(120);
            matrix.row_scales.fill(1.0);
        }
        let down = &mut expert.down;
        down.codes.fill(0);
        down.row_scales.fill(1.0);
        for row in 0..hidden {
            let (code, shift) = ((row % 16) as u8, row / 16);
            let exponents = &mut down.exponents[row * (inter / 32)..][..inter / 32];
            exponents.fill(254); // of zeros, which do not count
            let codes = &mut down.codes[row * inter / 2..][..inter / 2];
            let first = row * 5 % 64;
            codes[first] = 0x91; // 0.5 and -0.5
            exponents[first / 16] = top as u8;
            let at = 128 + row * 37 % 128;
            codes[at / 2] = code << (at % 2 * 4);
            exponents[at / 32] = top.saturating_sub(shift) as u8;
        }
        let loaded = load(device, &case, &[expert.clone()])?;
        let mut step = Step::draw(random, hidden, &[130]);
        step.x.fill(bf16::ONE);
        let mut outputs = Vec::new();
        for &tiles in kernels(case.format) {
            outputs.push(step.run(device, &case, &loaded, tiles)?);
        }
        if outputs.iter().any(|y| *y != outputs[0]) {
            return Err(format!("W4A8, largest exponent {top}: the kernels differ").into());
        }
        for (assignment, y) in outputs[0].chunks(hidden).enumerate().step_by(3) {
            let (x, weight) = (step.row(assignment, hidden), step.weights[assignment]);
            let (wanted, _) = case.reference(&expert, &x, weight);
            let is_close = |(found, want): (&bf16, &f64)| {
                (found.to_f64() - want).abs() <= want.abs() * 2f64.powi(-7) + 2f64.powi(-133)
            };
            if let Some(row) = y.iter().zip(&wanted).position(|pair| !is_close(pair)) {
                let (found, want, shift) = (y[row], wanted[row], row / 16);
                return Err(format!(
                    "W4A8, largest exponent {top}, code {}, distance {shift}, assignment {assignment}: {found} for {want}",
                    row % 16
                )
                .into());
            }
        }
    }
    // A NaN scale makes its row NaN.
    let mut expert = case.draw(random);
    expert.down.exponents[5 * (inter / 32) + 3] = 255;
    let loaded = load(device, &case, &[expert])?;
    let step = Step::draw(random, hidden, &[90]);
    for &tiles in kernels(case.format) {
        let y = step.run(device, &case, &loaded, tiles)?;
        if y.iter().enumerate().any(|(at, value)| value.is_nan() != (at % hidden == 5)) {
            return Err("W4A8: a NaN scale does not make its row, and no other, NaN".into());
        }
    }
    println!("experts format {}: every code at {SHIFTS} distances, NaN: good", case.format);
    Ok(())
}
