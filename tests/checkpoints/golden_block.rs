//! Tests of every family's gate and weights against recordings of the reference implementation. They run in one process without
//! a service, once with a plain block in f64 and once with the service's kernels.
//!
//! `EXPERTD_GOLDEN=DIR` also checks another directory of the same kind (`scripts/golden.py` creates some).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use expertd_test_fixtures::fixture;

use crate::common::golden::{Golden, folders};
use crate::common::kernels;
use expertd_compute::experts::reference::{block, worst_row};
use expertd_compute::gate::CpuGate;
use expertd_model::Checkpoint;
use expertd_types::{Fp8Products, LayerId};

const TOLERANCE: f64 = 1e-5;
/// The same of FP8 products against blocks that were recorded without quantising rows, which changes a row by 4 to 8 %.
const FP8_TOLERANCE: f64 = 1e-1;

fn check(dir: &Path) -> Result<(), String> {
    let name = dir.file_name().unwrap().to_string_lossy().into_owned();
    let checkpoint = Checkpoint::open(dir).map_err(|error| format!("{name}: {error}"))?;
    let golden = Golden::read(dir);
    let spec = checkpoint.spec();
    let recorded: Vec<u32> = golden.layers.iter().map(|layer| layer.index).collect();
    let served: Vec<u32> = spec.moe_layers().map(|(layer, _)| layer.0).collect();
    assert_eq!(recorded, served, "{name}: layers with MoE blocks");
    for layer in &golden.layers {
        let id = LayerId(layer.index);
        let moe = spec.layer(id).unwrap();
        let gate = CpuGate::new(&moe.gate, &checkpoint.gate(id).unwrap());
        let k = moe.gate.top_k;
        let (mut ids, mut weights) = (vec![-1; golden.tokens * k], vec![f32::NAN; golden.tokens * k]);
        gate.route(&layer.input, Some(&golden.token_ids), &mut ids, &mut weights).unwrap();
        if let Some((expected_ids, expected_weights)) = &layer.routing {
            compare_routing(&name, layer.index, k, (&ids, &weights), (expected_ids, expected_weights))?;
        }
        let output = block(&checkpoint, id, &layer.input, (&ids, &weights), Fp8Products::NONE).unwrap();
        let error = worst_row(&output, &layer.output, spec.hidden);
        println!("{name} layer {}: {error:.1e} ({})", layer.index, moe.gate.describe());
        if error.is_nan() || error > TOLERANCE {
            return Err(format!("{name} layer {}: a row is off by {error:.2e}", layer.index));
        }
        let recorded: Vec<f64> = layer.output.iter().map(|x| f64::from(*x)).collect();
        let kernels = kernels::block(&checkpoint, id, &layer.input, &ids, &weights, Fp8Products::NONE);
        let error = worst_row(&recorded, &kernels, spec.hidden);
        if error.is_nan() || error > TOLERANCE {
            return Err(format!(
                "{name} layer {}: computed by the kernels, a row is off by {error:.2e}",
                layer.index
            ));
        }
    }
    Ok(())
}

/// The recorded blocks of an FP8 or MXFP4 fixture against FP8 products, by definition and by the kernels. Returns the errors of rows
/// of the kernels against the definition.
fn check_fp8_products(dir: &Path, products: Fp8Products) -> Vec<f64> {
    let name = dir.file_name().unwrap().to_string_lossy().into_owned();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let golden = Golden::read(dir);
    let hidden = checkpoint.spec().hidden;
    let mut errors = Vec::new();
    for layer in &golden.layers {
        let id = LayerId(layer.index);
        let moe = checkpoint.spec().layer(id).unwrap();
        assert!(moe.experts.take_fp8_rows(products), "{name}");
        let gate = CpuGate::new(&moe.gate, &checkpoint.gate(id).unwrap());
        let count = golden.tokens * moe.gate.top_k;
        let (mut ids, mut weights) = (vec![-1; count], vec![f32::NAN; count]);
        gate.route(&layer.input, Some(&golden.token_ids), &mut ids, &mut weights).unwrap();
        let defined = block(&checkpoint, id, &layer.input, (&ids, &weights), products).unwrap();
        let found = kernels::block(&checkpoint, id, &layer.input, &ids, &weights, products);
        for (defined, found) in defined.chunks(hidden).zip(found.chunks(hidden)) {
            errors.push(worst_row(defined, found, hidden));
        }
        let recorded: Vec<f64> = layer.output.iter().map(|x| f64::from(*x)).collect();
        let error = worst_row(&recorded, &found, hidden);
        let rows = || recorded.chunks(hidden).zip(found.chunks(hidden));
        let squares: f64 = rows().map(|(recorded, found)| worst_row(recorded, found, hidden).powi(2)).sum();
        let mean = (squares / golden.tokens as f64).sqrt();
        println!("{name} layer {}: {mean:.1e}, worst {error:.1e} with FP8 products", layer.index);
        // Rows that are not quantised would be nearer.
        assert!(error > 1e-3 && error < FP8_TOLERANCE, "{name} layer {}: {error:.2e}", layer.index);
    }
    errors
}

/// Sums that are rounded otherwise decide on few codes of h: nearly all rows have the definition's codes.
fn check_codes(errors: &[f64]) {
    let other = errors.iter().filter(|error| **error > TOLERANCE).count();
    let worst = errors.iter().copied().fold(0.0, f64::max);
    println!(
        "{other} of {} rows have other codes than the definition's; the worst differs by {worst:.1e}",
        errors.len()
    );
    assert!(other * 20 < errors.len() && worst < FP8_TOLERANCE, "{other} of {}: {worst:.1e}", errors.len());
}

type Routing<'a> = (&'a [i32], &'a [f32]);

fn compare_routing(
    name: &str,
    layer: u32,
    k: usize,
    found: Routing<'_>,
    expected: Routing<'_>,
) -> Result<(), String> {
    for t in 0..found.0.len() / k {
        let row = |ids: &[i32]| ids[t * k..][..k].iter().copied().collect::<BTreeSet<_>>();
        let place = format!("{name} layer {layer} token {t}");
        if row(found.0) != row(expected.0) {
            return Err(format!("{place}: ids {:?}, expected {:?}", row(found.0), row(expected.0)));
        }
        for (id, weight) in found.0[t * k..][..k].iter().zip(&found.1[t * k..][..k]) {
            let at = expected.0[t * k..][..k].iter().position(|e| e == id).unwrap();
            let other = expected.1[t * k + at];
            if (weight - other).abs() > 1e-5 * other.abs().max(1e-3) {
                return Err(format!("{place}: expert {id} has weight {weight}, expected {other}"));
            }
        }
    }
    Ok(())
}

fn check_all(dirs: &[PathBuf]) {
    let failures: Vec<String> = dirs.iter().filter_map(|dir| check(dir).err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_fixtures_of_families_agree_with_the_recorded_blocks() {
    let dirs = expertd_test_fixtures::all("golden");
    assert_eq!(dirs.len(), 22);
    check_all(&dirs);
    check_all(&expertd_test_fixtures::all("unpadded"));
}

#[test]
fn quantised_checkpoints_agree_with_the_recorded_blocks_of_their_dequantised_copies() {
    let dirs = expertd_test_fixtures::all("quantised");
    assert_eq!(dirs.len(), 16);
    check_all(&dirs);
}

#[test]
fn fp8_products_agree_with_their_definition_and_with_the_recorded_blocks() {
    let dirs = expertd_test_fixtures::all("quantised");
    let takes = |dir: &Path| {
        Checkpoint::open(dir)
            .unwrap()
            .spec()
            .moe_layers()
            .all(|(_, moe)| moe.experts.take_fp8_rows(Fp8Products::OF_FP8))
    };
    let dirs: Vec<_> = dirs.iter().filter(|dir| takes(dir)).collect();
    assert_eq!(dirs.len(), 5, "not the fixture with narrow blocks");
    let errors: Vec<f64> =
        dirs.into_iter().flat_map(|dir| check_fp8_products(dir, Fp8Products::OF_FP8)).collect();
    check_codes(&errors);
}

/// Experts that are stored in MXFP4 take FP8 rows on request.
#[test]
fn fp8_products_of_mxfp4_agree_with_their_definition_and_with_the_recorded_blocks() {
    let errors: Vec<f64> = ["gpt_oss-mxfp4-odd", "qwen3_moe-mxfp4-library"]
        .into_iter()
        .flat_map(|name| check_fp8_products(&fixture(&format!("quantised/{name}")), Fp8Products::OF_MXFP4))
        .collect();
    check_codes(&errors);
}

/// `scale_fmt` of the config decides on the scales of rows.
#[test]
fn fp8_products_take_scales_that_are_powers_of_two() {
    let fixture = fixture("quantised/deepseek_v3-fp8-odd");
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "golden.safetensors"] {
        std::fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
    }
    let config = std::fs::read_to_string(fixture.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["quantization_config"]["scale_fmt"] = "ue8m0".into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let products = |dir: &Path| {
        let (checkpoint, golden) = (Checkpoint::open(dir).unwrap(), Golden::read(dir));
        let (layer, ids) = (&golden.layers[0], [4, 0, 7].repeat(golden.tokens));
        let weights = vec![0.5; ids.len()];
        kernels::block(&checkpoint, LayerId(layer.index), &layer.input, &ids, &weights, Fp8Products::OF_FP8)
    };
    assert_ne!(products(&fixture), products(folder.path()));
    check_codes(&check_fp8_products(folder.path(), Fp8Products::OF_FP8));
}

#[test]
fn further_golden_data_agree() {
    if let Some(dir) = std::env::var_os("EXPERTD_GOLDEN") {
        let dirs = folders(Path::new(&dir));
        assert!(!dirs.is_empty(), "no golden data in {dir:?}");
        check_all(&dirs);
    }
}
