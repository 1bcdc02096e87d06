//! Entry points for fuzz targets; not part of the interface.

use std::path::PathBuf;

use super::header::Header;
use super::store::Store;

/// Parses a safetensors file.
///
/// # Errors
/// The defect of the file.
///
/// # Panics
/// If an entry of an accepted header lies outside the file.
pub fn header(file: &[u8]) -> Result<(), String> {
    let header = Header::parse(file)?;
    for name in header.names() {
        let entry = header.entry(&name).expect("a listed tensor has an entry");
        assert!(
            entry.range.start >= header.data_start && entry.range.end <= file.len(),
            "tensor {name:?} is at {:?} in a file of {} bytes",
            entry.range,
            file.len()
        );
    }
    Ok(())
}

/// Parses the index of a sharded checkpoint.
///
/// # Errors
/// The defect of the index.
///
/// # Panics
/// If a shard is not directly in the checkpoint's directory.
pub fn index(bytes: &[u8]) -> Result<(), String> {
    let directory = PathBuf::from("/checkpoint");
    let store = Store::from_index(&directory, directory.join("index.json"), bytes);
    let store = store.map_err(|error| error.to_string())?;
    for path in store.shard_paths() {
        assert_eq!(path.parent(), Some(directory.as_path()), "{path:?} is outside the directory");
    }
    Ok(())
}
