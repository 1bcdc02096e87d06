//! Tests of config fields that describe each layer by itself, or that have several names.

use super::*;

fn blocks(sandbox: &Sandbox) -> Vec<u32> {
    let checkpoint = sandbox.open().unwrap_or_else(|error| panic!("{error}"));
    checkpoint.spec().moe_layers().map(|(layer, _)| layer.0).collect()
}

/// A checkpoint with three layers, the first of them dense in families that have dense layers.
fn three_layers(family: &str) -> Sandbox {
    Sandbox::new(&SynthConfig { layers: 3, ..SynthConfig::new(family) })
}

#[test]
fn flags_name_the_layers_that_have_a_block() {
    for (family, field, flags) in [
        ("mimo_v2_flash", "moe_layer_freq", json!([0, 0, 1])),
        ("exaone_moe", "is_moe_layer", json!([false, false, true])),
        // One entry more describes the layer that predicts a further token.
        ("mimo_v2_flash", "moe_layer_freq", json!([0, 0, 1, 0])),
    ] {
        let sandbox = three_layers(family);
        assert_eq!(blocks(&sandbox), [1, 2], "{family}");
        let set = |flags: Value| {
            sandbox.config(|config| {
                config.remove("mlp_layer_types");
                config.insert(field.into(), flags);
            });
        };
        set(flags);
        assert_eq!(blocks(&sandbox), [2], "{family}");
        set(json!([1, 0, 1]));
        sandbox.refused(&["model.layers.0.mlp", "is missing"]);
        set(json!([0, 1]));
        sandbox.refused(&[field, "a list of 3 entries, one for each layer", "2 entries"]);
        set(json!([0, 1, 2]));
        sandbox.refused(&[field, "a list of 0 and 1, or of true and false"]);
        // The types of layers count more than flags.
        set(json!([1, 1, 1]));
        sandbox.config(|config| {
            drop(config.insert("mlp_layer_types".into(), json!(["dense", "sparse", "dense"])))
        });
        assert_eq!(blocks(&sandbox), [1], "{family}");
    }
}

#[test]
fn a_period_and_an_offset_name_the_layers_that_have_a_block() {
    let sandbox = Sandbox::new(&SynthConfig { layers: 5, ..SynthConfig::new("jamba") });
    for (period, offset, expected) in [(1, 0, vec![0, 1, 2, 3, 4]), (2, 1, vec![1, 3]), (3, 0, vec![0, 3])] {
        sandbox.config(|config| {
            config.insert("expert_layer_period".into(), json!(period));
            config.insert("expert_layer_offset".into(), json!(offset));
        });
        assert_eq!(blocks(&sandbox), expected);
    }
    sandbox.config(|config| {
        config.remove("expert_layer_period");
        config.remove("expert_layer_offset");
    });
    assert_eq!(blocks(&sandbox), [1, 3], "the reference implementation's default");
    sandbox.config(|config| drop(config.insert("expert_layer_offset".into(), json!(2))));
    sandbox.refused(&["a model without MoE layers", "every layer is dense"]);
}

#[test]
fn one_value_for_each_layer_must_be_the_same_for_all() {
    let sandbox = Sandbox::of("hunyuan_v1_moe");
    sandbox.config(|config| {
        config.insert("moe_topk".into(), json!([3, 3]));
        config.insert("moe_intermediate_size".into(), json!([96, 96]));
        config.insert("num_shared_expert".into(), json!([1, 1]));
    });
    let checkpoint = sandbox.open().unwrap();
    assert_eq!(checkpoint.spec().moe_layers().map(|(_, moe)| moe.gate.top_k).collect::<Vec<_>>(), [3, 3]);
    for (field, list, expected) in [
        ("moe_topk", json!([3, 2]), "an integer from 0 to 32, the same for every layer"),
        ("moe_topk", json!([]), "an integer from 0 to 32, the same for every layer"),
        ("moe_intermediate_size", json!([104, 104]), "96, the value of `intermediate_size`"),
        ("num_shared_expert", json!([1, 2]), "expected `1`, found [1,2]"),
        ("num_shared_expert", json!([]), "expected `1`, found []"),
    ] {
        let sandbox = Sandbox::of("hunyuan_v1_moe");
        sandbox.config(|config| drop(config.insert(field.into(), list)));
        sandbox.refused(&[field, expected]);
    }
}

#[test]
fn two_names_of_one_field_must_agree() {
    let sandbox = Sandbox::of("kimi_linear");
    sandbox.config(|config| drop(config.insert("norm_topk_prob".into(), json!(true))));
    sandbox.open().unwrap();
    sandbox.config(|config| drop(config.insert("norm_topk_prob".into(), json!(false))));
    sandbox.refused(&["norm_topk_prob", "true, the value of `moe_renormalize`", "found false"]);
}

#[test]
fn arithmetic_that_a_family_may_have_and_the_service_lacks_is_refused() {
    for (family, field, value) in [
        ("laguna", "moe_router_logit_softcapping", json!(30.0)),
        ("laguna", "moe_apply_router_weight_on_input", json!(true)),
        ("afmoe", "score_func", json!("softmax")),
        ("afmoe", "num_limited_groups", json!(2)),
        ("bailing_hybrid", "score_function", json!("softmax")),
        ("hunyuan_v1_moe", "use_mixed_mlp_moe", json!(false)),
        ("hy_v3", "route_norm", json!(false)),
        ("lfm2_moe", "use_expert_bias", json!(false)),
        ("minimax", "shared_intermediate_size", json!(8)),
        ("mimo_v2_flash", "n_shared_experts", json!(1)),
    ] {
        let sandbox = Sandbox::of(family);
        sandbox.config(|config| drop(config.insert(field.into(), value.clone())));
        sandbox.refused(&["config.json", &format!("field `{field}`"), &format!("found {value}")]);
    }
}

/// The arrangement of a whole Qwen3-Omni checkpoint, whose text model is the thinker's.
#[test]
fn the_text_part_of_a_thinker_is_found() {
    let sandbox = Sandbox::of("qwen3_moe");
    let plain = sandbox.open().unwrap();
    sandbox.header(|header| {
        let moved = std::mem::take(header).into_iter();
        header.extend(moved.map(|(name, info)| (name.replace("model.layers", "thinker.model.layers"), info)));
    });
    sandbox.config(|config| {
        let mut text = std::mem::take(config);
        text.insert("model_type".into(), json!("qwen3_omni_moe_text"));
        config.insert("model_type".into(), json!("qwen3_omni_moe"));
        config.insert("talker_config".into(), json!({"text_config": {"num_experts": 4, "hidden_size": 8}}));
        config.insert("thinker_config".into(), json!({"text_config": text, "audio_config": {"d_model": 8}}));
    });
    let nested = sandbox.open().unwrap();
    assert_eq!((nested.spec().family.as_str(), nested.spec().hidden), ("qwen3_omni_moe_text", 64));
    assert_eq!(nested.spec().layers, plain.spec().layers);
    sandbox.config(|config| config["thinker_config"]["text_config"]["num_experts"] = json!("many"));
    sandbox.refused(&["field `thinker_config.text_config.num_experts`", "an integer from 0 to 65536"]);
    sandbox.config(|config| config["thinker_config"]["text_config"] = json!(3));
    sandbox.refused(&["field `thinker_config.text_config`", "an object", "a number"]);
}
