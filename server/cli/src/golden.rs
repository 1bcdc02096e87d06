//! Recorded inputs and outputs of MoE blocks (`golden.safetensors`).
//!
//! For every MoE layer L the file has `layers.L.input` and `layers.L.output` `[tokens, hidden]` f32 and, if the recorded
//! block exposes them, `layers.L.topk_ids` i32 and `layers.L.topk_weights` f32 `[tokens, k]`. `input_ids` has one token id
//! per row.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use super::exit::CommandError;
use expertd_proto::v1::Routing;
use expertd_types::DType;
use expertd_types::rows::{decode_f32, decode_i32, encode, encode_i32};

/// Routing of the recorded rows.
#[derive(Clone, Debug)]
pub struct GoldenRouting {
    /// Number of experts per row.
    pub k: usize,
    /// `[tokens, k]`.
    pub ids: Vec<i32>,
    /// `[tokens, k]`, the factors that expert outputs are multiplied by.
    pub weights: Vec<f32>,
}

impl GoldenRouting {
    /// The routing of some rows as a call carries it.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> Routing {
        let span = rows.start * self.k..rows.end * self.k;
        Routing {
            topk_ids: encode_i32(&self.ids[span.clone()]),
            topk_weights: encode(&self.weights[span], DType::F32),
            k: u32::try_from(self.k).unwrap_or(u32::MAX),
        }
    }
}

/// One recorded layer.
#[derive(Clone, Debug)]
pub struct GoldenLayer {
    /// Number of rows.
    pub tokens: usize,
    /// Number of columns.
    pub hidden: usize,
    /// `[tokens, hidden]`.
    pub input: Vec<f32>,
    /// `[tokens, hidden]`.
    pub output: Vec<f32>,
    /// The routing, if it was recorded.
    pub routing: Option<GoldenRouting>,
}

/// The recorded layers of one model.
#[derive(Clone, Debug)]
pub struct Golden {
    /// The recorded layers by index.
    pub layers: BTreeMap<u32, GoldenLayer>,
    /// One token id per row; empty if none were recorded.
    pub token_ids: Vec<i32>,
}

impl Golden {
    /// Reads a file.
    ///
    /// # Errors
    /// If the file cannot be read, is not a safetensors file, has no recorded layer, or a tensor has the wrong shape or type.
    pub fn read(path: &Path) -> Result<Golden, CommandError> {
        let name = path.display();
        let data = std::fs::read(path)
            .map_err(|error| CommandError::usage(format!("cannot read {name}: {error}")))?;
        let tensors = SafeTensors::deserialize(&data).map_err(|error| {
            CommandError::usage(format!("{name} is not a valid safetensors file: {error}"))
        })?;
        let reader = Reader { path, tensors };
        let mut layers = BTreeMap::new();
        for name in reader.tensors.names() {
            let layer = name.strip_prefix("layers.").and_then(|rest| rest.strip_suffix(".input"));
            if let Some(layer) = layer.and_then(|digits| digits.parse().ok()) {
                layers.insert(layer, reader.layer(layer)?);
            }
        }
        if layers.is_empty() {
            return Err(CommandError::usage(format!(
                "{name} has no recorded layer: expected tensors layers.L.input and layers.L.output"
            )));
        }
        Ok(Golden { layers, token_ids: reader.token_ids()? })
    }
}

/// Number of rows, number of columns and bytes of a matrix.
type Matrix<'a> = (usize, usize, &'a [u8]);

struct Reader<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl Reader<'_> {
    fn bad(&self, tensor: &str, expected: &str, found: String) -> CommandError {
        let path = self.path.display();
        CommandError::usage(format!("{path}: tensor {tensor}: expected {expected}, found {found}"))
    }

    /// The matrix `name` of type `dtype`, or `None` if the file does not have it.
    fn matrix(&self, name: &str, dtype: Dtype) -> Result<Option<Matrix<'_>>, CommandError> {
        let Ok(view) = self.tensors.tensor(name) else { return Ok(None) };
        match *view.shape() {
            [rows, columns] if view.dtype() == dtype => Ok(Some((rows, columns, view.data()))),
            _ => Err(self.bad(
                name,
                &format!("a matrix of {dtype:?}"),
                format!("{:?} of {:?}", view.shape(), view.dtype()),
            )),
        }
    }

    fn layer(&self, layer: u32) -> Result<GoldenLayer, CommandError> {
        let tensor = |what: &str| format!("layers.{layer}.{what}");
        let missing = |what: &str| self.bad(&tensor(what), "to be present", "no such tensor".to_owned());
        let (tokens, hidden, input) =
            self.matrix(&tensor("input"), Dtype::F32)?.ok_or_else(|| missing("input"))?;
        let (rows, columns, output) =
            self.matrix(&tensor("output"), Dtype::F32)?.ok_or_else(|| missing("output"))?;
        if (rows, columns) != (tokens, hidden) {
            return Err(self.bad(
                &tensor("output"),
                &format!("the input's shape [{tokens}, {hidden}]"),
                format!("[{rows}, {columns}]"),
            ));
        }
        let ids = self.matrix(&tensor("topk_ids"), Dtype::I32)?;
        let weights = self.matrix(&tensor("topk_weights"), Dtype::F32)?;
        let routing = match (ids, weights) {
            (None, None) => None,
            (Some((id_rows, k, ids)), Some((rows, columns, weights))) => {
                if (id_rows, k) != (rows, columns) || rows != tokens {
                    return Err(self.bad(
                        &tensor("topk_ids and topk_weights"),
                        &format!("both [{tokens}, k]"),
                        format!("[{id_rows}, {k}] and [{rows}, {columns}]"),
                    ));
                }
                Some(GoldenRouting { k, ids: decode_i32(ids), weights: decode_f32(weights) })
            }
            (Some(_), None) => return Err(missing("topk_weights")),
            (None, Some(_)) => return Err(missing("topk_ids")),
        };
        Ok(GoldenLayer { tokens, hidden, input: decode_f32(input), output: decode_f32(output), routing })
    }

    fn token_ids(&self) -> Result<Vec<i32>, CommandError> {
        let Ok(view) = self.tensors.tensor("input_ids") else { return Ok(Vec::new()) };
        match view.dtype() {
            Dtype::I32 => Ok(decode_i32(view.data())),
            Dtype::I64 => view
                .data()
                .as_chunks::<8>()
                .0
                .iter()
                .map(|&word| {
                    let id = i64::from_le_bytes(word);
                    i32::try_from(id)
                        .map_err(|_| self.bad("input_ids", "ids that fit 32 bits", id.to_string()))
                })
                .collect(),
            other => Err(self.bad("input_ids", "I32 or I64", format!("{other:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use safetensors::tensor::TensorView;

    use super::*;

    fn file(tensors: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)>) -> tempfile::NamedTempFile {
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()))
            .collect::<Vec<_>>();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), safetensors::serialize(views, None).unwrap()).unwrap();
        file
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn layers_routing_and_token_ids_are_read() {
        let rows = floats(&[1.0, 2.0, 3.0, 4.0]);
        let file = file(vec![
            ("layers.3.input", Dtype::F32, vec![2, 2], rows.clone()),
            ("layers.3.output", Dtype::F32, vec![2, 2], rows.clone()),
            ("layers.3.topk_ids", Dtype::I32, vec![2, 1], vec![5, 0, 0, 0, 6, 0, 0, 0]),
            ("layers.3.topk_weights", Dtype::F32, vec![2, 1], floats(&[0.5, 0.25])),
            ("layers.10.input", Dtype::F32, vec![2, 2], rows.clone()),
            ("layers.10.output", Dtype::F32, vec![2, 2], rows),
            ("input_ids", Dtype::I64, vec![1, 2], [9_i64.to_le_bytes(), 11_i64.to_le_bytes()].concat()),
        ]);
        let golden = Golden::read(file.path()).unwrap();
        assert_eq!(golden.layers.keys().copied().collect::<Vec<_>>(), [3, 10]);
        assert_eq!(golden.token_ids, [9, 11]);
        let routing = golden.layers[&3].routing.as_ref().unwrap();
        assert_eq!((routing.k, routing.ids.as_slice()), (1, [5, 6].as_slice()));
        assert!(golden.layers[&10].routing.is_none());
    }

    #[test]
    fn errors_name_the_wrong_tensor() {
        let rows = floats(&[1.0, 2.0]);
        let wrong = file(vec![
            ("layers.0.input", Dtype::F32, vec![1, 2], rows.clone()),
            ("layers.0.output", Dtype::F32, vec![2, 1], rows.clone()),
        ]);
        let message = Golden::read(wrong.path()).unwrap_err().to_string();
        assert!(message.contains("layers.0.output") && message.contains("[2, 1]"), "{message}");
        let lonely = file(vec![("layers.0.input", Dtype::F32, vec![1, 2], rows)]);
        let message = Golden::read(lonely.path()).unwrap_err().to_string();
        assert!(message.contains("layers.0.output"), "{message}");
        let empty = file(vec![("logits", Dtype::F32, vec![1], floats(&[1.0]))]);
        assert!(Golden::read(empty.path()).unwrap_err().to_string().contains("has no recorded layer"));
    }
}
