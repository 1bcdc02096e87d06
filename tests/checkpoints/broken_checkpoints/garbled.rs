//! Property tests: garbled files give errors and never a panic.

use std::sync::OnceLock;

use proptest::prelude::*;

use super::*;

/// Opens the checkpoint and, if that succeeds, reads the gate, the shared experts and the last expert of each layer. Nothing may
/// panic for any bytes.
fn survive(dir: &Path) {
    let Ok(checkpoint) = Checkpoint::open(dir) else { return };
    let layers: Vec<LayerId> = checkpoint.spec().moe_layers().map(|(layer, _)| layer).collect();
    for layer in layers {
        let _ = checkpoint.gate(layer);
        let _ = checkpoint.shared(layer);
        let moe = checkpoint.spec().layer(layer).unwrap();
        let last = ExpertId(u32::try_from(moe.experts.count - 1).unwrap());
        let Ok(tensors) = checkpoint.expert(layer, last) else { continue };
        for view in [&tensors.gate, &tensors.up, &tensors.down] {
            view.check().unwrap();
            let _ = view.value(view.rows - 1, view.cols - 1);
        }
    }
}

fn original(which: usize) -> (Vec<u8>, Vec<u8>) {
    static ALL: OnceLock<Vec<(Vec<u8>, Vec<u8>)>> = OnceLock::new();
    ALL.get_or_init(originals)[which].clone()
}

fn originals() -> Vec<(Vec<u8>, Vec<u8>)> {
    let families = [
        ("mixtral", SynthFormat::Fp8),
        ("gpt_oss", SynthFormat::Mxfp4),
        ("deepseek_v4", SynthFormat::F16),
        ("qwen2_moe", SynthFormat::Bf16),
        ("deepseek_v3", SynthFormat::Int4),
        ("qwen2_moe", SynthFormat::Int4Gptq),
        ("qwen3_moe", SynthFormat::Int4Awq),
        ("mixtral", SynthFormat::Nvfp4),
        ("olmoe", SynthFormat::Mxfp8),
    ];
    families
        .iter()
        .map(|(family, format)| {
            let dir = tempfile::tempdir().unwrap();
            let config = SynthConfig {
                hidden: 32,
                width: 32,
                experts: 4,
                format: *format,
                ..SynthConfig::new(family)
            };
            synth::write(&config, dir.path()).unwrap();
            let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
            (read("config.json"), read("model.safetensors"))
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn mutated_checkpoints_never_panic(
        which in 0usize..9,
        config_edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        header_edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let (mut config, mut file) = original(which);
        for (at, byte) in config_edits {
            let at = at.index(config.len());
            config[at] = byte;
        }
        let header = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize + 8;
        for (at, byte) in header_edits {
            file[at.index(header)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len() + 1));
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), config).unwrap();
        fs::write(dir.path().join("model.safetensors"), file).unwrap();
        survive(dir.path());
    }

    #[test]
    fn configs_with_any_numbers_never_panic(
        which in 0usize..9,
        field in any::<prop::sample::Index>(),
        value in prop_oneof![
            Just(json!(null)), Just(json!([])), Just(json!({})), Just(json!("x")), Just(json!(true)),
            any::<i64>().prop_map(|n| json!(n)), (-3i64..70).prop_map(|n| json!(n)), any::<f64>().prop_map(|x| json!(x)),
        ],
    ) {
        let (config, file) = original(which);
        let mut config: Map<String, Value> = serde_json::from_slice(&config).unwrap();
        let name = config.keys().nth(field.index(config.len())).unwrap().clone();
        config.insert(name, value);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), Value::Object(config).to_string()).unwrap();
        fs::write(dir.path().join("model.safetensors"), file).unwrap();
        survive(dir.path());
    }

    #[test]
    fn mutated_indexes_never_panic(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        static SANDBOX: OnceLock<(Sandbox, Vec<u8>)> = OnceLock::new();
        let (sandbox, index) = SANDBOX.get_or_init(|| {
            let sandbox = sharded();
            let index = fs::read(sandbox.path("model.safetensors.index.json")).unwrap();
            (sandbox, index)
        });
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(sandbox.dir.path()).unwrap().map(Result::unwrap) {
            std::os::unix::fs::symlink(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        let mut index = index.clone();
        for (at, byte) in edits {
            let at = at.index(index.len());
            index[at] = byte;
        }
        let path = dir.path().join("model.safetensors.index.json");
        fs::remove_file(&path).unwrap();
        fs::write(path, index).unwrap();
        survive(dir.path());
    }

    #[test]
    fn random_files_never_panic(
        config in proptest::collection::vec(any::<u8>(), 0..200),
        index in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), config).unwrap();
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        prop_assert!(Checkpoint::open(dir.path()).is_err());
    }
}
