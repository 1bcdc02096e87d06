//! Tests of `quantise`.

use rand::RngExt;

use super::*;
use crate::experts::reference;
use crate::linalg::tiles::{pack_row, padded};

/// A row quantised alone and as row 2 of a tile of 5, whose other rows must keep their values.
fn quantised(row: &[f32], scales: Fp8Scales, factor: f32) -> Vec<f32> {
    let (rows, r) = (5, 2);
    let mut tile = vec![7.25; rows * padded(row.len())];
    pack_row(&mut tile, rows, r, row, None);
    quantise_row(&mut tile, rows, r, scales, factor);
    let (blocks, _) = tile.as_chunks::<K_BLOCK>();
    for (i, block) in blocks.iter().enumerate() {
        assert!(i % rows == r || block.iter().all(|x| *x == 7.25), "block {i} of another row changed");
    }
    let mut alone = vec![f32::NAN; padded(row.len())];
    pack_row(&mut alone, 1, 0, row, None);
    quantise_row(&mut alone, 1, 0, scales, factor);
    let of_tile: Vec<f32> = blocks.iter().skip(r).step_by(rows).flatten().copied().collect();
    let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&of_tile), bits(&alone));
    assert!(alone[row.len()..].iter().all(|x| *x == 0.0 || x.is_nan()), "the padding must stay zero");
    alone.truncate(row.len());
    alone
}

fn check(row: &[f32]) {
    for scales in [Fp8Scales::F32, Fp8Scales::PowerOfTwo] {
        let wide: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let expected = reference::quantised(&wide, scales == Fp8Scales::PowerOfTwo);
        for factor in [1.0, 0.3] {
            for (i, (found, expected)) in quantised(row, scales, factor).iter().zip(&expected).enumerate() {
                let (found, expected) = (f64::from(*found), expected * f64::from(factor));
                let close = (found - expected).abs() <= expected.abs() * 1.2e-7;
                assert!(
                    close || found.is_nan() && expected.is_nan(),
                    "{i}: {} gave {found}, not {expected}",
                    row[i]
                );
            }
        }
    }
}

#[test]
fn rows_of_all_sizes_are_quantised_as_defined() {
    let mut rng = expertd_test_seed::rng();
    for len in [1, 31, 32, 64, 127, 128, 129, 200, 256, 448] {
        let normal: Vec<f32> = (0..len).map(|_| rng.random_range(-3.0..3.0)).collect();
        check(&normal);
        // Magnitudes over the whole range of f32, so that most codes are 0, subnormal or the largest.
        let wide: Vec<f32> = (0..len)
            .map(|_| rng.random_range(-1.0_f32..1.0) * 2f32.powi(rng.random_range(-126..127)))
            .collect();
        check(&wide);
        check(&vec![0.0; len]);
        check(&vec![1e-38; len]);
    }
}

#[test]
fn every_code_and_every_tie_is_rounded_as_defined() {
    // With the scale 1, an element is its code. Sixteenths of the step between codes are bf16 values, ties among them.
    let codes: Vec<f64> = (0..0x7f).map(|code| f64::from(expertd_model::decode::fp8_e4m3(code))).collect();
    let mut between = Vec::new();
    for pair in codes.windows(2) {
        between.extend((0..16).map(|i| (pair[0] + (pair[1] - pair[0]) * f64::from(i) / 16.0) as f32));
    }
    for part in between.chunks(63) {
        let mut row: Vec<f32> = part.iter().flat_map(|x| [*x, -x]).collect();
        row.push(LARGEST);
        check(&row);
    }
}

#[test]
fn a_huge_element_leaves_zeros_beside_it_and_other_groups_alone() {
    let mut row = vec![1.0; 256];
    row[5] = 1e30;
    let found = quantised(&row, Fp8Scales::F32, 1.0);
    assert!(found[..128].iter().enumerate().all(|(i, x)| (i == 5) != (*x == 0.0)), "{found:?}");
    assert!(found[128..].iter().all(|x| *x == 1.0), "{found:?}");
    check(&row);
}

#[test]
fn elements_that_are_no_numbers_stay_so() {
    let mut row = vec![1.0; 256];
    row[3] = f32::NAN;
    let found = quantised(&row, Fp8Scales::F32, 1.0);
    assert!(found.iter().enumerate().all(|(i, x)| if i == 3 { x.is_nan() } else { *x == 1.0 }));
    check(&row);
    check(&[f32::NAN; 40]);
    // The scale of an infinity is infinite, so nothing of its group is left. bf16 rounds the largest f32 to infinity.
    for infinite in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        row[3] = infinite;
        let found = quantised(&row, Fp8Scales::F32, 1.0);
        assert!(found[..128].iter().all(|x| x.is_nan()) && found[128..].iter().all(|x| *x == 1.0));
        check(&row);
    }
}
