//! Tests that errors about unusable checkpoints name file, tensor or field, and what was expected and found.

mod garbled;

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
    let group = |weights: Value| {
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
               "config_groups": {"group_0": {"weights": weights}}})
    };
    let cases = [
        (json!({"quant_method": "bitsandbytes"}), "quantization_config.quant_method = bitsandbytes"),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "quantization_config.fmt = e5m2"),
        (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "format = marlin-24"),
        (group(json!({"num_bits": 3, "type": "int"})), "config_groups.group_0.weights.num_bits = 3"),
        (group(json!({"num_bits": 8, "type": "int"})), "config_groups.group_0.weights.type = \"int\""),
        (
            group(json!({"num_bits": 4, "type": "int", "strategy": "tensor"})),
            "config_groups.group_0.weights.strategy = \"tensor\"",
        ),
        (
            group(json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32})),
            "config_groups.group_0.weights.group_size = 32",
        ),
        (json!({"quant_method": "gptq", "bits": 8, "group_size": 128}), "quantization_config.bits = 8"),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}),
            "quantization_config.checkpoint_format = marlin",
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*down_proj": {"bits": 8}}}),
            "quantization_config.dynamic.+:.*down_proj.bits = 8",
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}),
            "quantization_config.version = gemv",
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": false}),
            "quantization_config.zero_point = false",
        ),
        (
            json!({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4_AWQ"}}),
            "quantization_config.quantization.quant_algo = \"NVFP4_AWQ\"",
        ),
        (
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}),
            "quantization_config.group_size = 32",
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

/// A checkpoint of each format whose weights take several tensors.
fn packed(format: SynthFormat) -> Sandbox {
    Sandbox::new(&SynthConfig { format, ..SynthConfig::new("qwen3_moe") })
}

#[test]
fn parts_of_quantised_weights_that_are_missing_or_of_another_shape() {
    let module = "model.layers.1.mlp.experts.2.down_proj.";
    // Format, tensor, what takes its place in the header, parts of the message.
    let cases = [
        (SynthFormat::Int4, "weight_scale", json!({"shape": [32, 6]}), "has shape [32, 6], expected [64, 3]"),
        (
            SynthFormat::Int4,
            "weight_packed",
            json!({"dtype": "F32"}),
            "is stored as F32, expected I32 (4-bit integers) or U8",
        ),
        (
            SynthFormat::Int4,
            "weight_packed",
            json!({"shape": [32, 24]}),
            "has shape [32, 24], expected [64, 12]",
        ),
        (SynthFormat::Int4, "weight_shape", json!({"shape": [1, 2]}), "has shape [1, 2], expected [2]"),
        (SynthFormat::Int4Gptq, "qzeros", json!({"shape": [8, 3]}), "has shape [8, 3], expected [3, 8]"),
        (
            SynthFormat::Int4Gptq,
            "qweight",
            json!({"shape": [6, 128]}),
            "has shape [6, 128], expected [12, 64]",
        ),
        (SynthFormat::Int4Gptq, "g_idx", json!({"shape": [2, 48]}), "has shape [2, 48], expected [96]"),
        (
            SynthFormat::Int4Awq,
            "scales",
            json!({"dtype": "I16"}),
            "is stored as I16, expected F16 or BF16 or F32",
        ),
        (SynthFormat::Nvfp4, "weight_scale", json!({"dtype": "U8"}), "is stored as U8, expected F8_E4M3"),
        (SynthFormat::Nvfp4, "weight_scale_2", json!({"dtype": "I32"}), "is stored as I32, expected F32"),
        (
            SynthFormat::Mxfp8,
            "weight_scale",
            json!({"shape": [32, 6]}),
            "has shape [32, 6], expected [64, 3]",
        ),
    ];
    for (format, leaf, change, expected) in cases {
        let name = format!("{module}{leaf}");
        let sandbox = packed(format);
        sandbox.header(|header| {
            for (field, value) in change.as_object().unwrap() {
                header[&name][field] = value.clone();
            }
        });
        sandbox.refused(&[&name, expected]);
        if leaf != "g_idx" {
            let sandbox = packed(format);
            sandbox.rename_tensor(&name, "other");
            sandbox.refused(&[&name, "is missing"]);
        }
    }
}

#[test]
fn groups_that_do_not_divide_and_formats_that_are_not_declared() {
    for (format, field) in [(SynthFormat::Int4Awq, "group_size"), (SynthFormat::Int4, "")] {
        let sandbox = packed(format);
        sandbox.config(|config| {
            let declared = &mut config["quantization_config"];
            match field {
                "" => declared["config_groups"]["group_0"]["weights"]["group_size"] = json!(40),
                field => declared[field] = json!(40),
            }
        });
        sandbox.refused(&["groups of 40 inputs", "64 (from config.json) is not a multiple of 40"]);
    }
    let sandbox = packed(SynthFormat::Nvfp4);
    sandbox.config(|config| drop(config.remove("quantization_config")));
    sandbox.refused(&["is stored as U8, expected BF16, F16, F32, F8_E4M3 with scales, or U8"]);
    let sandbox = packed(SynthFormat::Int4Gptq);
    sandbox.config(|config| config["quantization_config"] = json!({"quant_method": "mxfp4"}));
    sandbox.refused(&["qweight", "GPTQ or AWQ, which `quantization_config` does not declare"]);
    let sandbox = packed(SynthFormat::Int4);
    sandbox.config(|config| config["quantization_config"] = json!({"quant_method": "mxfp8"}));
    sandbox.refused(&["weight_packed", "4-bit integers of compressed-tensors, which `quantization_config`"]);
}

/// Writes other bytes in place of the first ones of a tensor.
fn overwrite(sandbox: &Sandbox, tensor: &str, contents: &[u8]) {
    let path = sandbox.path("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (header, data) = split(&bytes);
    let start = bytes.len() - data.len();
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let at = start + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + contents.len()].copy_from_slice(contents);
    fs::write(path, bytes).unwrap();
}

#[test]
fn contents_that_contradict_headers_are_found_when_an_expert_is_read() {
    let module = "model.layers.1.mlp.experts.2.up_proj.";
    let nan = f32::NAN.to_le_bytes();
    let cases = [
        (
            SynthFormat::Int4,
            "weight_shape",
            &[65, 0, 0, 0][..],
            "holds the shape [65, 64], expected [96, 64]",
        ),
        (SynthFormat::Nvfp4, "weight_scale_2", &[0; 4], "is 0, expected a positive number"),
        (SynthFormat::Nvfp4, "weight_scale_2", &nan, "is NaN, expected a positive number"),
    ];
    for (format, leaf, contents, expected) in cases {
        let sandbox = packed(format);
        overwrite(&sandbox, &format!("{module}{leaf}"), contents);
        let checkpoint = sandbox.open().unwrap();
        checkpoint.expert(LayerId(1), ExpertId(1)).unwrap();
        let error = checkpoint.expert(LayerId(1), ExpertId(2)).unwrap_err().to_string();
        assert!(error.contains(leaf) && error.contains(expected), "{error}");
    }
}

#[test]
fn a_quantised_gate_is_refused_in_words() {
    let sandbox = packed(SynthFormat::Int4Gptq);
    for layer in 0..2 {
        let gate = format!("model.layers.{layer}.mlp.gate.");
        sandbox.rename_tensor(&format!("{gate}weight"), &format!("{gate}qweight"));
    }
    sandbox.refused(&[
        "mlp.gate.weight` is missing",
        "found `model.layers.0.mlp.gate.qweight`",
        "quantise experts only",
    ]);
}

#[test]
fn columns_in_another_order_are_refused_with_the_way_out() {
    let declare = |sandbox: &Sandbox, desc_act: bool| {
        sandbox.config(|config| config["quantization_config"]["desc_act"] = json!(desc_act));
    };
    let sandbox = packed(SynthFormat::Int4Gptq);
    declare(&sandbox, true);
    // In the order of columns, which some releases are in spite of `desc_act`.
    sandbox.open().unwrap();
    overwrite(&sandbox, "model.layers.1.mlp.experts.2.down_proj.g_idx", &[1, 0, 0, 0]);
    sandbox.refused(&[
        "g_idx",
        "puts column 0 into group 1, expected group 0",
        "quantise again without reordering",
    ]);
    declare(&sandbox, false);
    sandbox.open().unwrap();
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
