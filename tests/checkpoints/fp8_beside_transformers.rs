//! FP8 products beside the outputs of transformers' own FP8 path (`scripts/fp8_accuracy.py --record`).

use std::path::Path;

use expertd_test_fixtures::fixture;

use crate::common::golden::Golden;
use crate::common::kernels;
use expertd_compute::experts::reference;
use expertd_model::Checkpoint;
use expertd_types::rows::relative_error;
use expertd_types::{Fp8Products, LayerId};

/// Fixtures, and how much their rows may differ from transformers' as a root mean square. llama4_text's path has one scale for a
/// whole row.
const FIXTURES: [(&str, f64); 4] = [
    ("deepseek_v3-fp8", 2.2e-2),
    ("deepseek_v3-fp8-odd", 2.2e-2),
    ("granitemoe-fp8-odd", 2.2e-2),
    ("llama4_text-fp8-odd", 3e-2),
];

/// Relative errors of rows of all layers.
#[derive(Default)]
struct Errors(Vec<f64>);

impl Errors {
    fn add(&mut self, found: &[f32], wanted: &[f32], hidden: usize) {
        let rows = found.chunks(hidden).zip(wanted.chunks(hidden));
        self.0.extend(rows.map(|(found, wanted)| relative_error(found, wanted)));
    }

    fn root_mean_square(&self) -> f64 {
        (self.0.iter().map(|error| error * error).sum::<f64>() / self.0.len() as f64).sqrt()
    }

    fn worst(&self) -> f64 {
        self.0.iter().copied().fold(0.0, f64::max)
    }
}

/// Both quantise the same rows alike. What differs is h: transformers rounds it to bf16 more often, so that some elements get the
/// neighbouring code. That is less than what quantisation changes.
fn compare(name: &str, most: f64) {
    let dir = fixture(&format!("quantised/{name}"));
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let hidden = checkpoint.spec().hidden;
    let [mut ours, mut theirs, mut apart, mut widened] = [const { Errors(Vec::new()) }; 4];
    for layer in recorded(&dir).layers {
        let id = LayerId(layer.index);
        let (ids, weights) = layer.routing.unwrap();
        let exact =
            reference::block(&checkpoint, id, &layer.input, (&ids, &weights), Fp8Products::NONE).unwrap();
        let exact: Vec<f32> = exact.into_iter().map(|x| x as f32).collect();
        let products = |fp8| kernels::block(&checkpoint, id, &layer.input, &ids, &weights, fp8);
        let quantised = products(Fp8Products::OF_FP8);
        ours.add(&quantised, &exact, hidden);
        theirs.add(&layer.output, &exact, hidden);
        apart.add(&quantised, &layer.output, hidden);
        widened.add(&products(Fp8Products::NONE), &layer.output, hidden);
    }
    for (what, errors) in [
        ("ours from f64", &ours),
        ("transformers from f64", &theirs),
        ("ours from transformers", &apart),
        ("widened weights from transformers", &widened),
    ] {
        println!("{name}: {what}: {:.2e}, worst {:.2e}", errors.root_mean_square(), errors.worst());
    }
    let [ours, theirs, apart, widened] =
        [ours, theirs, apart, widened].map(|e| (e.root_mean_square(), e.worst()));
    assert!(apart.0 < most && apart.1 < 6e-2, "{name}: {apart:?} from transformers");
    assert!(
        apart.0 < 0.65 * widened.0,
        "{name}: {apart:?} from transformers, without FP8 products {widened:?}"
    );
    assert!(ours.0 < 1.05 * theirs.0, "{name}: {ours:?} from f64, transformers {theirs:?}");
}

fn recorded(dir: &Path) -> Golden {
    Golden::read_file(&dir.join("transformers-fp8.safetensors"))
}

#[test]
fn fp8_products_are_as_exact_as_transformers_and_near_its_outputs() {
    for (name, most) in FIXTURES {
        compare(name, most);
    }
}
