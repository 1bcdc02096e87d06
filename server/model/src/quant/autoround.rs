//! The declarations of AutoRound's own format, whose tensors are those of GPTQ, AWQ or compressed-tensors.

use serde_json::{Map, Value};

use super::packed::{expect_four_bits, group_size};
use super::{Int4, Int4Layout, Quantization, block_size, show, text, unsupported};
use crate::ModelError;
use crate::config::Config;

pub(super) fn read(config: &Config, map: &Map<String, Value>) -> Result<Quantization, ModelError> {
    let kind = text(map, "data_type").unwrap_or_else(|| "int".into());
    let bits = map.get("bits").and_then(Value::as_u64);
    let none = Quantization::default();
    // Entries of `extra_config` for single modules are not read: the types and shapes of tensors show what they say.
    match (kind.as_str(), bits) {
        ("int", _) => integers(config, map),
        (kind, Some(4)) if kind.starts_with("nv_fp") && !kind.contains("e5m3") => {
            expect_group(config, map, 16)?;
            Ok(Quantization { nvfp4: true, ..none })
        }
        (kind, Some(4)) if kind.starts_with("mx_fp") => {
            expect_group(config, map, 32)?;
            Ok(Quantization { mxfp4: true, ..none })
        }
        (kind, Some(8)) if kind.starts_with("mx_fp") => {
            expect_group(config, map, 32)?;
            Ok(Quantization { mxfp8: true, ..none })
        }
        (kind, Some(8)) if kind.starts_with("fp") => {
            let field = "quantization_config.group_size";
            let sides = map.get("group_size").filter(|value| value.is_array());
            let block = sides.map(|value| block_size(config, field, value)).transpose()?;
            Ok(Quantization { fp8: true, block, ..none })
        }
        (_, Some(4 | 8)) => Err(unsupported(config, "data_type", &kind)),
        _ => Err(unsupported(config, "bits", &show(map.get("bits")))),
    }
}

fn integers(config: &Config, map: &Map<String, Value>) -> Result<Quantization, ModelError> {
    expect_four_bits(config, map, "bits")?;
    let packing = text(map, "packing_format").unwrap_or_else(|| "auto_round:auto_gptq".into());
    let layout = match packing.as_str() {
        "auto_round:auto_gptq" => Int4Layout::Gptq { zero_bias: 1, reordered: false },
        "auto_round" | "auto_round:gptqmodel" => Int4Layout::Gptq { zero_bias: 0, reordered: false },
        "auto_round:auto_awq" => Int4Layout::Awq,
        _ => return Err(unsupported(config, "packing_format", &packing)),
    };
    let group = group_size(config, map, &["group_size"])?;
    Ok(Quantization { int4: Some(Int4 { layout, group }), ..Quantization::default() })
}

fn expect_group(config: &Config, map: &Map<String, Value>, size: u64) -> Result<(), ModelError> {
    if map.get("group_size").and_then(Value::as_u64) == Some(size) {
        return Ok(());
    }
    Err(unsupported(config, "group_size", &show(map.get("group_size"))))
}
