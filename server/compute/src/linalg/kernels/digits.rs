//! The fixed-point numbers that kernels of several levels take: a block of a row is given by [`DIGITS`] signed digits of 8 bits per element
//! and a power of two, 24 bits in all.

/// Digits of an element, the highest first.
pub(super) const DIGITS: usize = 3;

/// In the bytes of an element's integer, 128 for each of the lower digits. Added, it makes these digits from 0 on; the highest bit of
/// each is then wrong, which an exclusive or with the same mends.
pub(super) const LOWER_DIGITS: i32 = 0x0080_8080;

/// Exponent of the integer of a block's largest element.
const EXPONENT: u32 = 22;

/// Added to the bits of a block's largest element, carries into its exponent if its integer exceeds 0x7f7f7f, whose digits are 127.
const CARRY: u32 = 0x1_0101;

/// The unit of a block's integers.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Biased exponent of the largest element.
    exponent: u32,
}

impl Unit {
    /// For a block whose largest magnitude has these bits; finite.
    #[inline(always)]
    pub(super) fn of(largest: u32) -> Self {
        // The unit must be a normal number.
        Unit { exponent: ((largest + CARRY) >> 23).max(EXPONENT + 1) }
    }

    /// What elements are multiplied with to become integers.
    #[inline(always)]
    pub(super) fn inverse(self) -> f32 {
        f32::from_bits((2 * 127 + EXPONENT - self.exponent) << 23)
    }

    /// The value of the unit.
    #[inline(always)]
    pub(super) fn value(self) -> f32 {
        f32::from_bits((self.exponent - EXPONENT) << 23)
    }
}
