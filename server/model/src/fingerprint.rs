//! A weight version from contents.
//!
//! Reading all weights to number them would cost minutes. Instead a 64-bit FNV-1a hash is taken of `config.json`, and
//! of each file with MoE tensors: its length, its header, and [`SAMPLES`] windows of its data, evenly spaced. Files
//! that differ only between the windows get the same number; a new training or conversion run does not.

use super::store::Store;
use expertd_types::WeightVersion;

/// Windows of each file.
const SAMPLES: usize = 32;
/// Bytes of a window.
const WINDOW: usize = 64;

pub(super) fn fingerprint(config: &[u8], store: &Store) -> WeightVersion {
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    hash.add(config);
    for (_, file, data_start) in store.opened() {
        hash.add(&(file.len() as u64).to_le_bytes());
        hash.add(&file[..data_start]);
        let data = &file[data_start..];
        let step = (data.len() / SAMPLES).max(WINDOW);
        for window in data.chunks(step) {
            hash.add(&window[..window.len().min(WINDOW)]);
        }
    }
    // Zero means "no version" on the wire.
    WeightVersion(hash.0.max(1))
}

struct Fnv(u64);

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
