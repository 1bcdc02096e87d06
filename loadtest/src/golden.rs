//! Recorded rows with their answers.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use crate::Error;
use expertd_types::{DType, rows};

/// Recorded rows of one layer.
#[derive(Clone, Debug)]
pub struct GoldenLayer {
    /// Number of rows.
    pub tokens: usize,
    /// Input rows, `[tokens, hidden]`.
    pub input: Vec<f32>,
    /// Output rows, `[tokens, hidden]`.
    pub output: Vec<f32>,
}

/// Recorded layers of one model.
#[derive(Clone, Debug, Default)]
pub struct Golden {
    /// Recorded layers by number.
    pub layers: BTreeMap<u32, GoldenLayer>,
    /// One token id per row, if recorded.
    pub token_ids: Vec<i32>,
}

impl Golden {
    /// Reads `layers.L.input`, `layers.L.output` (f32, `[tokens, hidden]`) and `input_ids` from a safetensors file.
    ///
    /// # Errors
    /// If the file cannot be read, or its rows do not have `hidden` columns.
    pub fn read(path: &Path, hidden: usize) -> Result<Golden, Error> {
        let bad = |reason: String| Error::Golden { path: path.to_owned(), reason };
        let data = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
        let file = SafeTensors::deserialize(&data).map_err(|error| bad(error.to_string()))?;
        let rows = |name: &str| {
            let view = file.tensor(name).map_err(|error| bad(error.to_string()))?;
            if view.dtype() != Dtype::F32 || view.shape().len() != 2 || view.shape()[1] != hidden {
                let (shape, dtype) = (view.shape(), view.dtype());
                return Err(bad(format!(
                    "{name}: expected F32 [tokens, {hidden}] (the model's hidden size), found {dtype:?} {shape:?}"
                )));
            }
            Ok(rows::decode(view.data(), DType::F32))
        };
        let mut golden = Golden::default();
        for name in file.names() {
            let layer = name.strip_prefix("layers.").and_then(|rest| rest.strip_suffix(".input"));
            let Some(layer) = layer.and_then(|digits| digits.parse::<u32>().ok()) else { continue };
            let (input, output) = (rows(name)?, rows(&format!("layers.{layer}.output"))?);
            if input.len() != output.len() {
                return Err(bad(format!("layer {layer}: input and output have different numbers of rows")));
            }
            let tokens = input.len() / hidden;
            golden.layers.insert(layer, GoldenLayer { tokens, input, output });
        }
        if golden.layers.is_empty() {
            return Err(bad(
                "expected tensors named layers.L.input and layers.L.output, found none".to_owned()
            ));
        }
        if let Ok(ids) = file.tensor("input_ids") {
            golden.token_ids = match ids.dtype() {
                Dtype::I32 => {
                    ids.data().as_chunks::<4>().0.iter().map(|&word| i32::from_le_bytes(word)).collect()
                }
                _ => {
                    let words = ids.data().as_chunks::<8>().0.iter();
                    words.map(|&word| i64::from_le_bytes(word) as i32).collect()
                }
            };
        }
        Ok(golden)
    }
}
