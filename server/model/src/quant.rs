//! `quantization_config`: the storage formats that a checkpoint declares.

mod autoround;
mod compressed;
mod modelopt;
mod packed;
mod rotations;

use serde::Serialize;
use serde_json::{Map, Value};

use super::ModelError;
use super::config::Config;

/// The declared storage formats of weights. Tensors stored in bf16, f16 or f32 do not depend on them; quantised ones are
/// checked against them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Quantization {
    /// Whether FP8 with scales of blocks, channels or tensors may occur.
    pub(super) fp8: bool,
    /// Whether MXFP4 may occur.
    pub(super) mxfp4: bool,
    /// Whether MXFP8 may occur.
    pub(super) mxfp8: bool,
    /// Whether NVFP4 may occur.
    pub(super) nvfp4: bool,
    /// How INT4 is stored, if it may occur.
    pub(super) int4: Option<Int4>,
    /// `[rows, cols]` of an FP8 scale block, if scales are per block.
    pub(super) block: Option<[usize; 2]>,
    /// Whether some FP8 matrices may have a scale per channel or tensor beside others with scales per block.
    pub(super) fp8_rows: bool,
    /// Whether rows that are quantised to FP8 get scales that are powers of two (`scale_fmt` = ue8m0).
    pub(super) power_of_two_scales: bool,
}

/// How a checkpoint stores INT4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Int4 {
    pub(super) layout: Int4Layout,
    /// Columns of a group; `None` if a row is one group.
    pub(super) group: Option<usize>,
}

/// Tensors and order of INT4 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Int4Layout {
    /// `weight_packed`, `weight_scale` and, if weights are asymmetric, `weight_zero_point` of compressed-tensors.
    Compressed { zero_points: bool },
    /// `qweight`, `qzeros`, `scales` of GPTQ.
    Gptq {
        /// What is added to each zero point.
        zero_bias: u8,
        /// Whether `g_idx` may name other groups than neighbouring columns.
        reordered: bool,
    },
    /// The same names in AWQ's order.
    Awq,
}

const SUPPORTED: &str = "the supported methods are `fp8` (e4m3; scales per block, channel or tensor), `compressed-tensors` with \
     8-bit float weights (FP8, MXFP8), 4-bit float weights (NVFP4, MXFP4) or 4-bit integers (`pack-quantized`, groups or channels), \
     `gptq` and `awq` with 4 bits, `auto-round` with the tensors of one of these, `modelopt` (FP8, NVFP4, MXFP8, MXFP4), `mxfp8` and \
     `mxfp4`; convert the checkpoint, or use its bf16 \
     release";

impl Quantization {
    /// Reads `quantization_config`. Without it nothing is quantised.
    pub(super) fn read(config: &Config) -> Result<Self, ModelError> {
        let Some(map) = config.quantization()? else { return Ok(Self::default()) };
        rotations::refuse(config, map)?;
        let method = text(map, "quant_method");
        match method.as_deref() {
            Some("fp8") => Self::fp8(config, map),
            Some("mxfp4") => Ok(Self { mxfp4: true, ..Self::default() }),
            Some("mxfp8") => Self::mxfp8(config, map),
            Some("compressed-tensors") => compressed::read(config, map),
            Some("gptq") => packed::gptq(config, map),
            Some("awq") => packed::awq(config, map),
            Some("auto-round") => autoround::read(config, map),
            Some("modelopt" | "modelopt_fp4") => modelopt::read(config, map),
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

    fn mxfp8(config: &Config, map: &Map<String, Value>) -> Result<Self, ModelError> {
        if let Some(value) = map.get("weight_block_size").filter(|value| !value.is_null()) {
            let field = "quantization_config.weight_block_size";
            if block_size(config, field, value)? != [1, 32] {
                return Err(config.wrong(field, "[1, 32], the block of MXFP8", value));
            }
        }
        Ok(Self { mxfp8: true, ..Self::default() })
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

/// Whether a field is true.
fn flag(map: &Map<String, Value>, field: &str) -> bool {
    map.get(field).and_then(Value::as_bool).unwrap_or(false)
}

fn show(value: Option<&Value>) -> String {
    value.map_or_else(|| "nothing".into(), Value::to_string)
}

fn unsupported(config: &Config, field: &str, value: &str) -> ModelError {
    let (path, object) = config.quantization_place();
    ModelError::Unsupported { path, what: format!("{object}{field} = {value}"), why: SUPPORTED.into() }
}
