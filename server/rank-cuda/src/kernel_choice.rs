//! Which of the experts' kernels a step launches, and with which tiles.
//!
//! Launches are captured before the routing is known, so the choice follows from the step's shape. All kernels are right for any
//! routing. The limits are what was measured ([gpu-experts](../../../docs/measurements/gpu-experts.md#the-kernel-for-few-rows)).

#[cfg(feature = "cuda")]
use expertd_kernels::experts;
use expertd_kernels::path::KernelPath;

use crate::format::DeviceFormat;

/// Least mean number of rows of an expert for the kernel for many rows (W4A8).
#[cfg(feature = "cuda")]
const MANY_ROWS: f64 = 112.0;

/// The work of a rank's experts in a step.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsLoad {
    /// The largest number of rows of all ranks, times experts per row.
    pub assignments: u64,
    /// Number of experts among which rows choose.
    pub experts: usize,
    /// Number of experts of the rank.
    pub local_experts: usize,
    /// Bytes of an expert's weights.
    pub expert_bytes: usize,
    /// Multiprocessors of the GPU.
    pub multiprocessors: u32,
    /// The kernels that the process runs.
    pub kernels: KernelPath,
}

impl ExpertsLoad {
    /// Mean number of rows of an expert.
    fn mean(&self) -> f64 {
        self.assignments as f64 / self.experts as f64
    }

    /// Bytes of weights that a multiprocessor reads if rows choose experts evenly.
    fn bytes(&self) -> f64 {
        // An expert stays without rows with probability (1 - 1 / experts)^assignments.
        let active = self.local_experts as f64 * (1.0 - (-self.mean()).exp());
        active * self.expert_bytes as f64 / f64::from(self.multiprocessors)
    }
}

impl DeviceFormat {
    /// The launch flags that choose the kernel of a step.
    #[cfg(feature = "cuda")]
    pub fn kernel_flags(self, load: &ExpertsLoad) -> i32 {
        match self {
            _ if self.has_few_rows(load) => experts::FEW_ROWS,
            DeviceFormat::W4a8 if load.mean() >= MANY_ROWS => experts::MANY_ROWS,
            _ => 0,
        }
    }

    /// Whether the kernel for few rows is expected to be faster with even routing.
    pub fn has_few_rows(self, load: &ExpertsLoad) -> bool {
        // The kernel reads an expert's weights once for every eight rows, and brings large weights no faster than the usual one.
        let portable = load.kernels == KernelPath::Portable;
        let (rows, bytes) = match self {
            DeviceFormat::Bf16 if portable => (2.0, f64::INFINITY),
            DeviceFormat::Bf16 => (4.0, 3.5e6),
            DeviceFormat::Int4 | DeviceFormat::Int4Zeros if portable => (8.0, f64::INFINITY),
            DeviceFormat::Int4 | DeviceFormat::Int4Zeros => (4.0, f64::INFINITY),
            DeviceFormat::Nvfp4 => (2.0, f64::INFINITY),
            DeviceFormat::Fp8 | DeviceFormat::Mxfp4 => (5.0, f64::INFINITY),
            DeviceFormat::Mxfp8 => (0.5, 8e5),
            DeviceFormat::W8a8 => (0.5, 1e6),
            DeviceFormat::W4a8 => return false, // has no such kernel
        };
        load.mean() <= rows && load.bytes() <= bytes
    }

    /// Most tokens of a tile in the kernels for more rows; 0: the kernel chooses. The portable kernels have small tiles for weights that they
    /// widen.
    pub fn tile_tokens(self, load: &ExpertsLoad) -> i32 {
        let widens = self != DeviceFormat::Bf16;
        if load.kernels == KernelPath::Portable && widens && load.mean() <= 32.0 { 48 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank of `ranks` with `tokens` rows each.
    fn load(
        format: DeviceFormat,
        [hidden, inter, experts, top_k]: [usize; 4],
        ranks: usize,
        tokens: usize,
    ) -> ExpertsLoad {
        ExpertsLoad {
            assignments: (ranks * tokens * top_k) as u64,
            experts,
            local_experts: experts / ranks,
            expert_bytes: format.expert_bytes(hidden, inter, false),
            multiprocessors: 132,
            kernels: KernelPath::Hopper,
        }
    }

    const QWEN3: [usize; 4] = [2048, 768, 128, 8];
    const MIXTRAL: [usize; 4] = [4096, 14336, 8, 2];
    const DEEPSEEK: [usize; 4] = [7168, 2048, 256, 8];
    const GPT_OSS: [usize; 4] = [2880, 2880, 128, 4];

    #[cfg(feature = "cuda")]
    #[test]
    fn many_rows_are_chosen_for_mxfp4_with_fp8_rows_only() {
        for (format, model, tokens, flags) in [
            (DeviceFormat::W4a8, GPT_OSS, 2048, 0),
            (DeviceFormat::W4a8, GPT_OSS, 4096, experts::MANY_ROWS),
            (DeviceFormat::W4a8, QWEN3, 1024, 0),
            (DeviceFormat::W4a8, QWEN3, 2048, experts::MANY_ROWS),
            (DeviceFormat::Mxfp4, GPT_OSS, 8192, 0),
            (DeviceFormat::Mxfp4, GPT_OSS, 8, experts::FEW_ROWS),
        ] {
            assert_eq!(
                format.kernel_flags(&load(format, model, 1, tokens)),
                flags,
                "{format:?} {tokens} rows"
            );
        }
    }

    #[test]
    fn portable_kernels_have_limits_of_their_own() {
        let cases = [
            (DeviceFormat::Bf16, &[1, 8, 32][..], &[64, 128][..]),
            (DeviceFormat::Int4, &[1, 8, 32, 64, 128], &[256]),
            (DeviceFormat::Fp8, &[1, 8, 32], &[128]),
        ];
        for (format, few, many) in cases {
            for &tokens in few.iter().chain(many) {
                let load = load(format, QWEN3, 1, tokens);
                let portable = ExpertsLoad { kernels: KernelPath::Portable, ..load };
                assert_eq!(
                    format.has_few_rows(&portable),
                    few.contains(&tokens),
                    "{format:?}, {tokens} rows"
                );
                assert_eq!(format.tile_tokens(&load), 0);
            }
        }
        let tile = |format: DeviceFormat, tokens| {
            let load = load(format, QWEN3, 1, tokens);
            format.tile_tokens(&ExpertsLoad { kernels: KernelPath::Portable, ..load })
        };
        assert_eq!([128, 512, 1024].map(|tokens| tile(DeviceFormat::Mxfp4, tokens)), [48, 48, 0]);
        assert_eq!(tile(DeviceFormat::Bf16, 512), 0);
    }

    #[test]
    fn the_faster_kernel_is_chosen_where_both_were_measured() {
        let cases = [
            (DeviceFormat::Bf16, QWEN3, 4, &[1, 2, 4, 8, 16][..], &[32, 128][..]),
            (DeviceFormat::Bf16, QWEN3, 1, &[1, 2, 4], &[8, 16, 32]),
            (DeviceFormat::Bf16, MIXTRAL, 4, &[1], &[8]),
            (DeviceFormat::Bf16, DEEPSEEK, 4, &[], &[1, 8]),
            (DeviceFormat::Mxfp4, GPT_OSS, 4, &[1, 2, 4, 8, 16, 32], &[]),
            (DeviceFormat::Mxfp4, GPT_OSS, 1, &[1, 2, 4, 8, 16, 32], &[]),
            (DeviceFormat::Mxfp4, DEEPSEEK, 4, &[1, 2, 8], &[]),
            (DeviceFormat::Fp8, QWEN3, 4, &[1, 2, 4, 8, 16], &[]),
            (DeviceFormat::Fp8, QWEN3, 1, &[1, 2, 4, 8, 16, 32], &[]),
            (DeviceFormat::Fp8, GPT_OSS, 4, &[1, 2, 4, 8, 16, 32], &[]),
            (DeviceFormat::Int4, QWEN3, 4, &[2, 8], &[32, 128]),
            (DeviceFormat::Int4, QWEN3, 1, &[1, 2, 8, 16, 32, 48, 64], &[96, 128]),
            (DeviceFormat::Int4, DEEPSEEK, 1, &[1, 8, 32], &[]),
            (DeviceFormat::Int4Zeros, QWEN3, 1, &[1, 2, 8, 16, 32, 48, 64], &[96, 128]),
            (DeviceFormat::Nvfp4, QWEN3, 1, &[1, 2, 4, 8, 16, 32], &[64, 96, 128]),
            (DeviceFormat::Mxfp8, QWEN3, 1, &[1, 2], &[4, 8, 16, 32, 64, 128]),
            (DeviceFormat::W8a8, QWEN3, 4, &[1, 2], &[8, 16, 32]),
            (DeviceFormat::W8a8, QWEN3, 1, &[1], &[8]),
            (DeviceFormat::W8a8, DEEPSEEK, 4, &[], &[1, 8]),
            (DeviceFormat::W4a8, GPT_OSS, 1, &[], &[1, 8]),
        ];
        for (format, model, ranks, few, many) in cases {
            for (tokens, expected) in
                few.iter().map(|&few| (few, true)).chain(many.iter().map(|&many| (many, false)))
            {
                let load = load(format, model, ranks, tokens);
                assert_eq!(format.has_few_rows(&load), expected, "{format:?} {load:?}, {tokens} rows");
            }
        }
    }
}
