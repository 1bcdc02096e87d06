//! Weight matrices packed for the kernels.

pub(crate) use super::groups::K_BLOCK;
use super::groups::{GroupLayout, OCTET, PackedScale};
use super::memory::AlignedBuffer;
use super::simd_level::SimdLevel;
use super::storage::Storage;
use expertd_model::{INT4_ZERO, MatrixError, MatrixView, Packing, Scales, WeightFormat};

/// Outputs of the widest panel.
pub(crate) const MAX_PANEL: usize = SimdLevel::Avx512.panel_width();

/// An error that prevents a matrix from being packed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum PackError {
    #[error(transparent)]
    Matrix(#[from] MatrixError),
    /// Gate and up projections differ in shape or format, so they cannot be interleaved.
    #[error(
        "gate and up projections must have the same shape and format, but are [{}, {}] in {:?} and [{}, {}] in {:?}",
        .gate.0, .gate.1, .gate.2, .up.0, .up.1, .up.2
    )]
    Unlike { gate: (usize, usize, WeightFormat), up: (usize, usize, WeightFormat) },
}

/// A weight matrix `[n, k]` in its stored format, laid out for the kernels of one [`SimdLevel`].
///
/// Output features are grouped into panels of `P` (two vectors of the level). A panel is a sequence of blocks of 32
/// input features. A block holds, for one input feature after the other (f32, f16), for one pair of neighbouring
/// input features after the other (bf16, FP8, MXFP8) or for eight of them (4-bit formats: words of 32 bits, the first
/// feature in the highest nibble), the elements of all `P` outputs. A kernel can therefore widen a vector
/// of weights once and multiply it with broadcast elements of several rows, without adding across SIMD lanes.
///
/// A block of MXFP4, MXFP8, NVFP4 or INT4 starts with its scales and zero points ([`GroupLayout`]). FP8 scales are stored
/// apart from the weights, one vector per panel and block of scales. INT4 elements are stored less 8, as two's complement.
#[derive(Debug)]
pub struct PackedMatrix {
    pub(super) level: SimdLevel,
    pub(super) format: WeightFormat,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) interleaved: bool,
    pub(super) data: Storage<u8>,
    /// `[panels, ceil(blocks / scale_blocks), P]`: scales of FP8, factors of f16 scales; empty otherwise.
    pub(super) scales: Storage<f32>,
    /// Blocks of input features that share a vector of scales.
    pub(super) scale_blocks: usize,
    /// See [`PackedForm`](super::PackedForm).
    pub(super) has_square_scales: bool,
    /// Scales within the blocks; `None` if the format has none.
    pub(super) groups: Option<GroupLayout>,
}

impl PackedMatrix {
    /// Packs a matrix for the [active](SimdLevel::active) level.
    ///
    /// # Errors
    /// If the view is inconsistent: see [`MatrixView::check`].
    pub fn pack(view: &MatrixView<'_>) -> Result<Self, PackError> {
        Self::pack_for(SimdLevel::active(), view)
    }

    /// Packs a matrix for `level`, which the CPU must support when the packed matrix is used.
    ///
    /// # Errors
    /// If the view is inconsistent: see [`MatrixView::check`].
    pub fn pack_for(level: SimdLevel, view: &MatrixView<'_>) -> Result<Self, PackError> {
        view.check()?;
        Ok(Self::pack_sources(
            level,
            &PackSources { views: [view, view], interleaved: false, panel: level.panel_width() },
        ))
    }

    /// Packs a gate and an up projection of equal shape into one matrix. Each panel holds `P / 2` outputs of the gate
    /// projection, followed by the same outputs of the up projection.
    ///
    /// # Errors
    /// If a view is inconsistent or the two differ in shape or format.
    pub fn pack_gated(
        level: SimdLevel,
        gate: &MatrixView<'_>,
        up: &MatrixView<'_>,
    ) -> Result<Self, PackError> {
        gate.check()?;
        up.check()?;
        let kind = |view: &MatrixView<'_>| (view.rows, view.cols, view.format);
        if kind(gate) != kind(up) {
            return Err(PackError::Unlike { gate: kind(gate), up: kind(up) });
        }
        Ok(Self::pack_sources(
            level,
            &PackSources { views: [gate, up], interleaved: true, panel: level.panel_width() },
        ))
    }

    fn pack_sources(level: SimdLevel, sources: &PackSources<'_>) -> Self {
        let [first, second] = sources.views;
        let (n, k) = (first.rows * if sources.interleaved { 2 } else { 1 }, first.cols);
        let scale_cols = (first.format == WeightFormat::Fp8E4m3)
            .then(|| common_scale_cols(first, second))
            .flatten()
            .filter(|_| !first.has_fp8_nan() && !second.has_fp8_nan());
        let groups = GroupLayout::of(first, second);
        // The kernels cannot convert FP8 NaN, and scales must cover whole blocks or octets of input features. A matrix
        // that breaks either rule (no valid checkpoint is known to) is kept as f32.
        let format = match first.format {
            WeightFormat::Fp8E4m3 if scale_cols.is_none() => WeightFormat::F32,
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4 | WeightFormat::Int4
                if groups.is_none() =>
            {
                WeightFormat::F32
            }
            format => format,
        };
        let mut packed = PackedMatrix {
            level,
            format,
            n,
            k,
            interleaved: sources.interleaved,
            data: Storage::empty(),
            scales: Storage::empty(),
            scale_blocks: scale_cols.map_or(1, |cols| cols.div_ceil(K_BLOCK)),
            has_square_scales: [first, second].into_iter().all(has_square_scales),
            groups,
        };
        let mut data = AlignedBuffer::zeroed(packed.panels() * packed.panel_bytes());
        for (panel, bytes) in data.chunks_exact_mut(packed.panel_bytes()).enumerate() {
            for (block, bytes) in bytes.chunks_exact_mut(packed.block_bytes()).enumerate() {
                sources.pack_block(format, groups, panel, block, bytes);
            }
        }
        packed.data = Storage::Own(data);
        if packed.has_factors() {
            packed.scale_blocks = packed.blocks();
            packed.pack_scales(sources, |view, _, _| match &view.scales {
                Scales::Groups(groups) => groups.factor,
                _ => 1.0,
            });
        } else if let Some(cols) = scale_cols {
            packed.pack_scales(sources, |view, row, block| view.scale(row, block * cols) * FP8_BIAS);
        }
        packed
    }

    /// Fills `scales` with `scale(matrix, row, vector)`.
    fn pack_scales(
        &mut self,
        sources: &PackSources<'_>,
        scale: impl Fn(&MatrixView<'_>, usize, usize) -> f32,
    ) {
        let mut scales = AlignedBuffer::zeroed(self.panels() * self.scale_vectors() * sources.panel);
        for (i, element) in scales.iter_mut().enumerate() {
            let (column, vector) = (i % sources.panel, i / sources.panel);
            if let Some((view, row)) = sources.row(vector / self.scale_vectors(), column) {
                *element = scale(view, row, vector % self.scale_vectors());
            }
        }
        self.scales = Storage::Own(scales);
    }

    /// Whether scales within the blocks have factors.
    fn has_factors(&self) -> bool {
        self.groups.is_some_and(|groups| groups.scale == PackedScale::F16)
    }

    /// Whether there are zero points.
    pub(super) fn has_zeros(&self) -> bool {
        self.groups.is_some_and(|groups| groups.zeros)
    }

    /// Output features (of both projections, for a gated pair).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Format of the packed elements.
    #[must_use]
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// The level whose kernels read the matrix.
    #[must_use]
    pub fn level(&self) -> SimdLevel {
        self.level
    }

    /// Whether the matrix holds a gate and an up projection.
    pub(crate) fn is_gated(&self) -> bool {
        self.interleaved
    }

    /// Size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.data.len() + self.scales.len() * size_of::<f32>()
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        if self.interleaved {
            (self.n / 2).div_ceil(self.level.panel_width() / 2)
        } else {
            self.n.div_ceil(self.level.panel_width())
        }
    }

    /// Number of blocks of input features.
    pub(crate) fn blocks(&self) -> usize {
        self.k.div_ceil(K_BLOCK)
    }

    /// Bytes per block of a panel.
    pub(crate) fn block_bytes(&self) -> usize {
        let panel = self.level.panel_width();
        let elements = K_BLOCK * panel * self.format.bits() / 8;
        elements + self.groups.map_or(0, |groups| groups.header_bytes(panel))
    }

    /// Number of f32 scales that are stored apart from the blocks.
    pub(super) fn scale_count(&self) -> usize {
        if self.format == WeightFormat::Fp8E4m3 || self.has_factors() {
            self.panels() * self.scale_vectors() * self.level.panel_width()
        } else {
            0
        }
    }

    /// Bytes per panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.blocks() * self.block_bytes()
    }

    /// The bytes of a panel.
    pub(crate) fn panel_data(&self, panel: usize) -> &[u8] {
        &self.data[panel * self.panel_bytes()..][..self.panel_bytes()]
    }

    /// Vectors of scales per panel.
    pub(crate) fn scale_vectors(&self) -> usize {
        self.blocks().div_ceil(self.scale_blocks)
    }
}

/// Factor that packed scales include, because kernels read FP8 codes as if their exponent had the bias of f16.
pub(crate) const FP8_BIAS: f32 = 256.0;

/// Columns that share a scale in both views; `None` if the kernels do not support their blocks.
fn common_scale_cols(first: &MatrixView<'_>, second: &MatrixView<'_>) -> Option<usize> {
    let cols = |view: &MatrixView<'_>| match &view.scales {
        Scales::Block { block_cols, .. } if *block_cols < view.cols => {
            block_cols.is_multiple_of(K_BLOCK).then_some(*block_cols)
        }
        _ => Some(view.cols),
    };
    let (first, second) = (cols(first)?, cols(second)?);
    (first == second).then_some(first)
}

/// Whether 128 neighbouring rows have the same scales of blocks of columns. Scales of whole rows do not count.
fn has_square_scales(view: &MatrixView<'_>) -> bool {
    const ROWS: usize = 128;
    match &view.scales {
        Scales::Block { block_rows, block_cols, .. } if *block_cols < view.cols => {
            block_rows.is_multiple_of(ROWS) || *block_rows >= view.rows
        }
        _ => true,
    }
}

/// The one or two matrices that are packed into one.
struct PackSources<'a> {
    views: [&'a MatrixView<'a>; 2],
    interleaved: bool,
    panel: usize,
}

impl<'a> PackSources<'a> {
    /// The matrix and row that column `column` of `panel` is packed from; `None` for padding.
    fn row(&self, panel: usize, column: usize) -> Option<(&'a MatrixView<'a>, usize)> {
        let (view, row) = if self.interleaved {
            let half = self.panel / 2;
            (self.views[column / half], panel * half + column % half)
        } else {
            (self.views[0], panel * self.panel + column)
        };
        (row < view.rows).then_some((view, row))
    }

    fn pack_block(
        &self,
        format: WeightFormat,
        groups: Option<GroupLayout>,
        panel: usize,
        block: usize,
        bytes: &mut [u8],
    ) {
        let header = groups.map_or(0, |groups| groups.header_bytes(self.panel));
        let (header, elements) = bytes.split_at_mut(header);
        if let Some(groups) = groups {
            self.pack_groups(groups, panel, block, header);
        }
        match format {
            WeightFormat::F32 if self.views[0].format != WeightFormat::F32 => {
                self.pack_widened(panel, block, elements)
            }
            WeightFormat::F32 => self.pack_elements::<4, 4>(panel, block, elements),
            WeightFormat::F16 => self.pack_elements::<2, 2>(panel, block, elements),
            WeightFormat::Bf16 => self.pack_elements::<2, 4>(panel, block, elements),
            WeightFormat::Fp8E4m3 | WeightFormat::Mxfp8 => self.pack_elements::<1, 2>(panel, block, elements),
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => self.pack_nibbles(panel, block, 0, elements),
            WeightFormat::Int4 => self.pack_nibbles(panel, block, INT4_ZERO, elements),
        }
    }

    /// Writes the scales and zero points of a block. Groups that lie in the padding keep scales of zero.
    fn pack_groups(&self, groups: GroupLayout, panel: usize, block: usize, header: &mut [u8]) {
        for column in 0..self.panel {
            let Some((view, row)) = self.row(panel, column) else { continue };
            for group in 0..groups.per_block {
                let col = block * K_BLOCK + group * K_BLOCK / groups.per_block;
                if col < view.cols {
                    groups.write(header, self.panel, group, column, view, (row, col));
                }
            }
        }
    }

    /// Packs elements of `N` bytes in units of `U` bytes: one input feature, or two neighbouring ones.
    fn pack_elements<const N: usize, const U: usize>(&self, panel: usize, block: usize, bytes: &mut [u8]) {
        const ROW: usize = K_BLOCK * size_of::<f32>();
        let mut rows = [[0_u8; ROW]; MAX_PANEL];
        for (column, elements) in rows.iter_mut().enumerate().take(self.panel) {
            let Some((view, row)) = self.row(panel, column) else { continue };
            let start = block * K_BLOCK;
            let count = K_BLOCK.min(view.cols - start);
            if view.col_stride == 1 {
                let at = (row * view.row_stride + start) * N;
                elements[..count * N].copy_from_slice(&view.data[at..at + count * N]);
            } else {
                for (i, element) in elements.as_chunks_mut::<N>().0.iter_mut().take(count).enumerate() {
                    *element = view.bits::<N>(row, start + i);
                }
            }
        }
        let (packed, _) = bytes.as_chunks_mut::<U>();
        for (unit, packed) in packed.chunks_exact_mut(self.panel).enumerate() {
            for (packed, elements) in packed.iter_mut().zip(&rows) {
                *packed = elements.as_chunks::<U>().0[unit];
            }
        }
    }

    /// Packs elements of any format as f32.
    fn pack_widened(&self, panel: usize, block: usize, bytes: &mut [u8]) {
        for column in 0..self.panel {
            let Some((view, row)) = self.row(panel, column) else { continue };
            let start = block * K_BLOCK;
            for i in 0..K_BLOCK.min(view.cols - start) {
                let at = (i * self.panel + column) * 4;
                bytes[at..at + 4].copy_from_slice(&view.value(row, start + i).to_le_bytes());
            }
        }
    }

    /// Packs elements of four bits, each XOR `flip`. Padding is zero.
    fn pack_nibbles(&self, panel: usize, block: usize, flip: u8, elements: &mut [u8]) {
        let (words, _) = elements.as_chunks_mut::<4>();
        for column in 0..self.panel {
            let Some((view, row)) = self.row(panel, column) else { continue };
            for octet in 0..K_BLOCK / OCTET {
                let col = block * K_BLOCK + octet * OCTET;
                if col >= view.cols {
                    break;
                }
                let count = OCTET.min(view.cols - col);
                let word = whole_word(view, row, col).filter(|_| count == OCTET).unwrap_or_else(|| {
                    (0..count).fold(0, |word, i| word | u32::from(view.nibble(row, col + i)) << (4 * i))
                });
                let flips = u32::from(flip) * (0x1111_1111 >> (4 * (OCTET - count)));
                words[octet * self.panel + column] = reverse_nibbles(word ^ flips).to_le_bytes();
            }
        }
    }
}

/// The eight elements of four bits from `col` on, the first in the lowest nibble, if they are stored as such a word.
fn whole_word(view: &MatrixView<'_>, row: usize, col: usize) -> Option<u32> {
    let contiguous = match view.packing {
        Packing::Strided => view.col_stride == 1,
        Packing::ColumnWords => col.is_multiple_of(OCTET),
        Packing::RowWords | Packing::AwqWords => false,
    };
    let at = view.packing.index(row, col, view.row_stride, view.col_stride);
    let bytes = view.data.get(at / 2..)?.first_chunk()?;
    (contiguous && at.is_multiple_of(2)).then(|| u32::from_le_bytes(*bytes))
}

fn reverse_nibbles(word: u32) -> u32 {
    let bytes = word.swap_bytes();
    (bytes & 0x0f0f_0f0f) << 4 | bytes >> 4 & 0x0f0f_0f0f
}
