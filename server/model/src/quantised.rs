//! Lookup of the weights of one linear module in INT4, NVFP4, MXFP4 or MXFP8, with scales and zero points in tensors of their own.
//! The names and types of the tensors tell the format, which must be one that the config declares.

mod stack;

use safetensors::Dtype;

use super::ModelError;
use super::plan::{Factor, GroupsRef, MatrixRef, ScalesRef, ZerosRef};
use super::quant::{Int4, Int4Layout, Quantization};
use super::store::{Store, TensorId};
use crate::{Packing, ScaleFormat, WeightFormat};

pub(super) use stack::Nvfp4Stack;

type Found = (MatrixRef, u64);

/// The tensors of a linear module.
struct Module<'a> {
    store: &'a mut Store,
    name: &'a str,
    rows: usize,
    cols: usize,
    /// The config fields that the shape follows from.
    reason: &'a str,
    /// Size of what was found, in bytes.
    bytes: u64,
}

/// Finds the weights `[rows, cols]` of a module, if they are in one of these formats.
pub(super) fn find(
    store: &mut Store,
    quantization: Quantization,
    name: &str,
    [rows, cols]: [usize; 2],
    reason: &str,
) -> Result<Option<Found>, ModelError> {
    let mut module = Module { store, name, rows, cols, reason, bytes: 0 };
    if module.has("qweight") {
        return module.qweight(quantization.int4).map(Some);
    }
    if module.has("weight_packed") {
        return module.weight_packed(quantization).map(Some);
    }
    if !module.has("weight") {
        return match quantization.int4 {
            // The error names the tensor that the declared method would have.
            Some(Int4 { layout: Int4Layout::Gptq { .. } | Int4Layout::Awq, .. }) => {
                Err(module.missing("qweight"))
            }
            Some(_) => Err(module.missing("weight_packed")),
            None => Ok(None),
        };
    }
    let weight = module.find("weight")?;
    match module.dtype(weight) {
        // ModelOpt stores MXFP4 under the same names as NVFP4, less the second scale.
        Dtype::U8 if quantization.mxfp4 && !module.has("weight_scale_2") => {
            let scales = module.find("weight_scale")?;
            module.mx(weight, scales, WeightFormat::Mxfp4).map(Some)
        }
        Dtype::U8 if quantization.nvfp4 => module.nvfp4(weight, "weight_scale_2", Factor::Of).map(Some),
        Dtype::F8_E4M3 if quantization.mxfp8 => {
            let scales = module.first_of(["weight_scale", "weight_scale_inv"])?;
            // A checkpoint with several formats may have other FP8 modules, whose scales are numbers.
            if quantization.fp8 && !matches!(module.dtype(scales), Dtype::U8 | Dtype::F8_E8M0) {
                return Ok(None);
            }
            module.mx(weight, scales, WeightFormat::Mxfp8).map(Some)
        }
        _ => Ok(None),
    }
}

impl Module<'_> {
    fn tensor_name(&self, leaf: &str) -> String {
        format!("{}.{leaf}", self.name)
    }

    fn has(&self, leaf: &str) -> bool {
        self.store.has(&self.tensor_name(leaf))
    }

    fn missing(&self, leaf: &str) -> ModelError {
        self.store.missing(&self.tensor_name(leaf), self.reason)
    }

    fn find(&mut self, leaf: &str) -> Result<TensorId, ModelError> {
        self.store.find(&self.tensor_name(leaf), self.reason)
    }

    /// The first tensor that the checkpoint has, or else an error about the first name.
    fn first_of(&mut self, leaves: [&str; 2]) -> Result<TensorId, ModelError> {
        let leaf = leaves.into_iter().find(|leaf| self.has(leaf)).unwrap_or(leaves[0]);
        self.find(leaf)
    }

    fn dtype(&self, id: TensorId) -> Dtype {
        self.store.info(id).dtype
    }

    /// Checks the type and shape of a tensor and counts its bytes.
    fn expect(&mut self, id: TensorId, dtypes: &[Dtype], shape: &[usize]) -> Result<(), ModelError> {
        if !dtypes.contains(&self.dtype(id)) {
            let names: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
            return Err(self.store.wrong_dtype(id, &names.join(" or ")));
        }
        self.store.expect_shape(id, shape, self.reason)?;
        self.bytes += self.store.bytes(id).len() as u64;
        Ok(())
    }

    /// Finds scales of shape `shape`.
    fn scales(&mut self, leaf: &str, shape: &[usize]) -> Result<(TensorId, ScaleFormat), ModelError> {
        let id = self.find(leaf)?;
        self.expect(id, &[Dtype::F16, Dtype::BF16, Dtype::F32], shape)?;
        let format = match self.dtype(id) {
            Dtype::F16 => ScaleFormat::F16,
            Dtype::BF16 => ScaleFormat::Bf16,
            _ => ScaleFormat::F32,
        };
        Ok((id, format))
    }

    /// Checks that a side of the matrix is a multiple of what its format stores together.
    fn expect_multiple(&self, id: TensorId, what: &str, size: usize, of: usize) -> Result<(), ModelError> {
        if size.is_multiple_of(of) {
            return Ok(());
        }
        let reason = format!("stores {what}, but {size} (from config.json) is not a multiple of {of}");
        Err(self.store.wrong_contents(id, reason))
    }

    /// Checks that the config declares the format of a tensor.
    fn expect_declared(&self, id: TensorId, declared: bool, format: &str) -> Result<(), ModelError> {
        if declared {
            return Ok(());
        }
        let reason = format!("is the weights of {format}, which `quantization_config` does not declare");
        Err(self.store.wrong_contents(id, reason))
    }

    fn done(self, matrix: MatrixRef) -> Found {
        (matrix, self.bytes)
    }

    /// `qweight` of GPTQ or AWQ.
    fn qweight(mut self, declared: Option<Int4>) -> Result<Found, ModelError> {
        let weight = self.find("qweight")?;
        let (rows, cols) = (self.rows, self.cols);
        let int4 = declared.filter(|int4| !matches!(int4.layout, Int4Layout::Compressed { .. }));
        self.expect_declared(weight, int4.is_some(), "GPTQ or AWQ")?;
        let Some(Int4 { layout, group }) = int4 else { return Err(self.missing("weight")) };
        let of_awq = layout == Int4Layout::Awq;
        let (four, packed) = if of_awq { ([cols, rows / 8], 1) } else { ([cols / 8, rows], 0) };
        self.expect_four_bits(weight, four, packed)?;
        self.expect_multiple(weight, "8 outputs in each word of zero points", rows, 8)?;
        let group = group.unwrap_or(cols);
        let groups = cols.div_ceil(group);
        // `[rows, cols]` are the module's; tensors have them the other way round.
        let (packing, row_stride, col_stride, zeros) = match layout {
            Int4Layout::Gptq { zero_bias, reordered } => {
                self.expect_multiple(weight, "8 inputs in each word", cols, 8)?;
                self.expect(weight, &[Dtype::I32], &[cols / 8, rows])?;
                self.group_index("g_idx", group, reordered)?;
                (Packing::ColumnWords, 8, 8 * rows, (Packing::RowWords, zero_bias))
            }
            _ => {
                self.expect_multiple(weight, &format!("groups of {group} inputs"), cols, group)?;
                self.expect(weight, &[Dtype::I32], &[cols, rows / 8])?;
                (Packing::AwqWords, 8, rows, (Packing::AwqWords, 0))
            }
        };
        let (scales, format) = self.scales("scales", &[groups, rows])?;
        let zero_points = self.find("qzeros")?;
        self.expect(zero_points, &[Dtype::I32], &[groups, rows / 8])?;
        let (zero_packing, bias) = zeros;
        let scales = ScalesRef::Groups(GroupsRef {
            tensor: scales,
            format,
            first: 0,
            cols: group.min(cols),
            row_stride: 1,
            group_stride: rows,
            factor: Factor::One,
            zeros: Some(ZerosRef {
                tensor: zero_points,
                packing: zero_packing,
                row_stride: 8,
                group_stride: rows,
                bias,
            }),
        });
        let whole = MatrixRef::by_rows(weight, WeightFormat::Int4, [rows, cols], scales);
        Ok(self.done(MatrixRef { packing, row_stride, col_stride, ..whole }))
    }

    /// Refuses a tensor whose shape shows integers of 2, 3 or 8 bits. With 4 bits its shape would be `four`; dimension `packed`
    /// grows with the bits.
    fn expect_four_bits(&self, id: TensorId, four: [usize; 2], packed: usize) -> Result<(), ModelError> {
        let of_bits = |bits: usize| {
            let mut shape = four;
            shape[packed] = four[packed] * bits / 4;
            shape
        };
        let shape = &self.store.info(id).shape;
        match [2, 3, 8].into_iter().find(|bits| *shape == of_bits(*bits)) {
            Some(bits) => {
                let reason = format!(
                    "holds integers of {bits} bits, expected 4 bits, the only ones that are supported in MoE blocks; quantise them \
                     with 4 bits, or not at all"
                );
                Err(self.store.wrong_contents(id, reason))
            }
            None => Ok(()),
        }
    }

    /// Checks the tensor with the group of each column, if there is one. Its contents are checked if they may differ from the order
    /// of columns; they are not read otherwise, as in the libraries that write it.
    fn group_index(&mut self, leaf: &str, group: usize, reordered: bool) -> Result<(), ModelError> {
        if !self.has(leaf) {
            return Ok(());
        }
        let id = self.find(leaf)?;
        let bytes = self.bytes;
        self.expect(id, &[Dtype::I32], &[self.cols])?;
        self.bytes = bytes;
        if !reordered {
            return Ok(());
        }
        let found = self.store.integers(id);
        let wrong = (0_i64..).zip(&found).find(|(col, found)| **found != col / group as i64);
        let Some((col, found)) = wrong else { return Ok(()) };
        let reason = format!(
            "puts column {col} into group {found}, expected group {}, because only groups of neighbouring columns are supported; \
             quantise again without reordering (`desc_act` false; `actorder` \"static\" or none)",
            col / group as i64
        );
        Err(self.store.wrong_contents(id, reason))
    }

    /// `weight_packed` of compressed-tensors: its type tells integers from FP4, and the type of its scales NVFP4 from MXFP4.
    fn weight_packed(mut self, quantization: Quantization) -> Result<Found, ModelError> {
        let weight = self.find("weight_packed")?;
        match self.dtype(weight) {
            Dtype::I32 => {
                let int4 = quantization.int4;
                let Some(Int4 { layout: Int4Layout::Compressed { zero_points }, group }) = int4 else {
                    self.expect_declared(weight, false, "4-bit integers of compressed-tensors")?;
                    return Err(self.missing("weight"));
                };
                self.integers(weight, group, zero_points)
            }
            Dtype::U8 => {
                let scales = self.find("weight_scale")?;
                if matches!(self.dtype(scales), Dtype::U8 | Dtype::F8_E8M0) {
                    self.expect_declared(weight, quantization.mxfp4, "MXFP4")?;
                    return self.mx(weight, scales, WeightFormat::Mxfp4);
                }
                self.expect_declared(weight, quantization.nvfp4, "NVFP4")?;
                self.nvfp4(weight, "weight_global_scale", Factor::Reciprocal)
            }
            _ => Err(self.store.wrong_dtype(weight, "I32 (4-bit integers) or U8 (NVFP4, MXFP4)")),
        }
    }

    /// Integers of compressed-tensors.
    fn integers(
        mut self,
        weight: TensorId,
        group: Option<usize>,
        zero_points: bool,
    ) -> Result<Found, ModelError> {
        let (rows, cols) = (self.rows, self.cols);
        let group = group.unwrap_or(cols);
        self.expect_four_bits(weight, [rows, cols.div_ceil(8)], 1)?;
        self.expect_multiple(weight, &format!("groups of {group} inputs"), cols, group)?;
        let (words, groups) = (cols.div_ceil(8), cols / group);
        self.expect(weight, &[Dtype::I32], &[rows, words])?;
        let (scales, format) = self.scales("weight_scale", &[rows, groups])?;
        let zeros = if zero_points {
            let id = self.find("weight_zero_point")?;
            self.expect(id, &[Dtype::I32], &[rows.div_ceil(8), groups])?;
            let (packing, row_stride, group_stride) = (Packing::RowWords, 8 * groups, 8);
            Some(ZerosRef { tensor: id, packing, row_stride, group_stride, bias: 0 })
        } else {
            None
        };
        let shape = self.find("weight_shape")?;
        let bytes = self.bytes;
        self.expect(shape, &[Dtype::I32, Dtype::I64], &[2])?;
        self.bytes = bytes;
        self.group_index("weight_g_idx", group, true)?;
        let scales = ScalesRef::Groups(GroupsRef {
            tensor: scales,
            format,
            first: 0,
            cols: group,
            row_stride: groups,
            group_stride: 1,
            factor: Factor::One,
            zeros,
        });
        let whole = MatrixRef::by_rows(weight, WeightFormat::Int4, [rows, cols], scales);
        Ok(self.done(MatrixRef { row_stride: 8 * words, shape: Some(shape), ..whole }))
    }

    /// NVFP4, with the factor of all scales in the tensor `factor`.
    fn nvfp4(
        mut self,
        weight: TensorId,
        factor: &str,
        how: fn(TensorId, usize) -> Factor,
    ) -> Result<Found, ModelError> {
        let (rows, cols) = (self.rows, self.cols);
        self.expect_multiple(weight, "blocks of 16 inputs", cols, 16)?;
        self.expect(weight, &[Dtype::U8], &[rows, cols / 2])?;
        let scales = self.find("weight_scale")?;
        self.expect(scales, &[Dtype::F8_E4M3], &[rows, cols / 16])?;
        let factor = self.find(factor)?;
        let one: &[usize] = if self.store.info(factor).shape.is_empty() { &[] } else { &[1] };
        self.expect(factor, &[Dtype::F32], one)?;
        let scales = ScalesRef::Groups(GroupsRef {
            tensor: scales,
            format: ScaleFormat::Fp8E4m3,
            first: 0,
            cols: 16,
            row_stride: cols / 16,
            group_stride: 1,
            factor: how(factor, 0),
            zeros: None,
        });
        Ok(self.done(MatrixRef::by_rows(weight, WeightFormat::Nvfp4, [rows, cols], scales)))
    }

    /// MXFP4 or MXFP8.
    fn mx(mut self, weight: TensorId, scales: TensorId, format: WeightFormat) -> Result<Found, ModelError> {
        let (rows, cols) = (self.rows, self.cols);
        self.expect_multiple(weight, "blocks of 32 inputs", cols, 32)?;
        match format {
            WeightFormat::Mxfp4 => self.expect(weight, &[Dtype::U8], &[rows, cols / 2])?,
            _ => self.expect(weight, &[Dtype::F8_E4M3], &[rows, cols])?,
        }
        self.expect(scales, &[Dtype::U8, Dtype::F8_E8M0], &[rows, cols / 32])?;
        let scales = ScalesRef::Mx { tensor: scales, first: 0, row_stride: cols / 32 };
        Ok(self.done(MatrixRef::by_rows(weight, format, [rows, cols], scales)))
    }
}
