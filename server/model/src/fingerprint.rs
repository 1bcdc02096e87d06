//! The fingerprint of a checkpoint's contents.
//!
//! It covers the description of the model in `config.json` and every tensor of its MoE blocks, including those of layers that are
//! not held: name, type, shape and bytes, in the order of names. Folders, files, the distribution of tensors over files and
//! everything outside the MoE blocks are not covered. Reading all bytes would take minutes, so by default [`SAMPLES`] evenly spaced
//! samples of all tensors, laid end to end, stand for them: weights that differ only between the samples have the same fingerprint.
//!
//! The digest is SHA-256, of whole tensors as a digest of the digests of their [`CHUNK`]s, so that several threads can
//! compute it; its first 16 bytes are the fingerprint.

use expertd_types::{Coverage, WeightFingerprint};
use rayon::prelude::*;
use ring::digest::{Context, Digest, SHA256, digest};

use super::store::Store;

/// Version of the digest, which changes with its contents or their order.
const SCHEME: &[u8] = b"expertd weights 1";
/// Largest number of samples of a checkpoint.
const SAMPLES: usize = 8192;
/// Bytes per sample.
const SAMPLE_BYTES: usize = 64;
/// Number of bytes that are digested at a time.
const CHUNK: usize = 16 << 20;

/// `digested` is told numbers of bytes as they are digested.
pub(super) fn fingerprint(
    description: &[u8],
    store: &Store,
    coverage: Coverage,
    digested: &(dyn Fn(usize) + Sync),
) -> WeightFingerprint {
    let mut tensors: Vec<_> = store.tensors().collect();
    tensors.sort_unstable_by_key(|(info, _)| &info.name);
    let mut context = Context::new(&SHA256);
    context.update(SCHEME);
    add(&mut context, description);
    for (info, bytes) in &tensors {
        add(&mut context, info.name.as_bytes());
        add(&mut context, format!("{:?} {:?} {}", info.dtype, info.shape, bytes.len()).as_bytes());
    }
    match coverage {
        Coverage::Whole => {
            let chunks: Vec<&[u8]> = tensors.iter().flat_map(|(_, bytes)| bytes.chunks(CHUNK)).collect();
            let digest = |chunk: &[u8]| {
                let digest = digest(&SHA256, chunk);
                digested(chunk.len());
                digest
            };
            let digests: Vec<Digest> = chunks.into_par_iter().map(digest).collect();
            digests.iter().for_each(|digest| context.update(digest.as_ref()));
        }
        Coverage::Sampled => {
            let total: usize = tensors.iter().map(|(_, bytes)| bytes.len()).sum();
            let step = (total / SAMPLES).max(SAMPLE_BYTES);
            let (mut first, mut next) = (0, 0);
            let mut samples: Vec<&[u8]> = Vec::new();
            for (_, bytes) in &tensors {
                while next < first + bytes.len() {
                    let at = next - first;
                    samples.push(&bytes[at..(at + SAMPLE_BYTES).min(bytes.len())]);
                    next += step;
                }
                first += bytes.len();
            }
            // Each sample may be a read of the disk: several threads wait for them.
            store.expect_few_bytes(true);
            let samples: Vec<Vec<u8>> = samples.into_par_iter().map(<[u8]>::to_vec).collect();
            store.expect_few_bytes(false);
            samples.iter().for_each(|sample| context.update(sample));
        }
    }
    let mut short = [0; 16];
    short.copy_from_slice(&context.finish().as_ref()[..16]);
    WeightFingerprint { coverage, digest: short }
}

/// Adds bytes with their length, so that the ends of fields cannot move.
fn add(context: &mut Context, bytes: &[u8]) {
    context.update(&(bytes.len() as u64).to_le_bytes());
    context.update(bytes);
}
