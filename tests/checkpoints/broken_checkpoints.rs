//! Tests that errors about unusable checkpoints name file, tensor or field, and what was expected and found.

mod garbled;
mod layer_lists;
mod quantised;

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

    /// Rewrites the header of the single file and keeps its data.
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

/// A pipe in the place of a file would be waited for, and a device may have no end.
#[test]
fn files_that_are_no_files() {
    let sandbox = Sandbox::of("mixtral");
    for (name, device) in [("model.safetensors", "/dev/zero"), ("config.json", "/dev/zero")] {
        fs::remove_file(sandbox.path(name)).unwrap();
        std::os::unix::fs::symlink(device, sandbox.path(name)).unwrap();
        sandbox.refused(&[name, "expected a regular file, found a pipe, socket or device"]);
        fs::remove_file(sandbox.path(name)).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, sandbox.path(name), rustix::fs::FileType::Fifo, mode, 0)
            .unwrap();
        sandbox.refused(&[name, "expected a regular file, found a pipe, socket or device"]);
    }
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
