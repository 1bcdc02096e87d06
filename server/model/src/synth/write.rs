//! Safetensors files, written in blocks.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::draw::{Tables, mix};
use super::layout::Tensor;
use super::{SynthConfig, SynthError};

/// Bytes drawn and written at a time.
const CHUNK: usize = 16 << 20;

/// Writes tensors into one file, or into shards with an index.
pub(super) fn tensors(
    tensors: &[Tensor],
    config: &SynthConfig,
    dir: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<(), SynthError> {
    let shards = split(tensors, config.max_shard_bytes);
    let tables = Tables::new();
    let mut weight_map = Map::new();
    let mut number = 0;
    for (i, shard) in shards.iter().enumerate() {
        let name = file_name(i, shards.len());
        let path = dir.join(&name);
        let seeds = (number..).map(|n: u64| mix(config.seed ^ mix(n)));
        file(&path, shard, seeds, &tables, progress).map_err(|source| SynthError::Io { path, source })?;
        number += shard.len() as u64;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), Value::from(name.clone()))));
    }
    if shards.len() > 1 {
        let total: u64 = tensors.iter().map(Tensor::bytes).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        let path = dir.join("model.safetensors.index.json");
        std::fs::write(&path, format!("{index:#}\n")).map_err(|source| SynthError::Io { path, source })?;
    }
    Ok(())
}

fn file_name(shard: usize, shards: usize) -> String {
    if shards == 1 {
        return "model.safetensors".to_owned();
    }
    format!("model-{:05}-of-{shards:05}.safetensors", shard + 1)
}

/// Size of the files that [`tensors`] would overwrite.
pub(super) fn overwritten_bytes(tensors: &[Tensor], config: &SynthConfig, dir: &Path) -> u64 {
    let shards = split(tensors, config.max_shard_bytes).len();
    let found = (0..shards).filter_map(|shard| std::fs::metadata(dir.join(file_name(shard, shards))).ok());
    found.map(|file| file.len()).sum()
}

/// Divides the tensors into groups of consecutive ones of up to `max_bytes`.
fn split(tensors: &[Tensor], max_bytes: u64) -> Vec<&[Tensor]> {
    let mut shards = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > start && size + tensor.bytes() > max_bytes {
            shards.push(&tensors[start..i]);
            (start, size) = (i, 0);
        }
        size += tensor.bytes();
    }
    shards.push(&tensors[start..]);
    shards
}

fn file(
    path: &Path,
    tensors: &[Tensor],
    seeds: impl Iterator<Item = u64>,
    tables: &Tables,
    progress: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let mut file = File::create(path)?;
    let header = header(tensors);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut buffer = vec![0; CHUNK];
    let mut filled = 0;
    for (tensor, seed) in tensors.iter().zip(seeds) {
        let mut start = 0;
        while start < tensor.bytes() {
            // Small tensors are gathered; a block of a tensor always starts at a multiple of the chunk size.
            let length = (tensor.bytes() - start).min(CHUNK as u64) as usize;
            if filled + length > CHUNK {
                file.write_all(&buffer[..filled])?;
                progress(filled as u64);
                filled = 0;
            }
            tables.fill(tensor, seed, start, &mut buffer[filled..filled + length]);
            filled += length;
            start += length as u64;
        }
    }
    file.write_all(&buffer[..filled])?;
    progress(filled as u64);
    file.flush()
}

/// The JSON header, padded with spaces so that the data start at a multiple of eight bytes.
fn header(tensors: &[Tensor]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes();
        let info = json!({"dtype": tensor.element.name(), "shape": tensor.shape, "data_offsets": [at, end]});
        map.insert(tensor.name.clone(), info);
        at = end;
    }
    let mut header = Value::Object(map).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::by_name;
    use crate::synth::{self, layout};

    #[test]
    fn overwritten_files_are_those_of_an_earlier_run() {
        let folder = tempfile::tempdir().unwrap();
        let config = SynthConfig { max_shard_bytes: 64 << 10, ..SynthConfig::new("olmoe") };
        let all = layout::tensors(&config, by_name("olmoe").unwrap());
        assert!(split(&all, config.max_shard_bytes).len() > 1);
        assert_eq!(overwritten_bytes(&all, &config, folder.path()), 0);
        synth::write(&config, folder.path()).unwrap();
        let weights: u64 = all.iter().map(Tensor::bytes).sum();
        assert!(overwritten_bytes(&all, &config, folder.path()) > weights);
    }
}
