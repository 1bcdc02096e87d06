//! Tests of every family's gate and weights against recordings of the reference implementation. They run in one process without
//! a service, once with a plain block in f64 and once with the service's kernels.
//!
//! `EXPERTD_GOLDEN=DIR` also checks another directory of the same kind (`scripts/golden.py` creates some).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::common::golden::{Golden, folders, root};
use crate::common::kernels;
use expertd_compute::experts::reference::{block, worst_row};
use expertd_compute::gate::CpuGate;
use expertd_model::Checkpoint;
use expertd_types::LayerId;

const TOLERANCE: f64 = 1e-5;

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
        let output = block(&checkpoint, id, &layer.input, &ids, &weights).unwrap();
        let error = worst_row(&output, &layer.output, spec.hidden);
        println!("{name} layer {}: {error:.1e} ({})", layer.index, moe.gate.describe());
        if error.is_nan() || error > TOLERANCE {
            return Err(format!("{name} layer {}: a row is off by {error:.2e}", layer.index));
        }
        let recorded: Vec<f64> = layer.output.iter().map(|x| f64::from(*x)).collect();
        let kernels = kernels::block(&checkpoint, id, &layer.input, &ids, &weights);
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
fn all_seventeen_families_agree_with_the_recorded_blocks() {
    let dirs = folders(&root());
    assert_eq!(dirs.len(), 17);
    check_all(&dirs);
}

#[test]
fn quantised_checkpoints_agree_with_the_recorded_blocks_of_their_dequantised_copies() {
    let dirs = folders(&root().with_file_name("quantised"));
    assert_eq!(dirs.len(), 13);
    check_all(&dirs);
}

#[test]
fn further_golden_data_agree() {
    if let Some(dir) = std::env::var_os("EXPERTD_GOLDEN") {
        let dirs = folders(Path::new(&dir));
        assert!(!dirs.is_empty(), "no golden data in {dir:?}");
        check_all(&dirs);
    }
}
