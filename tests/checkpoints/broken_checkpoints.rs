//! Tests that errors about unusable checkpoints name file, tensor or field, and what was expected and found.
use std::fs;
use std::path::{Path, PathBuf};

use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_model::{Checkpoint, ModelError};
use expertd_types::{ExpertId, LayerId};
use serde_json::{Map, Value, json};

struct Sandbox {
    dir: tempfile::TempDir,
}

impl Sandbox {
    fn new(config: &SynthConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        synth::write(config, dir.path()).unwrap();
        Checkpoint::open(dir.path()).unwrap();
        Self { dir }
    }

    fn of(family: &str) -> Self {
        Self::new(&SynthConfig { format: SynthFormat::F32, ..SynthConfig::new(family) })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn open(&self) -> Result<Checkpoint, ModelError> {
        Checkpoint::open(self.dir.path())
    }

    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        let message = self.open().expect_err("a broken checkpoint").to_string();
        for part in parts {
            assert!(message.contains(part), "expected {part:?} in: {message}");
        }
    }

    fn config(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.path("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(config.as_object_mut().unwrap());
        fs::write(path, config.to_string()).unwrap();
    }

    /// Rewrites the header of the single file; its data stay as they are.
    fn header(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.path("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let (header, data) = split(&bytes);
        let mut header: Map<String, Value> = serde_json::from_slice(header).unwrap();
        change(&mut header);
        fs::write(path, join(Value::Object(header).to_string().as_bytes(), data)).unwrap();
    }

    fn rename_tensor(&self, from: &str, to: &str) {
        self.header(|header| {
            let info = header.remove(from).unwrap();
            header.insert(to.to_owned(), info);
        });
    }
}

fn split(bytes: &[u8]) -> (&[u8], &[u8]) {
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[8..].split_at(length)
}

fn join(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

const EXPERT: &str = "model.layers.1.block_sparse_moe.experts.3.w2.weight";

#[test]
fn a_missing_tensor() {
    let sandbox = Sandbox::of("mixtral");
    sandbox.rename_tensor(EXPERT, "something.else");
    sandbox.refused(&["model.safetensors", EXPERT, "is missing", "`intermediate_size` and `hidden_size`"]);
}

#[test]
fn a_missing_gate_names_a_similar_tensor() {
    let sandbox = Sandbox::of("mixtral");
    let layer0 = "model.layers.0.block_sparse_moe.gate.weight";
    sandbox.rename_tensor(layer0, "model.decoder.layers.0.block_sparse_moe.gate.weight");
    sandbox.refused(&[layer0, "is missing", "found `model.decoder.layers.0", "prefixes tried: `model.`"]);
}

#[test]
fn a_truncated_file() {
    let sandbox = Sandbox::of("mixtral");
    let path = sandbox.path("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    sandbox.refused(&[
        "model.safetensors",
        "broken",
        "tensor `model.layers",
        "but the file holds only",
        "it may be truncated",
    ]);
    fs::write(&path, &bytes[..200]).unwrap();
    sandbox.refused(&["model.safetensors", "its header's length", "truncated or not safetensors"]);
    fs::write(&path, b"").unwrap();
    sandbox.refused(&["model.safetensors", "expected at least 8 bytes", "but the file has 0 bytes"]);
}

#[test]
fn a_corrupt_header() {
    let sandbox = Sandbox::of("mixtral");
    let path = sandbox.path("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    sandbox.refused(&["its header's length is given as 18446744073709551615 bytes"]);
    bytes[..8].copy_from_slice(&64u64.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    sandbox.refused(&["its header does not parse"]);
}

#[test]
fn overlapping_tensors() {
    let sandbox = Sandbox::of("mixtral");
    sandbox.header(|header| {
        let offsets = header[EXPERT]["data_offsets"].as_array().unwrap().clone();
        let (start, end) = (offsets[0].as_u64().unwrap(), offsets[1].as_u64().unwrap());
        header[EXPERT]["data_offsets"] = json!([start - 4, end - 4]);
    });
    sandbox.refused(&[EXPERT, "overlaps `model.layers.1.block_sparse_moe.experts"]);
}

#[test]
fn a_shape_that_contradicts_the_config() {
    let sandbox = Sandbox::of("mixtral");
    sandbox.config(|config| config["intermediate_size"] = 80.into());
    sandbox.refused(&[
        "model.safetensors",
        "tensor `model.layers.0.block_sparse_moe.experts.0.w1.weight`",
        "has shape [96, 64], expected [80, 64]",
        "`intermediate_size` and `hidden_size` in config.json",
    ]);
    let sandbox = Sandbox::of("mixtral");
    sandbox.config(|config| config["num_local_experts"] = 9.into());
    sandbox.refused(&["gate.weight` has shape [8, 64], expected [9, 64]", "`num_local_experts`"]);
    let sandbox = Sandbox::of("gpt_oss");
    sandbox.config(|config| config["intermediate_size"] = 100.into());
    sandbox.refused(&["experts.gate_up_proj` has shape [8, 64, 192], expected [8, 64, 200]"]);
    let sandbox = Sandbox::of("qwen2_moe");
    sandbox.config(|config| config["shared_expert_intermediate_size"] = 32.into());
    sandbox.refused(&["shared_expert.gate_proj.weight` has shape [96, 64], expected [32, 64]"]);
}

#[test]
fn element_types_that_cannot_be_used() {
    let sandbox = Sandbox::of("mixtral");
    sandbox.header(|header| header[EXPERT]["dtype"] = "I32".into());
    sandbox.refused(&[EXPERT, "is stored as I32, expected BF16, F16, F32"]);
    let sandbox = Sandbox::of("mixtral");
    sandbox.header(|header| header[EXPERT]["dtype"] = "F99".into());
    sandbox.refused(&["model.safetensors", "does not parse", "F99"]);
}

#[test]
fn experts_of_one_layer_in_two_formats() {
    let sandbox = Sandbox::of("mixtral");
    sandbox.header(|header| {
        // In BF16 the same shape needs half the bytes, so another tensor covers the other half.
        let shape = header[EXPERT]["shape"].as_array().unwrap().clone();
        assert_eq!(shape, [64, 96].map(Value::from));
        let offsets = header[EXPERT]["data_offsets"].as_array().unwrap().clone();
        let (start, end) = (offsets[0].as_u64().unwrap(), offsets[1].as_u64().unwrap());
        let middle = (start + end) / 2;
        header[EXPERT] = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, middle]});
        header.insert(
            "filler".into(),
            json!({"dtype": "U8", "shape": [end - middle], "data_offsets": [middle, end]}),
        );
    });
    sandbox.refused(&[EXPERT, "is stored as BF16, expected F32 like the layer's other experts"]);
}

#[test]
fn missing_and_invalid_config_fields() {
    let cases: [(&str, Value, &[&str]); 8] = [
        ("hidden_size", Value::Null, &["field `hidden_size`", "nothing: the field is missing"]),
        ("hidden_size", json!("64"), &["field `hidden_size`", "an integer", "found \"64\""]),
        ("hidden_size", json!(-1), &["found -1"]),
        ("hidden_size", json!(1e30), &["field `hidden_size`"]),
        ("num_hidden_layers", json!(u64::MAX), &["field `num_hidden_layers`", "from 0 to 4096"]),
        (
            "num_experts_per_tok",
            json!(9),
            &["field `num_experts_per_tok`", "at most the number of experts, 8"],
        ),
        ("hidden_act", json!("gelu"), &["field `hidden_act`", "expected `silu`, found `gelu`"]),
        (
            "model_type",
            json!("llama"),
            &["model_type `llama` is not supported", "the supported types are", "mixtral"],
        ),
    ];
    for (field, value, expected) in cases {
        let sandbox = Sandbox::of("mixtral");
        sandbox.config(|config| drop(config.insert(field.into(), value)));
        sandbox.refused(&[&["config.json"], expected].concat());
    }
}

#[test]
fn a_field_that_may_matter_is_refused_by_name() {
    for field in
        ["moe_shiny_new_option", "expert_capacity", "use_Router_magic", "topk_mode", "swiglu_beta", "x_gate"]
    {
        let sandbox = Sandbox::of("qwen3_moe");
        sandbox.config(|config| drop(config.insert(field.into(), json!(1))));
        sandbox.refused(&["config.json", &format!("config field `{field}` is not supported"), "qwen3_moe"]);
    }
    let sandbox = Sandbox::of("qwen3_moe");
    sandbox.config(|config| {
        config.insert("some_other_option".into(), json!(1));
        config.insert("router_aux_loss_coef".into(), json!(0.5));
    });
    sandbox.open().unwrap();
    let sandbox = Sandbox::of("deepseek_v3");
    sandbox.config(|config| drop(config.insert("scoring_func".into(), json!("softmax"))));
    sandbox.refused(&["field `scoring_func`", "expected `sigmoid`, found \"softmax\""]);
}

#[test]
fn quantisation_that_is_not_supported_is_refused_by_name() {
    let cases = [
        (json!({"quant_method": "awq", "bits": 4}), "quantization_config.quant_method = awq"),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "quantization_config.fmt = e5m2"),
        (
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
            "format = pack-quantized",
        ),
        (
            json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights":
                {"num_bits": 4, "type": "int", "strategy": "group"}}}}),
            "config_groups.group_0.weights.num_bits = 4",
        ),
    ];
    for (quantization, expected) in cases {
        let sandbox = Sandbox::of("qwen3_moe");
        sandbox.config(|config| drop(config.insert("quantization_config".into(), quantization)));
        sandbox.refused(&["config.json", expected, "is not supported", "the supported methods are `fp8`"]);
    }
}

#[test]
fn fp8_without_or_with_wrong_scales() {
    let fp8 = SynthConfig { format: SynthFormat::Fp8, ..SynthConfig::new("qwen3_moe") };
    let scale = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv";
    let sandbox = Sandbox::new(&fp8);
    sandbox.rename_tensor(scale, "other");
    sandbox.refused(&[scale, "is missing", "FP8, which needs scales"]);
    let sandbox = Sandbox::new(&fp8);
    sandbox.config(|config| config["quantization_config"]["weight_block_size"] = json!([32, 32]));
    sandbox.refused(&["weight_scale_inv` has shape [1, 1], expected [3, 2]", "blocks of 32×32"]);
}

#[test]
fn token_tables_with_invalid_experts() {
    let sandbox = Sandbox::new(&SynthConfig { layers: 4, ..SynthConfig::new("deepseek_v4") });
    let path = sandbox.path("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let (header, _) = split(&bytes);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let name = "model.layers.1.ffn.gate.tid2eid";
    let start = header[name]["data_offsets"][0].as_u64().unwrap() as usize + bytes.len()
        - header.values().filter_map(|info| info["data_offsets"][1].as_u64()).max().unwrap() as usize;
    for (value, expected) in
        [(8i64, "lists expert 8 for token 0"), (-1, "lists expert -1"), (i64::MAX, "lists expert")]
    {
        let mut broken = bytes.clone();
        broken[start..start + 8].copy_from_slice(&value.to_le_bytes());
        fs::write(&path, &broken).unwrap();
        let error = sandbox.open().unwrap().gate(LayerId(1)).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{error}");
    }
    let mut twice = bytes;
    let second: [u8; 8] = twice[start + 8..start + 16].try_into().unwrap();
    twice[start..start + 8].copy_from_slice(&second);
    fs::write(&path, &twice).unwrap();
    let error = sandbox.open().unwrap().gate(LayerId(1)).unwrap_err().to_string();
    assert!(error.contains("twice for token 0"), "{error}");
}

#[test]
fn directories_without_weights_or_config() {
    let empty = tempfile::tempdir().unwrap();
    let message = Checkpoint::open(empty.path()).unwrap_err().to_string();
    assert!(message.contains("config.json: cannot open it"), "{message}");
    let sandbox = Sandbox::of("mixtral");
    fs::rename(sandbox.path("model.safetensors"), sandbox.path("pytorch_model.bin")).unwrap();
    sandbox.refused(&["model.safetensors.index.json here, found config.json, pytorch_model.bin"]);
    let message = Checkpoint::open(Path::new("/nowhere/at/all")).unwrap_err().to_string();
    assert!(message.contains("/nowhere/at/all/config.json: cannot open it"), "{message}");
}

fn sharded() -> Sandbox {
    Sandbox::new(&SynthConfig { max_shard_bytes: 200_000, ..SynthConfig::new("qwen3_moe") })
}

#[test]
fn missing_and_mislabelled_shards() {
    let sandbox = sharded();
    let second = fs::read_dir(sandbox.dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains("model-00002-of"))
        .expect("more than one shard");
    fs::remove_file(&second).unwrap();
    sandbox.refused(&["model-00002-of", "cannot open it"]);

    let sandbox = sharded();
    let index = sandbox.path("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace("model-00001-of", "../model-00001-of")).unwrap();
    sandbox.refused(&["index.json", "is listed in \"../model-00001-of", "expected a file name"]);
    fs::write(&index, "{").unwrap();
    sandbox.refused(&["index.json", "not a usable JSON file"]);
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let name = "model.layers.0.mlp.gate.weight";
    let first = json["weight_map"][name].as_str().unwrap().to_owned();
    for file in json["weight_map"].as_object_mut().unwrap().values_mut() {
        if file.as_str() != Some(first.as_str()) {
            *file = first.clone().into();
        }
    }
    fs::write(&index, json.to_string()).unwrap();
    sandbox.refused(&["is missing", "model.safetensors.index.json lists it in this file"]);
}

#[test]
fn layers_and_experts_out_of_range() {
    let sandbox = Sandbox::of("deepseek_v3");
    let checkpoint = sandbox.open().unwrap();
    let beyond = checkpoint.expert(LayerId(2), ExpertId(0)).unwrap_err();
    assert_eq!(beyond.to_string(), "the model has no layer 2: it has 2 layers, 0 to 1");
    let dense = checkpoint.shared(LayerId(0)).unwrap_err();
    assert_eq!(dense.to_string(), "layer 0 has no MoE block: it is dense");
    let expert = checkpoint.expert(LayerId(1), ExpertId(8)).unwrap_err();
    assert_eq!(expert.to_string(), "layer 1 has no expert 8: it has 8");
}

mod fuzz {
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;

    /// Opens the checkpoint and, if that succeeds, reads everything once: nothing may panic, whatever the bytes.
    fn survive(dir: &Path) {
        let Ok(checkpoint) = Checkpoint::open(dir) else { return };
        let layers: Vec<LayerId> = checkpoint.spec().moe_layers().map(|(layer, _)| layer).collect();
        for layer in layers {
            let _ = checkpoint.gate(layer);
            let _ = checkpoint.shared(layer);
            let moe = checkpoint.spec().layer(layer).unwrap();
            let last = ExpertId(u32::try_from(moe.experts.count - 1).unwrap());
            let _ = checkpoint.expert(layer, last);
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
            which in 0usize..4,
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
            which in 0usize..4,
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
}
