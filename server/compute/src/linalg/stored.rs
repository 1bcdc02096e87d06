//! Packed matrices outside their process: what describes one, and the way back from its bytes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::groups::GroupLayout;
use super::packed::PackedMatrix;
use super::simd_level::SimdLevel;
use super::storage::{SharedBytes, Storage};
use expertd_model::WeightFormat;

/// The largest number of features of a stored matrix.
const MAX_FEATURES: usize = 1 << 24;

/// What describes a [`PackedMatrix`], apart from its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedForm {
    /// The level whose kernels read the matrix.
    pub level: SimdLevel,
    /// Format of the elements.
    pub format: WeightFormat,
    /// Output features, of both projections for a gated pair.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Whether the matrix holds a gate and an up projection.
    pub interleaved: bool,
    /// Blocks of input features that share a vector of scales.
    pub scale_blocks: usize,
    /// Scales within the blocks; `None` if the format has none.
    pub groups: Option<GroupLayout>,
}

/// Stored bytes that are no packed matrix for this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoredError {
    /// The matrix is packed for another instruction set.
    #[error("the matrix is packed for {found}, expected {expected}, which this process computes with")]
    Level {
        /// The level that it is packed for.
        found: SimdLevel,
        /// The level of this process.
        expected: SimdLevel,
    },
    /// The sizes are out of range.
    #[error("a matrix of {n} output and {k} input features, {scale_blocks} blocks per scale, is impossible")]
    Sizes {
        /// Output features.
        n: usize,
        /// Input features.
        k: usize,
        /// Blocks per scale.
        scale_blocks: usize,
    },
    /// The scales within the blocks do not fit the format.
    #[error("a packed matrix in {format} cannot have {found:?} as scales within its blocks")]
    Groups {
        /// Format of the elements.
        format: WeightFormat,
        /// What its form says.
        found: Option<GroupLayout>,
    },
    /// The bytes do not fit the sizes.
    #[error(
        "the {what} of a matrix lie at bytes {range:?}, expected {expected} bytes, aligned, within {memory} bytes"
    )]
    Bytes {
        /// `elements` or `scales`.
        what: &'static str,
        /// Where they lie.
        range: Range<usize>,
        /// Bytes that the sizes need.
        expected: usize,
        /// Bytes of the memory.
        memory: usize,
    },
}

impl PackedMatrix {
    /// What describes the matrix, apart from its bytes.
    #[must_use]
    pub const fn form(&self) -> PackedForm {
        PackedForm {
            level: self.level,
            format: self.format,
            n: self.n,
            k: self.k,
            interleaved: self.interleaved,
            scale_blocks: self.scale_blocks,
            groups: self.groups,
        }
    }

    /// The packed elements.
    #[must_use]
    pub fn elements(&self) -> &[u8] {
        &self.data
    }

    /// The packed scales; empty for formats without any.
    #[must_use]
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// The matrix whose elements and scales lie in `memory`; nothing is copied.
    ///
    /// # Errors
    /// If the matrix is not packed for this process, or the ranges do not fit its sizes.
    pub fn in_memory(
        form: PackedForm,
        memory: &SharedBytes,
        elements: Range<usize>,
        scales: Range<usize>,
    ) -> Result<Self, StoredError> {
        let PackedForm { level, format, n, k, interleaved, scale_blocks, groups } = form;
        let active = SimdLevel::active();
        if level != active {
            return Err(StoredError::Level { found: level, expected: active });
        }
        let possible = |features: usize| (1..=MAX_FEATURES).contains(&features);
        if !possible(n) || !possible(k) || !possible(scale_blocks) {
            return Err(StoredError::Sizes { n, k, scale_blocks });
        }
        let needs_groups = matches!(
            format,
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4 | WeightFormat::Int4
        );
        let possible = |groups: GroupLayout| {
            groups.is_possible() && (format != WeightFormat::Mxfp8 || groups == GroupLayout::MX)
        };
        if groups.is_some() != needs_groups || !groups.is_none_or(possible) {
            return Err(StoredError::Groups { format, found: groups });
        }
        let mut matrix = PackedMatrix {
            level,
            format,
            n,
            k,
            interleaved,
            data: Storage::empty(),
            scales: Storage::empty(),
            scale_blocks,
            groups,
        };
        let wrong = |what, range: Range<usize>, expected| StoredError::Bytes {
            what,
            range,
            expected,
            memory: (**memory).as_ref().len(),
        };
        let expected = matrix.panels() * matrix.panel_bytes();
        let data = Storage::shared(memory, elements.clone()).filter(|data| data.len() == expected);
        matrix.data = data.ok_or_else(|| wrong("elements", elements, expected))?;
        let expected = matrix.scale_count();
        let stored = Storage::shared(memory, scales.clone()).filter(|scales| scales.len() == expected);
        matrix.scales = stored.ok_or_else(|| wrong("scales", scales, expected * size_of::<f32>()))?;
        Ok(matrix)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::linalg::{AlignedBuffer, MatmulScratch, matmul};
    use expertd_model::{GroupScales, MatrixView, Packing, ScaleFormat, Scales};

    /// Memory with the elements of `matrix` at byte 64 and its scales behind them.
    fn stored(matrix: &PackedMatrix) -> (SharedBytes, Range<usize>, Range<usize>) {
        let elements = 64..64 + matrix.elements().len();
        let start = elements.end.next_multiple_of(64);
        let scales = start..start + size_of_val(matrix.scales());
        let mut memory = AlignedBuffer::<u8>::zeroed(scales.end);
        memory[elements.clone()].copy_from_slice(matrix.elements());
        memory[scales.clone()].copy_from_slice(bytemuck::cast_slice(matrix.scales()));
        struct Memory(AlignedBuffer<u8>);
        impl AsRef<[u8]> for Memory {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        (Arc::new(Memory(memory)), elements, scales)
    }

    #[test]
    fn a_matrix_in_shared_memory_gives_the_same_products() {
        let (n, k, m) = (70_usize, 200_usize, 3);
        let codes: Vec<u8> = (0..n * k).map(|i| (i * 37 % 120) as u8).collect();
        let scales = (0..n.div_ceil(128) * k.div_ceil(128)).map(|i| 0.5 + i as f32).collect::<Vec<_>>();
        let fp8 = MatrixView {
            format: WeightFormat::Fp8E4m3,
            packing: Packing::Strided,
            data: &codes,
            rows: n,
            cols: k,
            row_stride: k,
            col_stride: 1,
            scales: Scales::Block { values: scales.into(), block_rows: 128, block_cols: 128 },
        };
        // NVFP4: scales within the blocks, their factors apart.
        let groups = GroupScales {
            cols: 16,
            format: ScaleFormat::Fp8E4m3,
            data: &codes[..n * k.div_ceil(16)],
            row_stride: k.div_ceil(16),
            group_stride: 1,
            factor: 0.75,
            zeros: None,
        };
        let nvfp4 = MatrixView { format: WeightFormat::Nvfp4, scales: Scales::Groups(groups), ..fp8.clone() };
        for view in [fp8, nvfp4] {
            let matrix = PackedMatrix::pack(&view).unwrap();
            assert!(!matrix.scales().is_empty());
            let (memory, elements, scales) = stored(&matrix);
            let again = PackedMatrix::in_memory(matrix.form(), &memory, elements, scales).unwrap();
            let rows: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 - 8.0).collect();
            let product = |matrix: &PackedMatrix| {
                let mut out = vec![f32::NAN; m * n];
                matmul(&rows, matrix, &mut out, &mut MatmulScratch::new(k, 1), None);
                out
            };
            assert_eq!(product(&matrix), product(&again));
        }
    }

    #[test]
    fn bytes_that_do_not_fit_are_refused() {
        let data = vec![0_u8; 40 * 64 * 2];
        let view = MatrixView {
            format: WeightFormat::Bf16,
            packing: Packing::Strided,
            data: &data,
            rows: 40,
            cols: 64,
            row_stride: 64,
            col_stride: 1,
            scales: Scales::None,
        };
        let matrix = PackedMatrix::pack(&view).unwrap();
        let (memory, elements, scales) = stored(&matrix);
        let form = matrix.form();
        let read =
            |form, elements, scales| PackedMatrix::in_memory(form, &memory, elements, scales).map(drop);
        assert_eq!(read(form, elements.clone(), scales.clone()), Ok(()));
        let short = elements.start..elements.end - 1;
        assert!(matches!(
            read(form, short, scales.clone()),
            Err(StoredError::Bytes { what: "elements", .. })
        ));
        let beyond = elements.start + (1 << 20)..elements.end + (1 << 20);
        assert!(matches!(read(form, beyond, scales.clone()), Err(StoredError::Bytes { .. })));
        let needless = 64..68;
        assert!(matches!(
            read(form, elements.clone(), needless),
            Err(StoredError::Bytes { what: "scales", .. })
        ));
        let huge = PackedForm { n: usize::MAX, ..form };
        assert!(matches!(read(huge, elements.clone(), scales.clone()), Err(StoredError::Sizes { .. })));
        let groups = PackedForm { groups: Some(GroupLayout::MX), ..form };
        assert!(matches!(read(groups, elements.clone(), scales.clone()), Err(StoredError::Groups { .. })));
        for (format, groups) in [
            (WeightFormat::Int4, None),
            (WeightFormat::Nvfp4, Some(GroupLayout { per_block: 3, ..GroupLayout::MX })),
            (WeightFormat::Nvfp4, Some(GroupLayout { per_block: 0, ..GroupLayout::MX })),
            (WeightFormat::Mxfp8, Some(GroupLayout { zeros: true, ..GroupLayout::MX })),
        ] {
            let form = PackedForm { format, groups, ..form };
            assert!(matches!(read(form, elements.clone(), scales.clone()), Err(StoredError::Groups { .. })));
        }
        let other = SimdLevel::ALL.into_iter().find(|level| *level != SimdLevel::active()).unwrap();
        let level = PackedForm { level: other, ..form };
        assert!(matches!(read(level, elements, scales), Err(StoredError::Level { .. })));
    }
}
