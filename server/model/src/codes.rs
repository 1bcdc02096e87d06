//! The values of codes of 8 bits and fewer.

/// Magnitudes of FP4 e2m1, indexed by the low three bits of a code; the fourth bit is the sign.
pub const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of an FP8 e4m3 code ("fn" variant: no infinities; 0x7f and 0xff are NaN).
#[must_use]
pub fn fp8_e4m3(code: u8) -> f32 {
    if code & 0x7f == 0x7f {
        return f32::NAN;
    }
    let mantissa = f32::from(code & 7);
    let magnitude = match code >> 3 & 15 {
        0 => mantissa * 2f32.powi(-9),
        exponent => (8.0 + mantissa) * 2f32.powi(i32::from(exponent) - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The value of an FP4 e2m1 code in the low four bits.
#[must_use]
pub fn fp4_e2m1(code: u8) -> f32 {
    let magnitude = FP4[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The value of an E8M0 exponent as the upper half of an f32. The conversion is exact: 2^-127 is the subnormal 0x0040.
/// 0xff is NaN.
#[must_use]
pub fn e8m0_bf16(code: u8) -> u16 {
    match code {
        0 => 0x0040,
        0xff => 0x7fc0,
        _ => u16::from(code) << 7,
    }
}
