//! The declarations of NVIDIA's ModelOpt, in `config.json` or in a file of their own, `hf_quant_config.json`.

use serde_json::{Map, Value};

use super::{Quantization, show, text, unsupported};
use crate::ModelError;
use crate::config::Config;

pub(super) fn read(config: &Config, map: &Map<String, Value>) -> Result<Quantization, ModelError> {
    let (inner, place) = match map.get("quantization").and_then(Value::as_object) {
        Some(inner) => (inner, "quantization."),
        None => (map, ""),
    };
    let mut found = Quantization::default();
    add(config, inner, place, &mut found)?;
    let layers = inner.get("quantized_layers").and_then(Value::as_object);
    for (name, layer) in layers.into_iter().flatten() {
        if let Some(layer) = layer.as_object() {
            add(config, layer, &format!("{place}quantized_layers.{name}."), &mut found)?;
        }
    }
    Ok(found)
}

/// Adds the format that an object names.
fn add(
    config: &Config,
    map: &Map<String, Value>,
    place: &str,
    found: &mut Quantization,
) -> Result<(), ModelError> {
    let algorithm = text(map, "quant_algo").map(|name| name.to_uppercase());
    let group = match algorithm.as_deref() {
        Some("NVFP4" | "W4A16_NVFP4") => {
            found.nvfp4 = true;
            16
        }
        Some("MXFP4") => {
            found.mxfp4 = true;
            32
        }
        Some("MXFP8") => {
            found.mxfp8 = true;
            32
        }
        Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => {
            found.fp8 = true;
            found.fp8_rows = true;
            return Ok(());
        }
        Some("FP8_PB_WO") => {
            found.fp8 = true;
            found.block = Some([128, 128]);
            return Ok(());
        }
        Some("MIXED_PRECISION") if map.contains_key("quantized_layers") => return Ok(()),
        _ => {
            return Err(unsupported(config, &format!("{place}quant_algo"), &show(map.get("quant_algo"))));
        }
    };
    match map.get("group_size").and_then(Value::as_u64) {
        Some(size) if size != group => {
            Err(unsupported(config, &format!("{place}group_size"), &size.to_string()))
        }
        _ => Ok(()),
    }
}
