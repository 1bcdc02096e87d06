//! The formats of expert weights in GPU memory, which one a checkpoint's weights get, and the memory that they take.

use expertd_model::{ExpertsSpec, ModelSpec, MoeLayer, SharedSpec, WeightFormat, has_wide_scales};
use expertd_types::{Fp8Products, LayerId};

/// The kernels' hidden and intermediate sizes are multiples of this number of elements.
const SIZE_UNIT: usize = 64;
/// Columns that share a multiplier of FP8 weights.
pub(crate) const FP8_COLS: usize = 128;
/// Rows of a unit of weights (`kernels/src/experts_layout.cuh`).
const UNIT_ROWS: usize = 16;
/// Columns of a unit of weights.
const UNIT_COLS: usize = 128;
/// Columns that share a scale and a zero point of INT4 weights.
pub(crate) const INT4_COLS: usize = 32;
/// Columns that share a scale of NVFP4 weights.
pub(crate) const NVFP4_COLS: usize = 16;
/// Columns of a block of a matrix that is packed for processors.
const BLOCK_COLS: usize = 32;
/// Columns that share an exponent of MXFP4 and MXFP8 weights.
pub(crate) const MX_COLS: usize = 32;

/// Rounds a hidden or intermediate size up to the next one that the kernels support.
pub(crate) const fn padded(size: usize) -> usize {
    size.next_multiple_of(SIZE_UNIT)
}

/// Format of weights in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFormat {
    /// bf16, for weights stored in bf16, f16 and f32, for those whose scales no other format can hold, and for experts whose
    /// matrices differ in format.
    Bf16,
    /// FP8 e4m3 with multipliers, widened to bf16 for products with rows in bf16.
    Fp8,
    /// FP8 e4m3 with multipliers, for products with rows in FP8. For FP8 weights, and for MXFP4 weights, which are re-encoded.
    W8a8,
    /// MXFP4, widened to bf16 for products with rows in bf16.
    Mxfp4,
    /// INT4 with zero point 8 and f16 scales for 32 columns, widened to bf16 for products with rows in bf16.
    Int4,
    /// The same with a zero point for every scale.
    Int4Zeros,
    /// NVFP4 with e4m3 scales for 16 columns, widened to bf16 for products with rows in bf16.
    Nvfp4,
    /// MXFP8, widened to bf16 for products with rows in bf16.
    Mxfp8,
}

/// The properties of stored weights that decide on their device format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Format in the checkpoint.
    pub format: WeightFormat,
    /// Columns per block or group of scales, if a row of any matrix has several.
    pub scale_cols: Option<usize>,
    /// Whether groups of INT4 weights have zero points.
    pub zero_points: bool,
    /// Whether gate, up and down differ in format; `format` is then that of gate.
    pub is_mixed: bool,
}

impl Stored {
    /// The routed experts of a layer.
    #[must_use]
    pub const fn routed(spec: &ExpertsSpec) -> Self {
        let ExpertsSpec { format, scale_cols, zero_points, .. } = *spec;
        Stored { format, scale_cols, zero_points, is_mixed: false }
    }

    /// The shared experts of a layer.
    #[must_use]
    pub const fn shared(spec: &SharedSpec) -> Self {
        let SharedSpec { format, scale_cols, zero_points, .. } = *spec;
        Stored { format, scale_cols, zero_points, is_mixed: !spec.other_formats.is_empty() }
    }

    /// The format of these weights on GPU ranks.
    #[must_use]
    pub const fn on_device(self, products: Fp8Products) -> DeviceFormat {
        if self.is_mixed {
            return DeviceFormat::Bf16;
        }
        match self.format {
            WeightFormat::Fp8E4m3 if has_wide_scales(self.scale_cols) => {
                if products.of_fp8 {
                    DeviceFormat::W8a8
                } else {
                    DeviceFormat::Fp8
                }
            }
            WeightFormat::Mxfp4 => {
                if products.of_mxfp4 {
                    DeviceFormat::W8a8
                } else {
                    DeviceFormat::Mxfp4
                }
            }
            // Only the weights of such a checkpoint are quantised. Rows stay in bf16, whatever `products` says.
            WeightFormat::Int4 if has_groups_of(INT4_COLS, self.scale_cols) => {
                if self.zero_points {
                    DeviceFormat::Int4Zeros
                } else {
                    DeviceFormat::Int4
                }
            }
            WeightFormat::Nvfp4 if has_groups_of(NVFP4_COLS, self.scale_cols) => DeviceFormat::Nvfp4,
            WeightFormat::Mxfp8 => DeviceFormat::Mxfp8,
            WeightFormat::Bf16
            | WeightFormat::F16
            | WeightFormat::F32
            | WeightFormat::Fp8E4m3
            | WeightFormat::Nvfp4
            | WeightFormat::Int4 => DeviceFormat::Bf16,
        }
    }

    /// Bytes of one expert in the memory of a CPU rank, which a copy to a GPU moves: elements as stored, in blocks of 32 columns with
    /// their scales (`server/compute/src/linalg/packed.rs`). Padding of rows and biases are not counted.
    #[must_use]
    pub fn bytes_on_cpu(self, hidden: usize, inter: usize) -> usize {
        let groups = match self.scale_cols {
            Some(cols) if cols % BLOCK_COLS != 0 => BLOCK_COLS.div_ceil(cols),
            _ => 1,
        };
        let is_whole = |unit: usize| self.scale_cols.is_none_or(|cols| cols.is_multiple_of(unit));
        // Of a row: bytes of a block, and further scales, which span blocks.
        let (block, spanning) = match self.format {
            WeightFormat::Bf16 | WeightFormat::F16 => (BLOCK_COLS * 2, None),
            WeightFormat::Fp8E4m3 if is_whole(BLOCK_COLS) => {
                (BLOCK_COLS, Some(self.scale_cols.unwrap_or(usize::MAX)))
            }
            WeightFormat::Mxfp4 => (BLOCK_COLS / 2 + 2, None),
            WeightFormat::Mxfp8 => (BLOCK_COLS + 2, None),
            WeightFormat::Nvfp4 if is_whole(8) => (BLOCK_COLS / 2 + 2 * groups, Some(usize::MAX)),
            WeightFormat::Int4 if is_whole(8) => {
                (BLOCK_COLS / 2 + (2 + usize::from(self.zero_points)) * groups, None)
            }
            // The kernels of CPUs read values where they cannot read scales.
            _ => (BLOCK_COLS * 4, None),
        };
        let bytes = |rows: usize, cols: usize| {
            rows * (cols.div_ceil(BLOCK_COLS) * block + spanning.map_or(0, |of| cols.div_ceil(of) * 4))
        };
        bytes(2 * inter, hidden) + bytes(hidden, inter)
    }

    /// Whether a GPU of a mixed group can copy these weights from CPU ranks: a kernel rewrites what they hold.
    #[must_use]
    pub fn is_copied(self, products: Fp8Products) -> bool {
        // CPU ranks hold the codes as stored, and no kernel re-encodes them.
        !(self.format == WeightFormat::Mxfp4 && self.on_device(products) == DeviceFormat::W8a8)
    }

    /// The format of these weights on GPU ranks, for people: what it is, and why.
    #[must_use]
    pub fn explain(self, products: Fp8Products) -> String {
        if self.is_mixed {
            return "bf16, rounded once, because gate, up and down differ in format".to_owned();
        }
        match (self.format, self.on_device(products)) {
            (WeightFormat::Bf16, _) => "bf16, as stored".to_owned(),
            (format @ (WeightFormat::F16 | WeightFormat::F32), _) => format!("bf16, rounded from {format}"),
            (WeightFormat::Int4, DeviceFormat::Int4 | DeviceFormat::Int4Zeros) => {
                "INT4, as stored; products in bf16".to_owned()
            }
            (
                format @ (WeightFormat::Int4 | WeightFormat::Nvfp4 | WeightFormat::Fp8E4m3),
                DeviceFormat::Bf16,
            ) => {
                let cols = self.scale_cols.unwrap_or_default();
                let (parts, unit) = match format {
                    WeightFormat::Int4 => ("groups", INT4_COLS),
                    WeightFormat::Nvfp4 => ("groups", NVFP4_COLS),
                    _ => ("blocks", FP8_COLS),
                };
                format!(
                    "bf16, rounded once, because {parts} of {cols} columns are no multiple of {unit} wide"
                )
            }
            (format @ (WeightFormat::Nvfp4 | WeightFormat::Mxfp8), _) => {
                format!("{}, as stored; products in bf16", format.to_string().to_uppercase())
            }
            (WeightFormat::Mxfp4, DeviceFormat::W8a8) => {
                "FP8, re-encoded from MXFP4; products in FP8".to_owned()
            }
            (_, DeviceFormat::W8a8) => "FP8, as stored; products in FP8".to_owned(),
            (_, DeviceFormat::Mxfp4) => "MXFP4, as stored; products in bf16".to_owned(),
            (_, _) => "FP8, as stored; products in bf16".to_owned(),
        }
    }
}

impl DeviceFormat {
    /// Whether weights that the checkpoint stores in `stored` can have this device format.
    #[cfg(feature = "cuda")]
    pub(crate) const fn accepts(self, stored: WeightFormat) -> bool {
        match self {
            DeviceFormat::Bf16 => true,
            DeviceFormat::Fp8 => matches!(stored, WeightFormat::Fp8E4m3),
            DeviceFormat::W8a8 => matches!(stored, WeightFormat::Fp8E4m3 | WeightFormat::Mxfp4),
            DeviceFormat::Mxfp4 => matches!(stored, WeightFormat::Mxfp4),
            DeviceFormat::Int4 | DeviceFormat::Int4Zeros => matches!(stored, WeightFormat::Int4),
            DeviceFormat::Nvfp4 => matches!(stored, WeightFormat::Nvfp4),
            DeviceFormat::Mxfp8 => matches!(stored, WeightFormat::Mxfp8),
        }
    }

    /// Rounds an intermediate size up to the next one that the kernel supports.
    #[must_use]
    pub const fn padded_inter(self, inter: usize) -> usize {
        match self {
            DeviceFormat::W8a8 => inter.next_multiple_of(FP8_COLS),
            _ => padded(inter),
        }
    }

    /// Sizes of one expert's gate and up projections, and of its down projection, in bytes. The sizes of the expert are padded.
    #[must_use]
    pub const fn matrix_bytes(self, hidden: usize, inter: usize) -> [usize; 2] {
        [self.bytes(2 * inter, hidden), self.bytes(hidden, inter)]
    }

    /// Size of a matrix in bytes, without factors of its rows.
    const fn bytes(self, rows: usize, cols: usize) -> usize {
        let (code_bits, scale_bytes) = match self {
            DeviceFormat::Bf16 => return rows * cols * 2,
            DeviceFormat::Fp8 | DeviceFormat::W8a8 => (8, UNIT_ROWS * 4),
            DeviceFormat::Mxfp4 => (4, UNIT_ROWS * UNIT_COLS / MX_COLS),
            DeviceFormat::Mxfp8 => (8, UNIT_ROWS * UNIT_COLS / MX_COLS),
            DeviceFormat::Nvfp4 => (4, UNIT_ROWS * UNIT_COLS / NVFP4_COLS),
            DeviceFormat::Int4 => (4, UNIT_ROWS * UNIT_COLS / INT4_COLS * 2),
            DeviceFormat::Int4Zeros => (4, UNIT_ROWS * UNIT_COLS / INT4_COLS * 5 / 2),
        };
        let unit = UNIT_ROWS * UNIT_COLS * code_bits / 8 + scale_bytes;
        rows / UNIT_ROWS * cols.div_ceil(UNIT_COLS) * unit
    }

    /// Size of one expert of these unpadded sizes in device memory, with factors of rows and biases, in bytes.
    #[must_use]
    pub const fn expert_bytes(self, hidden: usize, inter: usize, biases: bool) -> usize {
        let (hidden, inter) = (padded(hidden), self.padded_inter(inter));
        let [gate_up, down] = self.matrix_bytes(hidden, inter);
        let scaled = !matches!(self, DeviceFormat::Bf16);
        gate_up + down + (scaled as usize + biases as usize) * (2 * inter + hidden) * 4
    }
}

/// Whether no scale or zero point changes within `cols` columns, from a multiple of `cols` on.
const fn has_groups_of(cols: usize, scale_cols: Option<usize>) -> bool {
    match scale_cols {
        None => true,
        Some(scale_cols) => scale_cols.is_multiple_of(cols),
    }
}

/// Bytes of device memory of a rank's experts and of all shared experts. `held` returns the number of experts that the rank holds
/// in a layer. Gates and the alignment of tables are not counted.
pub fn weight_bytes(
    spec: &ModelSpec,
    products: Fp8Products,
    held: impl Fn(LayerId, &MoeLayer) -> usize,
) -> u64 {
    let of = |(layer, moe): (LayerId, &MoeLayer)| {
        let format = Stored::routed(&moe.experts).on_device(products);
        let routed = format.expert_bytes(spec.hidden, moe.experts.width, moe.experts.biases);
        let shared = moe.shared.as_ref().map_or(0, |shared| {
            Stored::shared(shared).on_device(products).expert_bytes(spec.hidden, shared.width, shared.biases)
        });
        (held(layer, moe) * routed + shared) as u64
    };
    spec.moe_layers().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_device(format: WeightFormat, scale_cols: Option<usize>) -> [DeviceFormat; 2] {
        [Fp8Products::OF_FP8, Fp8Products::NONE].map(|products| {
            Stored { format, scale_cols, zero_points: false, is_mixed: false }.on_device(products)
        })
    }

    #[test]
    fn the_device_format_follows_from_the_scales() {
        use DeviceFormat::{Bf16, Fp8, Int4, Int4Zeros, Mxfp4, Mxfp8, Nvfp4, W8a8};
        for cols in [None, Some(32), Some(64), Some(96), Some(128)] {
            assert_eq!(on_device(WeightFormat::Int4, cols), [Int4, Int4], "{cols:?}");
            let stored =
                Stored { format: WeightFormat::Int4, scale_cols: cols, zero_points: true, is_mixed: false };
            assert_eq!(stored.on_device(Fp8Products::OF_BOTH), Int4Zeros, "{cols:?}");
        }
        for narrow in [8, 16, 48, 100] {
            assert_eq!(on_device(WeightFormat::Int4, Some(narrow)), [Bf16, Bf16], "{narrow}");
        }
        for wide in [None, Some(16), Some(32)] {
            assert_eq!(on_device(WeightFormat::Nvfp4, wide), [Nvfp4, Nvfp4], "{wide:?}");
        }
        assert_eq!(on_device(WeightFormat::Nvfp4, Some(8)), [Bf16, Bf16]);
        assert_eq!(on_device(WeightFormat::Mxfp8, None), [Mxfp8, Mxfp8]);
        assert_eq!(on_device(WeightFormat::Mxfp4, None), [Mxfp4, Mxfp4]);
        for wide in [None, Some(128), Some(256)] {
            assert_eq!(on_device(WeightFormat::Fp8E4m3, wide), [W8a8, Fp8], "{wide:?}");
        }
        for narrow in [32, 64, 96, 192] {
            assert_eq!(on_device(WeightFormat::Fp8E4m3, Some(narrow)), [Bf16, Bf16], "{narrow}");
        }
        for (format, parts, unit, name) in [
            (WeightFormat::Int4, "groups", 32, "INT4"),
            (WeightFormat::Nvfp4, "groups", 16, "NVFP4"),
            (WeightFormat::Fp8E4m3, "blocks", 128, "FP8"),
        ] {
            let of = |cols| Stored { format, scale_cols: Some(cols), zero_points: false, is_mixed: false };
            let text = of(8).explain(Fp8Products::OF_FP8);
            assert_eq!(
                text,
                format!("bf16, rounded once, because {parts} of 8 columns are no multiple of {unit} wide")
            );
            assert!(of(128).explain(Fp8Products::OF_FP8).starts_with(name));
        }
    }

    #[test]
    fn matrices_of_several_formats_become_bf16() {
        use WeightFormat::{Bf16, F16, Fp8E4m3, Int4, Mxfp4, Mxfp8, Nvfp4};
        for format in [Bf16, F16, Fp8E4m3, Int4, Mxfp4, Mxfp8, Nvfp4] {
            let stored = Stored { format, scale_cols: Some(128), zero_points: false, is_mixed: true };
            for products in [Fp8Products::OF_BOTH, Fp8Products::NONE] {
                assert_eq!(stored.on_device(products), DeviceFormat::Bf16, "{format}");
                assert!(stored.explain(products).contains("differ in format"), "{format}");
            }
        }
    }

    #[test]
    fn mxfp4_becomes_fp8_only_on_request() {
        use WeightFormat::{Bf16, Fp8E4m3, Int4, Mxfp4, Mxfp8, Nvfp4};
        let of = |format| Stored { format, scale_cols: None, zero_points: false, is_mixed: false };
        let of_mxfp4 = Fp8Products::OF_MXFP4;
        assert_eq!(of(Mxfp4).on_device(of_mxfp4), DeviceFormat::W8a8);
        assert_eq!(of(Mxfp4).on_device(Fp8Products::OF_BOTH), DeviceFormat::W8a8);
        assert_eq!(of(Mxfp4).explain(of_mxfp4), "FP8, re-encoded from MXFP4; products in FP8");
        assert_eq!(of(Mxfp4).explain(Fp8Products::OF_FP8), "MXFP4, as stored; products in bf16");
        for format in [Bf16, Fp8E4m3, Int4, Mxfp8, Nvfp4] {
            let none = of(format).on_device(Fp8Products::NONE);
            assert_eq!(of(format).on_device(of_mxfp4), none, "{format}");
        }
    }

    /// CPU ranks hold what `PackedMatrix` says.
    #[cfg(feature = "cuda")]
    #[test]
    fn an_expert_takes_the_bytes_of_its_panels_on_cpus() {
        use WeightFormat::{Bf16, F16, F32, Fp8E4m3, Int4, Mxfp4, Mxfp8, Nvfp4};
        for (format, scale_cols, zero_points) in [
            (Bf16, None, false),
            (F16, None, false),
            (F32, None, false),
            (Fp8E4m3, Some(128), false),
            (Fp8E4m3, Some(64), false),
            (Fp8E4m3, None, false),
            (Fp8E4m3, Some(100), false),
            (Mxfp4, Some(32), false),
            (Mxfp8, Some(32), false),
            (Nvfp4, Some(16), false),
            (Nvfp4, Some(8), false),
            (Int4, Some(12), false),
            (Int4, Some(16), true),
            (Int4, Some(128), false),
            (Int4, Some(128), true),
            (Int4, None, false),
        ] {
            let stored = Stored { format, scale_cols, zero_points, is_mixed: false };
            // Multiples of all panels, so that no row is padding.
            let (hidden, inter) = (192, 256);
            let packed = crate::experts::bytes_on_cpu(&stored, hidden, inter);
            assert_eq!(stored.bytes_on_cpu(hidden, inter), packed, "{stored:?}");
        }
    }

    #[test]
    fn an_expert_takes_the_bytes_of_its_units() {
        // gate and up [256, 256] and down [256, 128] in units of 16 × 128 elements with 16 f32 multipliers.
        let units = 2 * 128 / 16 * 2 + 256 / 16;
        let factors = (2 * 128 + 256) * 4;
        let fp8 = DeviceFormat::Fp8.expert_bytes(256, 128, false);
        assert_eq!(fp8, units * (2048 + 64) + factors);
        assert_eq!(DeviceFormat::Fp8.expert_bytes(250, 100, true), fp8 + factors);
        assert_eq!(DeviceFormat::Bf16.expert_bytes(256, 128, false), 3 * 256 * 128 * 2);
        assert_eq!(DeviceFormat::Mxfp4.expert_bytes(256, 128, false), units * (1024 + 64) + factors);
        assert_eq!(DeviceFormat::Int4.expert_bytes(256, 128, false), units * (1024 + 128) + factors);
        assert_eq!(
            DeviceFormat::Int4Zeros.expert_bytes(256, 128, false),
            units * (1024 + 128 + 32) + factors
        );
        assert_eq!(DeviceFormat::Nvfp4.expert_bytes(256, 128, false), units * (1024 + 128) + factors);
        assert_eq!(DeviceFormat::Mxfp8.expert_bytes(256, 128, false), units * (2048 + 64) + factors);
    }

    /// The kernels compute sizes by themselves.
    #[cfg(feature = "cuda")]
    #[test]
    fn sizes_are_those_of_the_kernels() {
        use DeviceFormat::{Bf16, Fp8, Int4, Int4Zeros, Mxfp4, Mxfp8, Nvfp4, W8a8};
        use expertd_kernels::experts::{PACK_DOWN, PACK_GATE_UP, matrix_bytes};
        for format in [Bf16, Fp8, W8a8, Mxfp4, Int4, Int4Zeros, Nvfp4, Mxfp8] {
            for (hidden, inter) in [(64, 128), (192, 256), (2048, 768), (2880 - 64, 2880 - 64)] {
                let kernels = [PACK_GATE_UP, PACK_DOWN]
                    .map(|kind| matrix_bytes(format.code(), kind, hidden, inter) as usize);
                assert_eq!(format.matrix_bytes(hidden, inter), kernels, "{format:?} {hidden} × {inter}");
            }
        }
    }
}
