//! Packed matrices outside their process: their description, and how a matrix is made from its bytes again.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::groups::GroupLayout;
use super::memory::AlignedBuffer;
use super::packed::PackedMatrix;
use super::simd_level::SimdLevel;
use super::storage::{SharedBytes, Storage};
use expertd_model::WeightFormat;

/// The largest number of features of a stored matrix.
const MAX_FEATURES: usize = 1 << 24;

/// The description of a [`PackedMatrix`] apart from its bytes.
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
    /// Whether 128 neighbouring output features of each projection, from a multiple of 128 on, have the same FP8 scales, apart from
    /// those that span all input features.
    pub has_square_scales: bool,
    /// Scales within the blocks; `None` if the format has none.
    pub groups: Option<GroupLayout>,
}

/// Why stored bytes are no packed matrix that this process can use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum StoredError {
    #[error("the matrix is packed for {found}, expected {expected}, which this process computes with")]
    Level { found: SimdLevel, expected: SimdLevel },
    #[error("a matrix of {n} output and {k} input features, {scale_blocks} blocks per scale, is impossible")]
    Sizes { n: usize, k: usize, scale_blocks: usize },
    #[error("a packed matrix in {format} cannot have {found:?} as scales within its blocks")]
    Groups { format: WeightFormat, found: Option<GroupLayout> },
    #[error(
        "the {what} of a matrix lie at bytes {range:?}, expected {expected} bytes, aligned, within {memory} bytes"
    )]
    Bytes { what: &'static str, range: Range<usize>, expected: usize, memory: usize },
}

impl PackedMatrix {
    /// The description of the matrix apart from its bytes.
    #[must_use]
    pub const fn form(&self) -> PackedForm {
        PackedForm {
            level: self.level,
            format: self.format,
            n: self.n,
            k: self.k,
            interleaved: self.interleaved,
            scale_blocks: self.scale_blocks,
            has_square_scales: self.has_square_scales,
            groups: self.groups,
        }
    }

    /// The packed elements.
    pub fn elements(&self) -> &[u8] {
        &self.data
    }

    /// The packed scales; empty for formats without any.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// A matrix of the same form in memory of its own, which is resident. Its contents are zeros.
    #[must_use]
    pub(crate) fn blank(&self) -> PackedMatrix {
        PackedMatrix {
            data: Storage::Own(AlignedBuffer::resident(self.data.len())),
            scales: Storage::Own(AlignedBuffer::resident(self.scales.len())),
            ..*self
        }
    }

    /// Overwrites the contents with those of `other`.
    ///
    /// # Panics
    /// If the forms differ, or this matrix lies in shared memory.
    pub(crate) fn copy_from(&mut self, other: &PackedMatrix) {
        assert_eq!(self.form(), other.form(), "a matrix is copied over one of another form");
        self.data.own_mut().copy_from_slice(&other.data);
        self.scales.own_mut().copy_from_slice(&other.scales);
    }

    /// Overwrites the contents with bytes of 0xff, which are NaN in most formats.
    ///
    /// # Panics
    /// If this matrix lies in shared memory.
    pub(crate) fn poison(&mut self) {
        self.data.own_mut().fill(0xff);
        self.scales.own_mut().fill(f32::NAN);
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
        let PackedForm { level, format, n, k, interleaved, scale_blocks, has_square_scales, groups } = form;
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
            groups.is_possible()
                && (!groups.zeros || format == WeightFormat::Int4)
                && (format != WeightFormat::Mxfp8 || groups == GroupLayout::MX)
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
            has_square_scales,
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
mod tests;
