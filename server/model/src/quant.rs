//! `quantization_config`: the storage formats that a checkpoint declares.

use serde_json::{Map, Value};

use super::ModelError;
use super::config::Config;

/// The declared storage formats of weights. Tensors stored in bf16, f16 or f32 do not depend on them; those in FP8 and
/// MXFP4 are checked against them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Quantization {
    /// Whether FP8 may occur.
    pub(super) fp8: bool,
    /// Whether MXFP4 may occur.
    pub(super) mxfp4: bool,
    /// `[rows, cols]` of an FP8 scale block, if scales are per block.
    pub(super) block: Option<[usize; 2]>,
    /// Whether rows that are quantised to FP8 get scales that are powers of two (`scale_fmt` = ue8m0).
    pub(super) power_of_two_scales: bool,
}

const SUPPORTED: &str = "the supported methods are `fp8` (e4m3; scales per block, channel or tensor), `compressed-tensors` with \
     8-bit float weights, and `mxfp4`; convert the checkpoint, or use its bf16 release";

impl Quantization {
    /// Reads `quantization_config`. Without it nothing is quantised.
    pub(super) fn read(config: &Config) -> Result<Self, ModelError> {
        let Some(map) = config.quantization()? else { return Ok(Self::default()) };
        let method = text(map, "quant_method");
        match method.as_deref() {
            Some("fp8") => Self::fp8(config, map),
            Some("mxfp4") => Ok(Self { mxfp4: true, ..Self::default() }),
            Some("compressed-tensors") => Self::compressed_tensors(config, map),
            _ => Err(unsupported(config, "quant_method", method.as_deref().unwrap_or("(none)"))),
        }
    }

    fn fp8(config: &Config, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let format = text(map, "fmt");
        if !matches!(format.as_deref(), None | Some("e4m3" | "float8_e4m3fn")) {
            return Err(unsupported(config, "fmt", &format.unwrap_or_default()));
        }
        let block = match map.get("weight_block_size") {
            None | Some(Value::Null) => None,
            Some(value) => Some(block_size(config, "quantization_config.weight_block_size", value)?),
        };
        let power_of_two_scales = text(map, "scale_fmt").as_deref() == Some("ue8m0");
        Ok(Self { fp8: true, block, power_of_two_scales, ..Self::default() })
    }

    fn compressed_tensors(config: &Config, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let format = text(map, "format");
        if !matches!(format.as_deref(), None | Some("float-quantized" | "naive-quantized")) {
            return Err(unsupported(config, "format", &format.unwrap_or_default()));
        }
        let mut found = Self { fp8: true, ..Self::default() };
        let groups = map.get("config_groups").and_then(Value::as_object);
        for (name, group) in groups.into_iter().flatten() {
            let Some(weights) = group.get("weights").and_then(Value::as_object) else { continue };
            let field = |leaf: &str| format!("config_groups.{name}.weights.{leaf}");
            if weights.get("num_bits").and_then(Value::as_u64) != Some(8) {
                return Err(unsupported(config, &field("num_bits"), &show(weights.get("num_bits"))));
            }
            if text(weights, "type").as_deref() != Some("float") {
                return Err(unsupported(config, &field("type"), &show(weights.get("type"))));
            }
            match text(weights, "strategy").as_deref() {
                Some("tensor" | "channel") => {}
                Some("block") => {
                    let value = weights.get("block_structure").cloned().unwrap_or(Value::Null);
                    let name = format!("quantization_config.{}", field("block_structure"));
                    found.block = Some(block_size(config, &name, &value)?);
                }
                _ => return Err(unsupported(config, &field("strategy"), &show(weights.get("strategy")))),
            }
        }
        Ok(found)
    }
}

fn block_size(config: &Config, field: &str, value: &Value) -> Result<[usize; 2], ModelError> {
    let sides: Option<Vec<u64>> = value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    match sides.as_deref() {
        Some(&[rows @ 1..=65536, cols @ 1..=65536]) => Ok([rows as usize, cols as usize]),
        _ => Err(config.wrong(field, "two positive numbers, such as [128, 128]", value)),
    }
}

fn text(map: &Map<String, Value>, field: &str) -> Option<String> {
    map.get(field).and_then(Value::as_str).map(str::to_owned)
}

fn show(value: Option<&Value>) -> String {
    value.map_or_else(|| "nothing".into(), Value::to_string)
}

fn unsupported(config: &Config, field: &str, value: &str) -> ModelError {
    ModelError::Unsupported {
        path: config.path().to_owned(),
        what: format!("quantization_config.{field} = {value}"),
        why: SUPPORTED.into(),
    }
}
