//! Hash maps for keys that this process makes itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A hasher that multiplies once per key. Request keys are counted and client keys come from a seeded hash, so callers cannot
/// choose them; the fixed function makes iteration, and with it a simulated schedule, the same in every run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        // The factor is 2^64 divided by the golden ratio. The product's high bits are well mixed, so they are moved down.
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}

pub(crate) type KeyMap<K, V> = HashMap<K, V, BuildHasherDefault<KeyHasher>>;
