//! The weight version of a checkpoint, computed from its contents.
//!
//! Hashing all weights would take minutes. Instead, a 64-bit FNV-1a hash covers `config.json` and, for each file with
//! MoE tensors, its length, its header and [`SAMPLES`] evenly spaced samples of its data. Files that differ only
//! between the samples get the same version; new training or conversion runs do not.

use super::store::Store;
use expertd_types::WeightVersion;

/// Samples per file.
const SAMPLES: usize = 32;
/// Bytes per sample.
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
