//! Tests of declarations as public quantisation tools write them, around tensors that other tests check in their own formats.

use serde_json::{Value, json};

use crate::layouts::{self, quantised, scale_of};
use crate::packed_layouts::{compressed, put_awq, put_gptq, same, stored};
use safetensors::Dtype;

/// What AutoRound writes for integers of 4 bits, without the fields that matter to it alone.
fn auto_round(packing: Option<&str>, group: i32) -> Value {
    let mut declared = json!({"quant_method": "auto-round", "bits": 4, "data_type": "int", "group_size": group, "sym": false,
        "iters": 0, "autoround_version": "0.16.1", "block_name_to_quantize": "model.layers",
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
            "model.layers.0.self_attn.q_proj": {"bits": 8}}});
    if let Some(packing) = packing {
        declared["packing_format"] = json!(packing);
    }
    declared
}

#[test]
fn auto_round_packs_integers_as_gptq_and_awq_do() {
    for (packing, first_version) in [
        (None, true),
        (Some("auto_round:auto_gptq"), true),
        (Some("auto_round"), false),
        (Some("auto_round:gptqmodel"), false),
    ] {
        for group in [32, -1] {
            same(stored(auto_round(packing, group), |module| put_gptq(module, group, first_version)));
        }
    }
    same(stored(auto_round(Some("auto_round:auto_awq"), 32), |module| put_awq(module, 32)));
}

#[test]
fn auto_round_declares_fp8_by_the_shape_of_a_group() {
    let declared = |group: Value| json!({"quant_method": "auto-round", "bits": 8, "data_type": "fp", "group_size": group});
    let blocks = |[rows, cols]: [usize; 2]| (vec![rows.div_ceil(40), cols.div_ceil(40)], [40; 2]);
    let (mut parts, expected) = quantised("_scale_inv", Dtype::F32, blocks, scale_of);
    parts.config.insert("quantization_config".into(), declared(json!([40, 40])));
    layouts::same(&parts, &expected);
    let rows = |[rows, cols]: [usize; 2]| (vec![rows], [1, cols]);
    let (mut parts, expected) = quantised("_scale", Dtype::F32, rows, scale_of);
    parts.config.insert("quantization_config".into(), declared(json!(-1)));
    layouts::same(&parts, &expected);
}

#[test]
fn modelopt_keeps_the_dimensions_of_scales_of_blocks() {
    let kept = |[rows, cols]: [usize; 2]| (vec![rows.div_ceil(128), 1, cols.div_ceil(128), 1], [128; 2]);
    let (mut parts, expected) = quantised("_scale", Dtype::F32, kept, scale_of);
    let declared = json!({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": ["lm_head"]});
    parts.config.insert("quantization_config".into(), declared);
    layouts::same(&parts, &expected);
}

#[test]
fn other_modules_may_be_in_formats_that_are_not_supported() {
    // Attention in integers of 8 bits, experts in 4.
    let rules = json!({"-:.*gate$": {}, "+:.*self_attn.*": {"bits": 8, "group_size": 64}});
    let declared = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": rules});
    same(stored(declared, |module| put_gptq(module, 32, true)));
    // Attention in integers of 8 bits or in FP8 blocks, experts in FP8 with a scale per row.
    for other in [
        json!({"num_bits": 8, "type": "int", "strategy": "channel"}),
        json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
    ] {
        let rows = |[rows, cols]: [usize; 2]| (vec![rows, 1], [1, cols]);
        let (mut parts, expected) = quantised("_scale", Dtype::BF16, rows, scale_of);
        let mut declared = compressed("mixed-precision", &other);
        declared["config_groups"]["group_1"] = json!({"targets": ["re:.*experts.*"], "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}});
        parts.config.insert("quantization_config".into(), declared);
        layouts::same(&parts, &expected);
    }
}

#[test]
fn experts_of_other_bits_are_refused_in_words() {
    let declared = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:.*down_proj": {"bits": 8}}});
    let (mut parts, _) = stored(declared, |module| put_gptq(module, 32, true));
    let name = "model.layers.1.mlp.experts.2.down_proj.qweight";
    let (rows, cols) = (layouts::HIDDEN, layouts::WIDTH);
    parts.put(name.into(), Dtype::I32, &[cols / 4, rows], vec![0; cols * rows]);
    let message = parts.open().unwrap_err().to_string();
    for expected in [name, "holds integers of 8 bits, expected 4 bits", "quantise them with 4 bits"] {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn rotations_of_rows_are_refused_and_those_of_weights_are_not() {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
    let transform = |location: &str| {
        json!({"config_groups": {"R": {"type": "hadamard", "apply": [
            {"targets": ["re:.*v_proj$"], "location": "weight_output"},
            {"targets": ["re:.*down_proj$"], "location": location}]}}})
    };
    let rows = |[rows, cols]: [usize; 2]| (vec![rows, 1], [1, cols]);
    let (mut parts, expected) = quantised("_scale", Dtype::BF16, rows, scale_of);
    let mut declared = compressed("float-quantized", &weights);
    declared["transform_config"] = transform("weight_input");
    parts.config.insert("quantization_config".into(), declared.clone());
    layouts::same(&parts, &expected);
    declared["transform_config"] = transform("input");
    parts.config.insert("quantization_config".into(), declared);
    let message = parts.open().unwrap_err().to_string();
    let named =
        "quantization_config.transform_config.config_groups.R.apply with location input is not supported";
    assert!(message.contains(named) && message.contains("quantise again without rotations"), "{message}");
    for (place, named) in [
        ("", ""),
        ("model.layers.0.mlp.experts.0.up_proj", "extra_config.model.layers.0.mlp.experts.0.up_proj."),
    ] {
        let mut declared = auto_round(None, 32);
        let fields = if place.is_empty() { &mut declared } else { &mut declared["extra_config"][place] };
        fields["rotation_config"] = json!({"block_size": 32, "hadamard_type": "hadamard"});
        let (parts, _) = stored(declared, |module| put_gptq(module, 32, true));
        let message = parts.open().unwrap_err().to_string();
        let expected = format!("quantization_config.{named}rotation_config is not supported");
        assert!(message.contains(&expected), "{message}");
    }
}
