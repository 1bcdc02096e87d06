//! The part of the vector kernels that does not depend on the length of vectors.

/// Defines the kernels of one instruction set: `P`, `ROWS`, `Wide`, the trait `Format` with one type per weight format, and
/// `kernels`. The file that uses the macro implements `Format` for the five types. `sums` gives the number of sets of sums for
/// each number of rows: a tile of few rows has registers to spare, and a second set hides the latency of the multiply-add.
macro_rules! vector_kernels {
    (
        level: $level:expr,
        features: $features:literal,
        vector: $vector:ty,
        zero: $zero:path,
        splat: $splat:path,
        load: $load:path,
        store: $store:path,
        add: $add:path,
        multiply_add: $multiply_add:path,
        sums: [$($rows:literal: $sums:literal),*],
    ) => {
        /// Outputs of a panel: two vectors.
        const P: usize = $level.panel_width();
        const ROWS: usize = $level.max_tile_rows();
        const LANES: usize = P / 2;

        pub(super) fn kernels(format: WeightFormat) -> &'static [Kernel; ROWS] {
            match format {
                WeightFormat::F32 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4 | WeightFormat::Int4 => const { &kernels_of::<F32>() },
                WeightFormat::F16 => const { &kernels_of::<F16>() },
                WeightFormat::Bf16 => const { &kernels_of::<Bf16>() },
                WeightFormat::Fp8E4m3 => const { &kernels_of::<Fp8>() },
                WeightFormat::Mxfp4 => const { &kernels_of::<Mxfp4>() },
            }
        }

        const fn kernels_of<F: Format>() -> [Kernel; ROWS] {
            [$(tile::<F, $rows, $sums>),*]
        }

        /// The weights of one input feature for the outputs of a panel.
        type Wide = [$vector; 2];

        /// The decoding of one format. The functions are inlined into `tile`, which enables the CPU features.
        trait Format {
            /// Bytes of a block.
            const BLOCK: usize;
            /// Whether scales are stored apart from the weights.
            const SCALED: bool = false;

            /// Loads the scales of a whole block; zeros if the format has none.
            ///
            /// # Safety
            /// Requires the CPU features. `block` points to a block, `scales` to a vector of scales if the format is
            /// `SCALED`.
            #[inline(always)]
            unsafe fn scale(_block: *const u8, _scales: *const f32) -> Wide {
                // SAFETY: a register operation.
                unsafe { [$zero(); 2] }
            }

            /// Widens the weights of input feature `i`.
            ///
            /// # Safety
            /// Requires the CPU features. `block` points to a block, and `i < K_BLOCK`.
            unsafe fn widen(block: *const u8, i: usize, scale: Wide) -> Wide;
        }

        struct F32;
        struct F16;
        struct Bf16;
        struct Fp8;
        struct Mxfp4;

        /// Adds the products of a tile of `R` rows to its sums; `S` is the number of sets of sums.
        ///
        /// # Safety
        /// See [`Kernel`].
        #[target_feature(enable = $features)]
        unsafe fn tile<F: Format, const R: usize, const S: usize>(args: &KernelArgs) {
            // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states.
            unsafe {
                let mut acc = [[[$zero(); 2]; R]; S];
                let (mut weights, mut x, mut prefetch) = (args.weights, args.x, args.prefetch);
                let (mut scales, mut scale_left) = (args.scales, args.scale_left);
                for _ in 0..args.blocks {
                    if F::SCALED {
                        if scale_left == 0 {
                            scales = scales.add(P);
                            scale_left = args.scale_blocks;
                        }
                        scale_left -= 1;
                    }
                    let scale = F::scale(weights, scales);
                    for pair in 0..K_BLOCK / 2 {
                        for line in 0..F::BLOCK.div_ceil(K_BLOCK / 2 * 64) {
                            _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(line * 64).cast());
                        }
                        prefetch = prefetch.wrapping_add(args.prefetch_step);
                        for odd in 0..2 {
                            let i = pair * 2 + odd;
                            let wide = F::widen(weights, i, scale);
                            for (r, acc) in acc[odd % S].iter_mut().enumerate() {
                                let x = $splat(*x.add(r * K_BLOCK + i));
                                acc[0] = $multiply_add(wide[0], x, acc[0]);
                                acc[1] = $multiply_add(wide[1], x, acc[1]);
                            }
                        }
                    }
                    weights = weights.add(F::BLOCK);
                    x = x.add(R * K_BLOCK);
                }
                let (low, high) = (acc[0], acc[S - 1]);
                for (r, (low, high)) in low.into_iter().zip(high).enumerate() {
                    for (half, (low, high)) in low.into_iter().zip(high).enumerate() {
                        let at = args.acc.add(r * P + half * LANES);
                        let sum = if S == 2 { $add(low, high) } else { low };
                        $store(at, $add($load(at), sum));
                    }
                }
            }
        }
    };
}
pub(super) use vector_kernels;
