//! Files of a checkpoint: safetensors headers, indices, `config.json`.

use std::cell::RefCell;
use std::path::PathBuf;

use expertd_model::{Checkpoint, fuzzing};
use expertd_types::{ExpertId, LayerId};

use crate::split_text;

/// A whole safetensors file: every entry of an accepted header lies within the file.
pub fn header(data: &[u8]) {
    let _ = fuzzing::header(data);
}

/// The index of a sharded checkpoint: no entry leads out of the checkpoint's directory.
pub fn index(data: &[u8]) {
    let _ = fuzzing::index(data);
}

struct Directory {
    path: PathBuf,
    _owner: tempfile::TempDir,
}

impl Directory {
    fn new() -> Directory {
        // Shared memory, so that inputs cost no disk writes.
        let root = PathBuf::from("/dev/shm");
        let root = if root.is_dir() { root } else { std::env::temp_dir() };
        let owner = tempfile::Builder::new().prefix("fuzz-expertd-").tempdir_in(root);
        let owner = owner.expect("a directory for inputs");
        Directory { path: owner.path().to_owned(), _owner: owner }
    }
}

thread_local! {
    static DIRECTORY: RefCell<Directory> = RefCell::new(Directory::new());
}

/// A directory with `config.json` (the bytes before the first two zeros) and `model.safetensors` (the rest): an accepted
/// checkpoint gives views of all its weights.
pub fn checkpoint(data: &[u8]) {
    let (config, weights) = split_text(data);
    DIRECTORY.with_borrow(|directory| {
        std::fs::write(directory.path.join("config.json"), config).expect("config.json is written");
        // A new file each time: an earlier input's mapping must not change.
        let file = directory.path.join("model.safetensors");
        let _ = std::fs::remove_file(&file);
        std::fs::write(&file, weights).expect("model.safetensors is written");
        let Ok(checkpoint) = Checkpoint::open(&directory.path) else { return };
        let spec = checkpoint.spec().clone();
        for (layer, moe) in spec.moe_layers() {
            read_layer(&checkpoint, layer, moe.experts.count);
        }
    });
}

/// Reads the first and the last element of each matrix of a layer.
fn read_layer(checkpoint: &Checkpoint, layer: LayerId, experts: usize) {
    let _ = checkpoint.gate(layer);
    let _ = checkpoint.shared(layer);
    for expert in [0, experts - 1] {
        let Ok(tensors) = checkpoint.expert(layer, ExpertId(expert as u32)) else { continue };
        for view in [&tensors.gate, &tensors.up, &tensors.down] {
            view.check().expect("a view of an accepted checkpoint is consistent");
            let _ = view.value(0, 0);
            let _ = view.value(view.rows - 1, view.cols - 1);
        }
    }
}
