//! Tests of quantised checkpoints that are declared, shaped or filled wrongly.

use super::*;

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
        (json!({"quant_method": "auto-round", "bits": 2, "group_size": 128}), "quantization_config.bits = 2"),
        (
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:marlin"}),
            "quantization_config.packing_format = auto_round:marlin",
        ),
        (
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "nv_fp4"}),
            "quantization_config.group_size = 32",
        ),
        (
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 16, "data_type": "nv_fp4_e5m3"}),
            "quantization_config.data_type = nv_fp4_e5m3",
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}),
            "quantization_config.version = gemv",
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
