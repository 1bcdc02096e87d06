//! The declarations of compressed-tensors, which llm-compressor and Kimi-K2 write.

use serde_json::{Map, Value};

use super::{Int4, Int4Layout, Quantization, block_size, flag, show, text, unsupported};
use crate::ModelError;
use crate::config::Config;

/// Names of storage formats whose tensors are understood. The tensors themselves tell which of them one has.
const FORMATS: [&str; 7] = [
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
];

pub(super) fn read(config: &Config, map: &Map<String, Value>) -> Result<Quantization, ModelError> {
    check_format(config, map, "format")?;
    let mut found = Quantization::default();
    let groups = map.get("config_groups").and_then(Value::as_object);
    let mut integers = Vec::new();
    let mut understood = false;
    let mut refused = None;
    for (name, group) in groups.into_iter().flatten() {
        match add(config, name, group, &mut found, &mut integers) {
            Ok(weights) => understood |= weights,
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    // Another group may be that of attention only: tensors of experts in a format that is not understood are refused by their types.
    if let Some(error) = refused.filter(|_| !understood) {
        return Err(error);
    }
    found.int4 = integers.first().copied();
    if integers.windows(2).any(|pair| pair[0] != pair[1]) {
        let field = "quantization_config.config_groups";
        let expected = "the same groups, symmetry and strategy in every group of 4-bit integers";
        return Err(config.wrong_text(field, expected, "different ones"));
    }
    // Releases without groups were FP8 with one scale for each tensor.
    found.fp8 |= groups.is_none_or(Map::is_empty);
    Ok(found)
}

/// Adds the format of the weights of a group, if it has any.
fn add(
    config: &Config,
    name: &str,
    group: &Value,
    found: &mut Quantization,
    integers: &mut Vec<Int4>,
) -> Result<bool, ModelError> {
    let Some(group) = group.as_object() else { return Ok(false) };
    check_format(config, group, &format!("config_groups.{name}.format"))?;
    let Some(weights) = group.get("weights").and_then(Value::as_object) else { return Ok(false) };
    Group { config, name, weights }.add(found, integers)?;
    Ok(true)
}

fn check_format(config: &Config, map: &Map<String, Value>, field: &str) -> Result<(), ModelError> {
    match text(map, "format") {
        Some(format) if !FORMATS.contains(&&*format) => Err(unsupported(config, field, &format)),
        _ => Ok(()),
    }
}

/// The weights of one entry of `config_groups`.
struct Group<'a> {
    config: &'a Config,
    name: &'a str,
    weights: &'a Map<String, Value>,
}

impl Group<'_> {
    fn field(&self, leaf: &str) -> String {
        format!("config_groups.{}.weights.{leaf}", self.name)
    }

    fn refuse<T>(&self, leaf: &str) -> Result<T, ModelError> {
        Err(unsupported(self.config, &self.field(leaf), &show(self.weights.get(leaf))))
    }

    /// Adds the format of these weights.
    fn add(&self, found: &mut Quantization, integers: &mut Vec<Int4>) -> Result<(), ModelError> {
        let bits = self.weights.get("num_bits").and_then(Value::as_u64);
        match (bits, text(self.weights, "type").as_deref()) {
            (Some(8), Some("float")) => self.eight_bits(found),
            (Some(4), Some("float")) => self.four_bits(found),
            (Some(4), Some("int")) => {
                integers.push(self.integers()?);
                Ok(())
            }
            (Some(4 | 8), _) => self.refuse("type"),
            _ => self.refuse("num_bits"),
        }
    }

    fn eight_bits(&self, found: &mut Quantization) -> Result<(), ModelError> {
        match text(self.weights, "strategy").as_deref() {
            Some("tensor" | "channel") => {
                found.fp8 = true;
                found.fp8_rows = true;
            }
            Some("block") => {
                let value = self.weights.get("block_structure").cloned().unwrap_or(Value::Null);
                let name = format!("quantization_config.{}", self.field("block_structure"));
                found.fp8 = true;
                found.block = Some(block_size(self.config, &name, &value)?);
            }
            Some("group") => {
                self.expect_group(32)?;
                found.mxfp8 = true;
            }
            _ => return self.refuse("strategy"),
        }
        Ok(())
    }

    fn four_bits(&self, found: &mut Quantization) -> Result<(), ModelError> {
        match text(self.weights, "strategy").as_deref() {
            Some("tensor_group") => {
                self.expect_group(16)?;
                found.nvfp4 = true;
            }
            Some("group") => {
                self.expect_group(32)?;
                found.mxfp4 = true;
            }
            _ => return self.refuse("strategy"),
        }
        Ok(())
    }

    fn integers(&self) -> Result<Int4, ModelError> {
        let group = match text(self.weights, "strategy").as_deref() {
            Some("channel") => None,
            Some("group") => match self.weights.get("group_size").and_then(Value::as_u64) {
                Some(size @ 1..=65536) => Some(size as usize),
                _ => return self.refuse("group_size"),
            },
            _ => return self.refuse("strategy"),
        };
        let zero_points = self.weights.contains_key("symmetric") && !flag(self.weights, "symmetric");
        Ok(Int4 { layout: Int4Layout::Compressed { zero_points }, group })
    }

    fn expect_group(&self, size: u64) -> Result<(), ModelError> {
        if self.weights.get("group_size").and_then(Value::as_u64) == Some(size) {
            return Ok(());
        }
        self.refuse("group_size")
    }
}
