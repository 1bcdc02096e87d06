//! The part of the vector kernels that does not depend on the length of vectors.

/// Defines the kernels of one instruction set: `P`, `ROWS`, `Wide`, the traits `Format` and `Scaled`, one type per way to
/// decode weights, and `kernels`. The file that uses the macro implements `Format` for `F32`, `F16` and `Bf16`, `Scaled` for
/// the others, and the functions `bf16`, `f16` and `i8`, which widen a vector from memory. `sums` gives the number of sets of
/// sums for each number of rows: a tile of few rows has registers to spare, and a second set hides the latency of the
/// multiply-add.
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
        subtract: $subtract:path,
        multiply: $multiply:path,
        multiply_add: $multiply_add:path,
        sums: [$($rows:literal: $sums:literal),*],
    ) => {
        /// Outputs of a panel: two vectors.
        const P: usize = $level.panel_width();
        const ROWS: usize = $level.max_tile_rows();
        const LANES: usize = P / 2;

        pub(super) fn kernels(format: WeightFormat) -> &'static [Kernel; ROWS] {
            match format {
                WeightFormat::F32 => const { &plain::<F32>() },
                WeightFormat::F16 => const { &plain::<F16>() },
                WeightFormat::Bf16 => const { &plain::<Bf16>() },
                WeightFormat::Fp8E4m3 => const { &scaled::<Fp8>() },
                WeightFormat::Mxfp8 => const { &scaled::<Mxfp8>() },
                WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => const { &scaled::<Fp4>() },
                WeightFormat::Int4 => const { &scaled::<Int4>() },
            }
        }

        const fn plain<F: Format>() -> [Kernel; ROWS] {
            [$(plain_tile::<F, $rows, $sums>),*]
        }

        const fn scaled<F: Scaled>() -> [Kernel; ROWS] {
            [$(scaled_tile::<F, $rows, $sums>),*]
        }

        /// The weights of one input feature for the outputs of a panel.
        type Wide = [$vector; 2];

        /// The decoding of a format without scales. The function is inlined into `plain_tile`, which enables the CPU
        /// features.
        trait Format {
            /// Bytes of a block.
            const BLOCK: usize;

            /// Widens the weights of input feature `i`.
            ///
            /// # Safety
            /// Requires the CPU features. `block` points to a block, and `i < K_BLOCK`.
            unsafe fn widen(block: *const u8, i: usize) -> Wide;
        }

        /// The decoding of a format with scales. The functions are inlined into `scaled_tile`, which enables the CPU
        /// features.
        trait Scaled {
            /// Bytes of the elements of a block.
            const ELEMENTS: usize;
            /// Whether a block starts with scales.
            const IN_BLOCK: bool = true;
            /// The elements of eight input features, less those that `next` returned.
            type Elements: Copy;

            /// The scales of a group.
            ///
            /// # Safety
            /// Requires the CPU features, a block as `args` describes it, and a vector of scales if the format has
            /// them apart from the blocks.
            #[inline(always)]
            unsafe fn scale(args: &KernelArgs, block: *const u8, scales: *const f32, group: usize) -> Wide {
                // SAFETY: the caller guarantees the extents.
                unsafe { scale_in_block(args.groups, block, scales, group) }
            }

            /// Loads eight input features.
            ///
            /// # Safety
            /// Requires the CPU features. `elements` points to the elements of a block, and `octet < K_BLOCK / OCTET`.
            unsafe fn load(elements: *const u8, octet: usize) -> Self::Elements;

            /// The unscaled weights of the next input feature, which is odd or even.
            ///
            /// # Safety
            /// Requires the CPU features.
            unsafe fn next(elements: &mut Self::Elements, odd: bool) -> Wide;
        }

        struct F32;
        struct F16;
        struct Bf16;
        struct Fp8;
        struct Mxfp8;
        struct Fp4;
        struct Int4;

        /// Loads the scales of a group from the header of a block.
        ///
        /// # Safety
        /// Requires the CPU features, a block of this layout, and factors if its scales are f16.
        #[inline(always)]
        unsafe fn scale_in_block(
            layout: GroupLayout,
            block: *const u8,
            factors: *const f32,
            group: usize,
        ) -> Wide {
            // SAFETY: the caller guarantees the extents.
            unsafe {
                let at = block.add(group * layout.group_bytes(P));
                match layout.scale {
                    PackedScale::Bf16 => [bf16(at), bf16(at.add(2 * LANES))],
                    PackedScale::F16 => [
                        $multiply(f16(at), $load(factors)),
                        $multiply(f16(at.add(2 * LANES)), $load(factors.add(LANES))),
                    ],
                    PackedScale::F32 => [$load(at.cast()), $load(at.add(4 * LANES).cast())],
                }
            }
        }

        /// Sums of eight neighbouring elements each of a row are added in this way, which does not depend on the tile.
        ///
        /// # Safety
        /// `x` points to `octets * OCTET` elements.
        #[inline(always)]
        unsafe fn sum_of(x: *const f32, octets: usize) -> f32 {
            let mut sums = [0.0_f32; OCTET];
            for octet in 0..octets {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: the caller guarantees the extent.
                    *sum += unsafe { *x.add(octet * OCTET + lane) };
                }
            }
            let [a, b, c, d, e, f, g, h] = sums;
            ((a + b) + (c + d)) + ((e + f) + (g + h))
        }

        /// Adds the products of a tile of `R` rows to its sums; `S` is the number of sets of sums.
        ///
        /// # Safety
        /// See [`Kernel`].
        #[target_feature(enable = $features)]
        unsafe fn plain_tile<F: Format, const R: usize, const S: usize>(args: &KernelArgs) {
            // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states.
            unsafe {
                let mut acc = [[[$zero(); 2]; R]; S];
                let (mut weights, mut x, mut prefetch) = (args.weights, args.x, args.prefetch);
                for _ in 0..args.blocks {
                    for pair in 0..K_BLOCK / 2 {
                        for line in 0..F::BLOCK.div_ceil(K_BLOCK / 2 * 64) {
                            _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(line * 64).cast());
                        }
                        prefetch = prefetch.wrapping_add(args.prefetch_step);
                        for odd in 0..2 {
                            let i = pair * 2 + odd;
                            let wide = F::widen(weights, i);
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

        /// Adds the products of a tile of `R` rows to its sums, group by group; `S` is the number of sets of sums.
        ///
        /// # Safety
        /// See [`Kernel`].
        #[target_feature(enable = $features)]
        unsafe fn scaled_tile<F: Scaled, const R: usize, const S: usize>(args: &KernelArgs) {
            // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states. `scales` is
            // read only by formats that have scales apart from the blocks.
            unsafe {
                let layout = args.groups;
                let header = if F::IN_BLOCK { layout.header_bytes(P) } else { 0 };
                let groups = if F::IN_BLOCK { layout.per_block } else { 1 };
                let octets = K_BLOCK / OCTET / groups;
                let (mut block, mut x, mut prefetch) = (args.weights, args.x, args.prefetch);
                let (mut scales, mut scale_left) = (args.scales, args.scale_left);
                for _ in 0..args.blocks {
                    if scale_left == 0 {
                        scales = scales.wrapping_add(P);
                        scale_left = args.scale_blocks;
                    }
                    scale_left -= 1;
                    let elements = block.add(header);
                    for group in 0..groups {
                        let mut acc = [[[$zero(); 2]; R]; S];
                        for octet in group * octets..(group + 1) * octets {
                            let mut weights = F::load(elements, octet);
                            for pair in 0..OCTET / 2 {
                                for line in 0..F::ELEMENTS.div_ceil(K_BLOCK / 2 * 64) {
                                    _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(line * 64).cast());
                                }
                                prefetch = prefetch.wrapping_add(args.prefetch_step);
                                for odd in 0..2 {
                                    let i = octet * OCTET + pair * 2 + odd;
                                    let wide = F::next(&mut weights, odd == 1);
                                    for (r, acc) in acc[odd % S].iter_mut().enumerate() {
                                        let x = $splat(*x.add(r * K_BLOCK + i));
                                        acc[0] = $multiply_add(wide[0], x, acc[0]);
                                        acc[1] = $multiply_add(wide[1], x, acc[1]);
                                    }
                                }
                            }
                        }
                        if S == 2 {
                            for r in 0..R {
                                for half in 0..2 {
                                    acc[0][r][half] = $add(acc[0][r][half], acc[1][r][half]);
                                }
                            }
                        }
                        if F::IN_BLOCK && layout.zeros {
                            let zeros = block.add((group + 1) * layout.group_bytes(P) - P);
                            let zeros = [i8(zeros), i8(zeros.add(LANES))];
                            for r in 0..R {
                                let start = x.add(r * K_BLOCK + group * octets * OCTET);
                                let sum = $splat(sum_of(start, octets));
                                for half in 0..2 {
                                    let offset = $multiply(zeros[half], sum);
                                    acc[0][r][half] = $subtract(acc[0][r][half], offset);
                                }
                            }
                        }
                        let scale = F::scale(args, block, scales, group);
                        for r in 0..R {
                            for half in 0..2 {
                                let at = args.acc.add(r * P + half * LANES);
                                $store(at, $multiply_add(acc[0][r][half], scale[half], $load(at)));
                            }
                        }
                    }
                    block = elements.add(F::ELEMENTS);
                    x = x.add(R * K_BLOCK);
                }
            }
        }
    };
}
pub(super) use vector_kernels;
