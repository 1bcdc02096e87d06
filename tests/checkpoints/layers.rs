//! Tests of checkpoints of which only some layers are opened.

use std::path::Path;

use expertd_model::synth::{self, SynthConfig};
use expertd_model::{Checkpoint, LayerChoice, ModelError};
use expertd_types::{Coverage, ExpertId, LayerId, LayerRange};

/// A checkpoint of four layers, the first one dense, with a file for almost every tensor.
fn checkpoint(dir: &Path) {
    let config = SynthConfig { layers: 4, max_shard_bytes: 1, ..SynthConfig::new("deepseek_v3") };
    synth::write(&config, dir).unwrap();
}

fn range(first: u32, last: u32) -> LayerChoice {
    LayerChoice::Range(LayerRange { first: LayerId(first), last: LayerId(last) })
}

fn blocks(checkpoint: &Checkpoint) -> Vec<u32> {
    checkpoint.spec().moe_layers().map(|(layer, _)| layer.0).collect()
}

/// The file that holds a tensor.
fn file_of(dir: &Path, tensor: &str) -> std::path::PathBuf {
    let text = std::fs::read_to_string(dir.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&text).unwrap();
    dir.join(index["weight_map"][tensor].as_str().unwrap())
}

fn fingerprint(checkpoint: &Checkpoint) -> String {
    checkpoint.fingerprint(Coverage::Whole).to_string()
}

/// Every family's names of tensors: a part of the layers has the fingerprint of the whole checkpoint.
#[test]
fn every_family_has_one_fingerprint_whatever_layers_are_held() {
    let mut compared = 0;
    for folder in expertd_test_fixtures::all("golden") {
        let whole = Checkpoint::open(&folder).unwrap();
        for layer in blocks(&whole) {
            let part = Checkpoint::open_layers(&folder, range(layer, layer)).unwrap();
            assert_eq!(fingerprint(&part), fingerprint(&whole), "{folder:?}, layer {layer}");
            compared += 1;
        }
    }
    assert!(compared >= 22, "{compared} parts");
}

#[test]
fn only_chosen_layers_are_there_and_the_fingerprint_is_that_of_the_whole_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    let whole = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((blocks(&whole), whole.spec().held), (vec![1, 2, 3], LayerRange::whole(4)));
    for (choice, held) in [
        (range(1, 2), vec![1, 2]),
        (range(0, 1), vec![1]),
        (range(3, 3), vec![3]),
        (LayerChoice::Share { index: 0, of: 2 }, vec![1, 2]),
        (LayerChoice::Share { index: 1, of: 2 }, vec![3]),
    ] {
        let part = Checkpoint::open_layers(dir.path(), choice).unwrap();
        assert_eq!(blocks(&part), held, "{choice}");
        assert_eq!(fingerprint(&part), fingerprint(&whole), "{choice}");
        assert_eq!(part.spec().num_layers, 4);
        let first = LayerId(held[0]);
        let expert =
            |checkpoint: &Checkpoint| checkpoint.expert(first, ExpertId(1)).unwrap().up.data.to_vec();
        assert_eq!(expert(&part), expert(&whole));
        let foreign = (1..4).map(LayerId).find(|layer| !held.contains(&layer.0)).unwrap();
        assert!(matches!(part.gate(foreign), Err(ModelError::LayerNotHeld { .. })), "{choice}");
    }
}

#[test]
fn a_defect_matters_to_the_layers_that_have_it_only() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    let tensor = "model.layers.3.mlp.experts.2.up_proj.weight";
    let file = file_of(dir.path(), tensor);
    // The tensor gets another name inside its file, which stays a valid file.
    let bytes = std::fs::read(&file).unwrap();
    let text = tensor.as_bytes();
    let at = bytes.windows(text.len()).position(|window| window == text).unwrap();
    let mut broken = bytes.clone();
    broken[at + text.len() - 1] = b'T';
    std::fs::write(&file, broken).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains(tensor), "{error}");
    assert!(Checkpoint::open_layers(dir.path(), range(3, 3)).is_err());
    assert_eq!(blocks(&Checkpoint::open_layers(dir.path(), range(0, 2)).unwrap()), [1, 2]);
}

#[test]
fn other_weights_in_a_layer_that_is_not_held_have_another_fingerprint() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    let version = || fingerprint(&Checkpoint::open_layers(dir.path(), range(0, 1)).unwrap());
    let before = version();
    let file = file_of(dir.path(), "model.layers.3.mlp.experts.2.up_proj.weight");
    let mut bytes = std::fs::read(&file).unwrap();
    let data = bytes.len() - 8 * 96 * 2;
    bytes[data..].fill(0x11);
    std::fs::write(&file, bytes).unwrap();
    assert_ne!(version(), before);
}

#[test]
fn a_choice_that_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    for (choice, word) in [
        (range(2, 4), "0-3"),
        (range(0, 0), "none of them has an MoE block"),
        (LayerChoice::Share { index: 0, of: 4 }, "at most 3 shares"),
    ] {
        let error = Checkpoint::open_layers(dir.path(), choice).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("config.json"), "{error}");
    }
}
