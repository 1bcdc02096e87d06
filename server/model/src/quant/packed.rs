//! The declarations of GPTQ (GPTQModel, AutoGPTQ) and AWQ (AutoAWQ).

use serde_json::{Map, Value};

use super::{Int4, Int4Layout, Quantization, flag, show, text, unsupported};
use crate::ModelError;
use crate::config::Config;

pub(super) fn gptq(config: &Config, map: &Map<String, Value>) -> Result<Quantization, ModelError> {
    expect_four_bits(config, map, "bits")?;
    let format = text(map, "checkpoint_format").or_else(|| text(map, "format"));
    let zero_bias = match format.as_deref() {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(other) => return Err(unsupported(config, "checkpoint_format", other)),
    };
    if flag(map, "is_marlin_format") {
        return Err(unsupported(config, "is_marlin_format", "true"));
    }
    match text(map, "pack_dtype") {
        Some(other) if other != "int32" => return Err(unsupported(config, "pack_dtype", &other)),
        _ => {}
    }
    let group = group_size(config, map, &["group_size"])?;
    let layout = Int4Layout::Gptq { zero_bias, reordered: reordered(map) };
    Ok(Quantization { int4: Some(Int4 { layout, group }), ..Quantization::default() })
}

/// Whether columns of some matrices may be reordered: `desc_act` of the whole checkpoint, or in a rule of `dynamic`, which applies to
/// single modules. Other fields of such rules (bits, group sizes) are ignored, because they show in the shapes of tensors.
fn reordered(map: &Map<String, Value>) -> bool {
    let rules = map.get("dynamic").and_then(Value::as_object);
    let mut rules = rules.into_iter().flat_map(Map::values).filter_map(Value::as_object);
    flag(map, "desc_act") || rules.any(|rule| flag(rule, "desc_act"))
}

pub(super) fn awq(config: &Config, map: &Map<String, Value>) -> Result<Quantization, ModelError> {
    let bits = if map.contains_key("w_bit") { "w_bit" } else { "bits" };
    expect_four_bits(config, map, bits)?;
    match text(map, "version").map(|version| version.to_lowercase()) {
        Some(version) if version != "gemm" => return Err(unsupported(config, "version", &version)),
        _ => {}
    }
    // `zero_point` false means that all zero points are 8; their tensor is stored nevertheless.
    let group = group_size(config, map, &["group_size", "q_group_size"])?;
    Ok(Quantization { int4: Some(Int4 { layout: Int4Layout::Awq, group }), ..Quantization::default() })
}

pub(super) fn expect_four_bits(
    config: &Config,
    map: &Map<String, Value>,
    field: &str,
) -> Result<(), ModelError> {
    match map.get(field).and_then(Value::as_u64) {
        Some(4) => Ok(()),
        _ => Err(unsupported(config, field, &show(map.get(field)))),
    }
}

/// The columns of a group; `None` if a row is one group (-1).
pub(super) fn group_size(
    config: &Config,
    map: &Map<String, Value>,
    names: &[&str],
) -> Result<Option<usize>, ModelError> {
    let name = names.iter().find(|name| map.contains_key(**name)).unwrap_or(&names[0]);
    match map.get(*name).and_then(Value::as_i64) {
        Some(-1) => Ok(None),
        Some(size @ 1..=65536) => Ok(Some(size as usize)),
        _ => {
            let field = format!("quantization_config.{name}");
            Err(config.wrong_text(&field, "a number from 1 to 65536, or -1", &show(map.get(*name))))
        }
    }
}
