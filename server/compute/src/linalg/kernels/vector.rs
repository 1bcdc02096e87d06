//! The part of the vector kernels that does not depend on the length of vectors.

/// Defines the kernels of one instruction set: `P`, `ROWS`, `Wide`, the traits `Format` and `Scaled`, one type per way to
/// decode weights, and `kernels`. The file that uses the macro implements `Format` for `F16` and `Bf16`, `Scaled` for `Fp4` and
/// `Int4`, the type `Fp8Pairs`, and the functions `bf16`, `f16` and `i8`, which widen a vector from memory. `sums` gives the number of sets of
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

        pub(super) fn kernels(format: WeightFormat, zeros: bool) -> &'static [Kernel; ROWS] {
            match format {
                WeightFormat::F32 => const { &plain::<F32>() },
                WeightFormat::F16 => const { &plain::<F16>() },
                WeightFormat::Bf16 => const { &plain::<Bf16>() },
                WeightFormat::Fp8E4m3 => const { &scaled::<Fp8>() },
                WeightFormat::Mxfp8 => const { &scaled::<Mxfp8>() },
                WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => const { &scaled::<Fp4>() },
                WeightFormat::Int4 if zeros => const { &scaled::<Int4Zeros>() },
                WeightFormat::Int4 => const { &scaled::<Int4>() },
            }
        }

        const fn plain<F: Format>() -> [Kernel; ROWS] {
            [$(plain_tile::<F, $rows, $sums>),*]
        }

        pub(super) fn widen(format: WeightFormat, zeros: bool) -> Option<Kernel> {
            match format {
                WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => None,
                WeightFormat::Fp8E4m3 => Some(widen_blocks::<Fp8>),
                WeightFormat::Mxfp8 => Some(widen_blocks::<Mxfp8>),
                WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => Some(widen_blocks::<Fp4>),
                WeightFormat::Int4 if zeros => Some(widen_blocks::<Int4Zeros>),
                WeightFormat::Int4 => Some(widen_blocks::<Int4>),
            }
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
            /// Whether the layout is [`GroupLayout::MX`], which the compiler then knows.
            const MX: bool = false;
            /// Whether there are zero points.
            const ZEROS: bool = false;
            /// The elements of eight input features, or of those that `next` has not returned yet.
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

            /// The unscaled weights of the next input feature, `i` of the octet.
            ///
            /// # Safety
            /// Requires the CPU features. Called for `i` from 0 to 7 in order after each `load`.
            unsafe fn next(elements: &mut Self::Elements, i: usize) -> Wide;
        }

        struct F32;
        struct F16;
        struct Bf16;
        struct Fp8;
        struct Mxfp8;
        struct Fp4;
        struct Int4;
        struct Int4Zeros;

        impl Format for F32 {
            const BLOCK: usize = 4 * K_BLOCK * P;

            #[inline(always)]
            unsafe fn widen(block: *const u8, i: usize) -> Wide {
                // SAFETY: a block has P floats per input feature.
                unsafe {
                    let at = block.cast::<f32>().add(i * P);
                    [$load(at), $load(at.add(LANES))]
                }
            }
        }

        impl Scaled for Fp8 {
            const ELEMENTS: usize = K_BLOCK * P;
            const IN_BLOCK: bool = false;
            type Elements = Fp8Pairs;

            #[inline(always)]
            unsafe fn scale(_: &KernelArgs, _: *const u8, scales: *const f32, _: usize) -> Wide {
                // SAFETY: scales has P elements.
                unsafe { [$load(scales), $load(scales.add(LANES))] }
            }

            #[inline(always)]
            unsafe fn load(elements: *const u8, octet: usize) -> Fp8Pairs {
                // SAFETY: the caller guarantees the extent.
                unsafe { Fp8Pairs::load(elements, octet) }
            }

            #[inline(always)]
            unsafe fn next(elements: &mut Fp8Pairs, i: usize) -> Wide {
                // SAFETY: `scaled_tile` calls this eight times after a load.
                unsafe { elements.next(i % 2 == 1) }
            }
        }

        impl Scaled for Mxfp8 {
            const ELEMENTS: usize = Fp8::ELEMENTS;
            const MX: bool = true;
            type Elements = Fp8Pairs;

            #[inline(always)]
            unsafe fn scale(_: &KernelArgs, block: *const u8, _: *const f32, _: usize) -> Wide {
                // SAFETY: a block starts with P exponents.
                unsafe {
                    let factor = $splat(FP8_BIAS);
                    [$multiply(bf16(block), factor), $multiply(bf16(block.add(2 * LANES)), factor)]
                }
            }

            #[inline(always)]
            unsafe fn load(elements: *const u8, octet: usize) -> Fp8Pairs {
                // SAFETY: the trait function has the contract of the function that is called.
                unsafe { Fp8::load(elements, octet) }
            }

            #[inline(always)]
            unsafe fn next(elements: &mut Fp8Pairs, i: usize) -> Wide {
                // SAFETY: the trait function has the contract of the function that is called.
                unsafe { Fp8::next(elements, i) }
            }
        }

        impl Scaled for Int4Zeros {
            const ELEMENTS: usize = Int4::ELEMENTS;
            const ZEROS: bool = true;
            type Elements = <Int4 as Scaled>::Elements;

            #[inline(always)]
            unsafe fn load(elements: *const u8, octet: usize) -> Self::Elements {
                // SAFETY: the trait function has the contract of the function that is called.
                unsafe { Int4::load(elements, octet) }
            }

            #[inline(always)]
            unsafe fn next(elements: &mut Self::Elements, i: usize) -> Wide {
                // SAFETY: the trait function has the contract of the function that is called.
                unsafe { Int4::next(elements, i) }
            }
        }

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

        /// Loads the zero points of a group, less 8, from the header of a block.
        ///
        /// # Safety
        /// Requires the CPU features, and a block of this layout, which has zero points.
        #[inline(always)]
        unsafe fn zeros_in_block(layout: GroupLayout, block: *const u8, group: usize) -> Wide {
            // SAFETY: the zero points are the last P bytes of a group.
            unsafe {
                let zeros = block.add((group + 1) * layout.group_bytes(P) - P);
                [i8(zeros), i8(zeros.add(LANES))]
            }
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
                for number in 0..args.blocks {
                    if number == args.next_from {
                        prefetch = args.prefetch_next;
                    }
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

        /// Adds the products with input features `I` and `I + 1` of an octet, and returns the next address to prefetch. For one
        /// row, `sums_of_x` gets the sums of its elements instead of zero points being subtracted from weights.
        ///
        /// # Safety
        /// Requires the CPU features. `x` points to the octet's first input feature in the block of the first row.
        #[inline(always)]
        unsafe fn pair<F: Scaled, const R: usize, const S: usize, const I: usize>(
            args: &KernelArgs,
            acc: &mut [[Wide; R]; S],
            sums_of_x: &mut [$vector; S],
            weights: &mut F::Elements,
            zeros: Wide,
            x: *const f32,
            prefetch: *const u8,
        ) -> *const u8 {
            // SAFETY: the caller guarantees the CPU features and the extents. A prefetch takes any address.
            unsafe {
                // The header counts where it fills a line that the lines of the elements leave out.
                let bytes = F::ELEMENTS + if F::MX { GroupLayout::MX.header_bytes(P) } else { 0 };
                for line in 0..bytes.div_ceil(K_BLOCK / 2 * 64) {
                    _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(line * 64).cast());
                }
                for i in [I, I + 1] {
                    let mut wide = F::next(weights, i);
                    if F::ZEROS && R > 1 {
                        wide = [$subtract(wide[0], zeros[0]), $subtract(wide[1], zeros[1])];
                    }
                    for (r, acc) in acc[i % S].iter_mut().enumerate() {
                        let x = $splat(*x.add(r * K_BLOCK + i));
                        if F::ZEROS && R == 1 {
                            sums_of_x[i % S] = $add(sums_of_x[i % S], x);
                        }
                        acc[0] = $multiply_add(wide[0], x, acc[0]);
                        acc[1] = $multiply_add(wide[1], x, acc[1]);
                    }
                }
                prefetch.wrapping_add(args.prefetch_step)
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
                let layout = if F::MX { GroupLayout::MX } else { args.groups };
                let header = if F::IN_BLOCK { layout.header_bytes(P) } else { 0 };
                let groups = if F::IN_BLOCK { layout.per_block } else { 1 };
                let octets = K_BLOCK / OCTET / groups;
                let (mut block, mut x, mut prefetch) = (args.weights, args.x, args.prefetch);
                let (mut scales, mut scale_left) = (args.scales, args.scale_left);
                for number in 0..args.blocks {
                    if number == args.next_from {
                        prefetch = args.prefetch_next;
                    }
                    if scale_left == 0 {
                        scales = scales.wrapping_add(P);
                        scale_left = args.scale_blocks;
                    }
                    scale_left -= 1;
                    let elements = block.add(header);
                    for group in 0..groups {
                        let zeros = if F::ZEROS {
                            zeros_in_block(layout, block, group)
                        } else {
                            [$zero(); 2]
                        };
                        let mut acc = [[[$zero(); 2]; R]; S];
                        let mut sums_of_x = [$zero(); S];
                        for octet in group * octets..(group + 1) * octets {
                            let mut weights = F::load(elements, octet);
                            let x = x.add(octet * OCTET);
                            // One call per input feature: constants that depend on it are then immediate operands.
                            prefetch = pair::<F, R, S, 0>(args, &mut acc, &mut sums_of_x, &mut weights, zeros, x, prefetch);
                            prefetch = pair::<F, R, S, 2>(args, &mut acc, &mut sums_of_x, &mut weights, zeros, x, prefetch);
                            prefetch = pair::<F, R, S, 4>(args, &mut acc, &mut sums_of_x, &mut weights, zeros, x, prefetch);
                            prefetch = pair::<F, R, S, 6>(args, &mut acc, &mut sums_of_x, &mut weights, zeros, x, prefetch);
                        }
                        if F::ZEROS && R == 1 {
                            for (acc, sum_of_x) in acc.iter_mut().zip(sums_of_x) {
                                for half in 0..2 {
                                    let product = $multiply(zeros[half], sum_of_x);
                                    acc[0][half] = $subtract(acc[0][half], product);
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
                        let scale = F::scale(args, block, scales, group);
                        // Two short loops: the compiler keeps sums in registers only where it unrolls all loops over rows.
                        for (r, sums) in acc[0].iter().enumerate() {
                            let at = args.acc.add(r * P);
                            $store(at, $multiply_add(sums[0], scale[0], $load(at)));
                        }
                        for (r, sums) in acc[0].iter().enumerate() {
                            let at = args.acc.add(r * P + LANES);
                            $store(at, $multiply_add(sums[1], scale[1], $load(at)));
                        }
                    }
                    block = elements.add(F::ELEMENTS);
                    x = x.add(R * K_BLOCK);
                }
            }
        }

        /// Writes the weights of the blocks, scaled, to `acc` as f32 blocks.
        ///
        /// # Safety
        /// See [`Kernel`]; `acc` is `[blocks, 32, P]`, and `x` is not read.
        #[target_feature(enable = $features)]
        unsafe fn widen_blocks<F: Scaled>(args: &KernelArgs) {
            // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states. `scales` is
            // read only by formats that have scales apart from the blocks.
            unsafe {
                let layout = if F::MX { GroupLayout::MX } else { args.groups };
                let header = if F::IN_BLOCK { layout.header_bytes(P) } else { 0 };
                let groups = if F::IN_BLOCK { layout.per_block } else { 1 };
                let octets = K_BLOCK / OCTET / groups;
                let (mut block, mut out) = (args.weights, args.acc);
                let (mut scales, mut scale_left) = (args.scales, args.scale_left);
                for _ in 0..args.blocks {
                    if scale_left == 0 {
                        scales = scales.wrapping_add(P);
                        scale_left = args.scale_blocks;
                    }
                    scale_left -= 1;
                    let elements = block.add(header);
                    for group in 0..groups {
                        let scale = F::scale(args, block, scales, group);
                        let zeros = if F::ZEROS {
                            zeros_in_block(layout, block, group)
                        } else {
                            [$zero(); 2]
                        };
                        for octet in group * octets..(group + 1) * octets {
                            let mut weights = F::load(elements, octet);
                            for i in 0..OCTET {
                                let wide = F::next(&mut weights, i);
                                for half in 0..2 {
                                    let weight = $subtract(wide[half], zeros[half]);
                                    $store(out.add(half * LANES), $multiply(weight, scale[half]));
                                }
                                out = out.add(P);
                            }
                        }
                    }
                    block = elements.add(F::ELEMENTS);
                }
            }
        }
    };
}
pub(super) use vector_kernels;
