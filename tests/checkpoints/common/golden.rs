//! Recorded inputs and outputs of the reference implementation (`tests/fixtures/golden/README.md`).

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

/// The directories under `root` that hold golden data, sorted.
pub fn folders(root: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(root)
        .unwrap_or_else(|error| panic!("{}: {error}", root.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.safetensors").exists())
        .collect();
    all.sort();
    all
}

/// The recording of one layer.
pub struct Layer {
    pub index: u32,
    /// `[tokens, hidden]`.
    pub input: Vec<f32>,
    /// `[tokens, hidden]`.
    pub output: Vec<f32>,
    /// `[tokens, k]`, if the block returns it.
    pub routing: Option<(Vec<i32>, Vec<f32>)>,
}

/// The recording of one model.
pub struct Golden {
    pub layers: Vec<Layer>,
    pub token_ids: Vec<i32>,
    pub tokens: usize,
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

impl Golden {
    /// The recording of float32 in a directory.
    pub fn read(dir: &Path) -> Self {
        Self::read_file(&dir.join("golden.safetensors"))
    }

    pub fn read_file(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let token_ids: Vec<i32> = file
            .tensor("input_ids")
            .unwrap()
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|b| i32::try_from(i64::from_le_bytes(*b)).unwrap())
            .collect();
        let mut layers = Vec::new();
        for index in 0..1000 {
            let Ok(input) = file.tensor(&format!("layers.{index}.input")) else { continue };
            let part = |name: &str| file.tensor(&format!("layers.{index}.{name}"));
            let routing = part("topk_ids").ok().map(|ids| {
                assert_eq!(ids.dtype(), Dtype::I32);
                let ids = ids.data().as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
                (ids, f32s(part("topk_weights").unwrap().data()))
            });
            let output = f32s(part("output").unwrap().data());
            layers.push(Layer { index, input: f32s(input.data()), output, routing });
        }
        assert!(!layers.is_empty(), "{}: no layers recorded", path.display());
        Self { layers, tokens: token_ids.len(), token_ids }
    }
}
