//! Scales and zero points that lie within the blocks of packed matrices.

use serde::{Deserialize, Serialize};

use expertd_model::{GroupScales, INT4_ZERO, MatrixView, ScaleFormat, Scales, WeightFormat};

/// Input features per packed block; the last block is padded with zeros.
pub(crate) const K_BLOCK: usize = 32;
/// Input features whose elements a word of 32 bits holds.
pub(crate) const OCTET: usize = 8;

/// Type of the scales within a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PackedScale {
    /// bfloat16.
    Bf16,
    /// IEEE half precision; each output has an f32 factor besides, which is stored apart from the blocks.
    F16,
    /// IEEE single precision.
    F32,
}

impl PackedScale {
    const fn bytes(self) -> usize {
        match self {
            PackedScale::Bf16 | PackedScale::F16 => 2,
            PackedScale::F32 => 4,
        }
    }
}

/// The scales and zero points at the start of each block: for each group, `P` scales and, if there are any, `P` zero
/// points of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupLayout {
    /// Groups per block of 32 input features: 1, 2 or 4. A larger group has its scale in each of its blocks.
    pub per_block: usize,
    /// Type of the scales.
    pub scale: PackedScale,
    /// Whether there are zero points.
    pub zeros: bool,
}

impl GroupLayout {
    /// One exponent per block, as a bf16 power of two.
    pub(crate) const MX: GroupLayout = GroupLayout { per_block: 1, scale: PackedScale::Bf16, zeros: false };

    /// Bytes of a group's scales and zero points in a panel of `panel` outputs.
    pub(crate) const fn group_bytes(self, panel: usize) -> usize {
        panel * (self.scale.bytes() + self.zeros as usize)
    }

    /// Bytes before the elements of a block in a panel of `panel` outputs.
    pub(crate) const fn header_bytes(self, panel: usize) -> usize {
        self.per_block * self.group_bytes(panel)
    }

    /// Whether the kernels support the layout.
    pub(crate) const fn is_possible(self) -> bool {
        matches!(self.per_block, 1 | 2 | 4)
    }

    /// The layout that holds the scales of both matrices without rounding; `None` if the groups of one of them do not
    /// consist of whole octets of input features.
    pub(super) fn of(first: &MatrixView<'_>, second: &MatrixView<'_>) -> Option<Self> {
        let (first, second) = match first.format {
            WeightFormat::Mxfp4 => return Some(Self::MX),
            // The kernels multiply scales by 2^8, and cannot convert FP8 NaN.
            WeightFormat::Mxfp8 => {
                let fits = |view: &MatrixView<'_>| !view.has_fp8_nan() && !has_huge_exponent(view);
                return (fits(first) && fits(second)).then_some(Self::MX);
            }
            WeightFormat::Nvfp4 | WeightFormat::Int4 => (Source::of(first)?, Source::of(second)?),
            _ => return None,
        };
        Some(GroupLayout {
            per_block: first.per_block.max(second.per_block),
            scale: if first.scale == second.scale { first.scale } else { PackedScale::F32 },
            zeros: first.zeros || second.zeros,
        })
    }

    /// Writes the scale and the zero point of `column` for input features from `col` on into the header of a block.
    pub(super) fn write(
        self,
        header: &mut [u8],
        panel: usize,
        group: usize,
        column: usize,
        view: &MatrixView<'_>,
        (row, col): (usize, usize),
    ) {
        let (scales, zeros) = header[group * self.group_bytes(panel)..][..self.group_bytes(panel)]
            .split_at_mut(panel * self.scale.bytes());
        let scale = &mut scales[column * self.scale.bytes()..][..self.scale.bytes()];
        match (self.scale, &view.scales) {
            (PackedScale::Bf16, Scales::Groups(groups)) => {
                scale.copy_from_slice(&stored::<2>(groups, row, col));
            }
            (PackedScale::Bf16, _) => {
                let exponent = expertd_model::decode::e8m0_bf16(view.exponent(row, col));
                scale.copy_from_slice(&exponent.to_le_bytes());
            }
            (PackedScale::F16, Scales::Groups(groups)) if groups.format == ScaleFormat::F16 => {
                scale.copy_from_slice(&stored::<2>(groups, row, col));
            }
            (PackedScale::F16, Scales::Groups(groups)) => {
                let value = expertd_model::decode::fp8_e4m3(stored::<1>(groups, row, col)[0]);
                scale.copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            }
            _ => scale.copy_from_slice(&view.scale(row, col).to_le_bytes()),
        }
        if self.zeros {
            // -8 to 7.
            zeros[column] = view.zero_point(row, col).wrapping_sub(INT4_ZERO);
        }
    }
}

/// The kind of scales and zero points that one matrix needs.
struct Source {
    per_block: usize,
    scale: PackedScale,
    zeros: bool,
}

impl Source {
    fn of(view: &MatrixView<'_>) -> Option<Self> {
        let Scales::Groups(groups) = &view.scales else { return None };
        let per_block = match groups.cols {
            cols if cols >= view.cols || cols.is_multiple_of(K_BLOCK) => 1,
            cols if cols.is_multiple_of(K_BLOCK / 2) => 2,
            cols if cols.is_multiple_of(OCTET) => 4,
            _ => return None,
        };
        let scale = match groups.format {
            ScaleFormat::Bf16 if groups.factor == 1.0 => PackedScale::Bf16,
            ScaleFormat::F16 | ScaleFormat::Fp8E4m3 => PackedScale::F16,
            ScaleFormat::Bf16 | ScaleFormat::F32 => PackedScale::F32,
        };
        Some(Source { per_block, scale, zeros: groups.zeros.is_some() && !is_symmetric(view, groups) })
    }
}

/// Whether every zero point is the one of symmetric integers, as in most of GPTQ's checkpoints. The kernels then need none.
fn is_symmetric(view: &MatrixView<'_>, groups: &GroupScales<'_>) -> bool {
    let of_row = 0..view.cols.div_ceil(groups.cols);
    (0..view.rows).all(|row| of_row.clone().all(|group| groups.zero_point(row, group) == INT4_ZERO))
}

/// The largest exponent whose power of two the kernels can multiply by 2^8.
const MAX_EXPONENT: u8 = 246;

fn has_huge_exponent(view: &MatrixView<'_>) -> bool {
    let mut blocks = (0..view.rows).flat_map(|row| (0..view.cols).step_by(32).map(move |col| (row, col)));
    blocks.any(|(row, col)| (MAX_EXPONENT + 1..u8::MAX).contains(&view.exponent(row, col)))
}

/// The stored scale of the group that holds `(row, col)`.
fn stored<const N: usize>(groups: &GroupScales<'_>, row: usize, col: usize) -> [u8; N] {
    let at = row * groups.row_stride + col / groups.cols * groups.group_stride;
    *groups.data[at * N..].first_chunk().expect("MatrixView::check covers all scales")
}
