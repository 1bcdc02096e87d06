//! The activation, fused into the end of the gate and up projections.
#![allow(unsafe_code, reason = "the same code, compiled for several CPU features")]

use super::packed::K_BLOCK;
use super::parallel::DisjointSlice;
use super::simd_level::SimdLevel;
use super::tiles::Tiling;
use expertd_model::Activation;

/// Computes inputs of the down projection from one panel of gate and up projections.
///
/// `acc` is `[rows, P]`: the first half of a row holds gate projections, the second half up projections. `weights`
/// holds the routing weight of each row if the results are to be multiplied by it.
///
/// # Safety
/// Nothing else may use the columns of `output` during the call.
///
/// # Panics
/// If `output` does not lie within its buffer.
pub(crate) unsafe fn activate(
    level: SimdLevel,
    activation: Activation,
    acc: &[f32],
    weights: Option<&[f32]>,
    output: PanelOutput<'_>,
) {
    assert!(level.is_supported());
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level is supported, and the caller guarantees the columns of `output`.
        SimdLevel::Avx512 => unsafe { avx512(activation, acc, weights, output) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level is supported, and the caller guarantees the columns of `output`.
        SimdLevel::Avx2 => unsafe { avx2(activation, acc, weights, output) },
        // SAFETY: the caller guarantees the columns of `output`.
        _ => unsafe {
            by_activation::<{ SimdLevel::Portable.panel_width() / 2 }>(
                level, activation, acc, weights, output,
            )
        },
    }
}

/// Destination of a panel's results: in rows packed in tiles, the columns from `panel * P / 2` on. The last panel also
/// fills its block up to the end.
#[derive(Clone, Copy)]
pub(crate) struct PanelOutput<'a> {
    /// The buffer that holds the packed rows.
    pub(crate) h: DisjointSlice<'a, f32>,
    /// Offset of the first row in `h`, in elements.
    pub(crate) start: usize,
    /// Length of a row, padding included.
    pub(crate) padded: usize,
    /// Index of the panel.
    pub(crate) panel: usize,
    /// Whether the panel is the last one.
    pub(crate) last: bool,
}

/// # Safety
/// The CPU supports the features; otherwise see [`activate`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn avx512(activation: Activation, acc: &[f32], weights: Option<&[f32]>, output: PanelOutput<'_>) {
    // SAFETY: the caller guarantees the columns of `output`.
    unsafe {
        by_activation::<{ SimdLevel::Avx512.panel_width() / 2 }>(
            SimdLevel::Avx512,
            activation,
            acc,
            weights,
            output,
        )
    }
}

/// # Safety
/// The CPU supports the features; otherwise see [`activate`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(activation: Activation, acc: &[f32], weights: Option<&[f32]>, output: PanelOutput<'_>) {
    // SAFETY: the caller guarantees the columns of `output`.
    unsafe {
        by_activation::<{ SimdLevel::Avx2.panel_width() / 2 }>(
            SimdLevel::Avx2,
            activation,
            acc,
            weights,
            output,
        )
    }
}

/// # Safety
/// See [`activate`].
#[inline(always)]
unsafe fn by_activation<const HALF: usize>(
    level: SimdLevel,
    activation: Activation,
    acc: &[f32],
    weights: Option<&[f32]>,
    output: PanelOutput<'_>,
) {
    // SAFETY: the caller guarantees the columns of `output`.
    unsafe {
        match activation {
            Activation::SwiGlu => {
                rows::<HALF>(level, acc, weights, output, |gate, up| gate / (1.0 + exp(-gate)) * up);
            }
            Activation::SwiGluClamped { limit } => rows::<HALF>(level, acc, weights, output, |gate, up| {
                let gate = at_most(gate, limit);
                gate / (1.0 + exp(-gate)) * within(up, limit)
            }),
            Activation::SwiGluOai { alpha, limit } => {
                rows::<HALF>(level, acc, weights, output, |gate, up| {
                    let gate = at_most(gate, limit);
                    gate / (1.0 + exp(-alpha * gate)) * (within(up, limit) + 1.0)
                })
            }
        }
    }
}

/// # Safety
/// See [`activate`].
#[inline(always)]
unsafe fn rows<const HALF: usize>(
    level: SimdLevel,
    acc: &[f32],
    weights: Option<&[f32]>,
    output: PanelOutput<'_>,
    function: impl Fn(f32, f32) -> f32,
) {
    let (halves, _) = acc.as_chunks::<HALF>();
    let (block, offset) = (output.panel * HALF / K_BLOCK, output.panel * HALF % K_BLOCK);
    let width = if output.last { K_BLOCK - offset } else { HALF };
    for tile in Tiling::new(level, halves.len() / 2).iter() {
        for r in 0..tile.rows {
            let row = tile.start + r;
            let weight = weights.map_or(1.0, |weights| weights[row]);
            let at = output.start + tile.start * output.padded + (block * tile.rows + r) * K_BLOCK + offset;
            // SAFETY: the caller guarantees these columns.
            let (values, rest) = unsafe { output.h.part_mut(at..at + width) }.split_at_mut(HALF);
            for ((value, gate), up) in values.iter_mut().zip(&halves[2 * row]).zip(&halves[2 * row + 1]) {
                *value = function(*gate, *up) * weight;
            }
            rest.fill(0.0);
        }
    }
}

/// `min` that returns NaN for NaN, as PyTorch's `clamp` does.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

#[inline(always)]
fn within(x: f32, limit: f32) -> f32 {
    if x < -limit { -limit } else { at_most(x, limit) }
}

/// The exponential function to about one unit in the last place, without branches or calls, so that the compiler can
/// vectorise it: `2^n e^r` with `|r| <= ln 2 / 2`, and `e^r` by the minimax polynomial of Cephes' `expf`. Results below
/// the smallest normal number become 0; the result for NaN is unspecified.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the product of n and the first part is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let bounded = within(x, 100.0);
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = bounded - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_2e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + coefficient;
    }
    let p = p * r * r + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    let result = if x < -87.33 { 0.0 } else { p * power };
    // From here on n would be 128, which the exponent cannot hold.
    if x > 88.37 { f32::INFINITY } else { result }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::linalg::tiles::padded;

    #[test]
    fn exp_is_accurate() {
        for i in -873_000..883_000 {
            let x = i as f32 * 1e-4 + 3e-5;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got - want).abs() <= 1.5e-7 * want, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!((exp(-1e30), exp(f32::NEG_INFINITY)), (0.0, 0.0));
        assert_eq!((exp(1e30), exp(f32::INFINITY), exp(89.0)), (f32::INFINITY, f32::INFINITY, f32::INFINITY));
    }

    #[test]
    fn activations_at_every_level() {
        let mut rng = expertd_test_seed::rng();
        for level in SimdLevel::ALL.into_iter().filter(|level| level.is_supported()) {
            for activation in [
                Activation::SwiGlu,
                Activation::SwiGluClamped { limit: 2.5 },
                Activation::SwiGluOai { alpha: 1.702, limit: 7.0 },
            ] {
                for (count, features) in [(1, 5), (7, 40), (13, 96), (25, 33)] {
                    let half = level.panel_width() / 2;
                    let panels = usize::div_ceil(features, half);
                    let weights: Vec<f32> = (0..count).map(|_| rng.random_range(0.0..2.0)).collect();
                    let mut h = vec![f32::NAN; count * padded(features)];
                    let accs: Vec<Vec<f32>> = (0..panels)
                        .map(|_| (0..count * 2 * half).map(|_| rng.random_range(-12.0..12.0)).collect())
                        .collect();
                    let shared = DisjointSlice::new(&mut h);
                    for (panel, acc) in accs.iter().enumerate() {
                        let (padded, last) = (padded(features), panel + 1 == panels);
                        let output = PanelOutput { h: shared, start: 0, padded, panel, last };
                        // SAFETY: there is one thread.
                        unsafe { activate(level, activation, acc, Some(&weights), output) };
                    }
                    for tile in Tiling::new(level, count).iter() {
                        for (r, column) in
                            (0..tile.rows).flat_map(|r| (0..padded(features)).map(move |c| (r, c)))
                        {
                            let at = tile.start * padded(features)
                                + (column / 32 * tile.rows + r) * 32
                                + column % 32;
                            let want = if column < panels * half {
                                let row = (tile.start + r) * 2 * half + column % half;
                                let acc = &accs[column / half];
                                activation.apply(acc[row], acc[row + half]) * weights[tile.start + r]
                            } else {
                                0.0
                            };
                            assert!(
                                (h[at] - want).abs() <= 1e-6 * want.abs(),
                                "{level} {activation}: {} {want}",
                                h[at]
                            );
                        }
                    }
                }
            }
        }
    }
}
