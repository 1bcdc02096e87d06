//! Places of weights in one allocation of device memory.

use expertd_kernels::experts::ALIGNMENT;

/// Hands out places in device memory, one after another. Two spaces that are asked for the same sizes in the same order hand
/// out the same offsets, so that a process which maps memory finds what another one has packed.
#[derive(Debug)]
pub struct WeightSpace {
    base: u64,
    next: u64,
}

impl WeightSpace {
    /// A space that begins at device address `base`, a multiple of [`ALIGNMENT`].
    #[must_use]
    pub const fn at(base: u64) -> Self {
        WeightSpace { base, next: base }
    }

    /// A space that only counts bytes. Its addresses are not to be used.
    #[must_use]
    pub const fn counting() -> Self {
        WeightSpace::at(0)
    }

    /// Device address of the next `bytes` bytes, a multiple of [`ALIGNMENT`]; 0 for no bytes.
    pub fn take(&mut self, bytes: usize) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let address = self.next;
        self.next = (address + bytes as u64).next_multiple_of(ALIGNMENT);
        address
    }

    /// Bytes up to the end of the last place.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.next - self.base
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_each_other_and_are_aligned() {
        let mut space = WeightSpace::at(4096);
        assert_eq!((space.take(1), space.take(0), space.take(1024), space.take(2)), (4096, 0, 5120, 6144));
        assert_eq!(space.bytes(), 3 * ALIGNMENT);
        let mut counted = WeightSpace::counting();
        for bytes in [1, 0, 1024, 2] {
            counted.take(bytes);
        }
        assert_eq!(counted.bytes(), space.bytes());
    }
}
