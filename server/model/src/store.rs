//! The tensors of a checkpoint's directory: a single file or shards with an index, memory-mapped.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::Dtype;
use serde::Deserialize;

use super::ModelError;
use super::config::read_json_file;
use super::header::Entry;
use super::mapped::Mapped;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Largest accepted index; the index of a model with 10^5 tensors has about 10 MB.
const MAX_INDEX_BYTES: u64 = 128 << 20;

/// The index of a tensor that has been looked up, in [`Store::info`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorId(u32);

/// The type, shape and location of a tensor.
#[derive(Clone, Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    shard: usize,
    range: Range<usize>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    mapped: Option<Mapped>,
}

/// A map from tensor names to mapped bytes. A shard is opened (mapped, header checked) when one of its tensors is first
/// looked up.
#[derive(Debug)]
pub(super) struct Store {
    /// File or directory to name in errors that concern no single shard.
    listing: PathBuf,
    shards: Vec<Shard>,
    names: HashMap<String, usize>,
    known: HashMap<String, TensorId>,
    tensors: Vec<TensorInfo>,
}

#[derive(Deserialize)]
struct IndexFile {
    weight_map: BTreeMap<String, String>,
}

impl Store {
    /// Opens a directory. A single `model.safetensors` takes precedence over an index, as in the reference
    /// implementation.
    pub(super) fn open(dir: &Path) -> Result<Self, ModelError> {
        let single = dir.join(SINGLE);
        if single.exists() {
            let mut store = Self::empty(single.clone());
            store.shards.push(Shard { path: single, mapped: None });
            store.names = store.shard(0)?.header().names().into_iter().map(|name| (name, 0)).collect();
            return Ok(store);
        }
        let index = dir.join(INDEX);
        if !index.exists() {
            return Err(ModelError::NoWeights { path: dir.to_owned(), found: list(dir) });
        }
        let bytes = read_json_file(&index, MAX_INDEX_BYTES)?;
        Self::from_index(dir, index, &bytes)
    }

    fn empty(listing: PathBuf) -> Self {
        Self {
            listing,
            shards: Vec::new(),
            names: HashMap::new(),
            known: HashMap::new(),
            tensors: Vec::new(),
        }
    }

    pub(super) fn from_index(dir: &Path, path: PathBuf, bytes: &[u8]) -> Result<Self, ModelError> {
        let index: IndexFile = serde_json::from_slice(bytes)
            .map_err(|error| ModelError::Json { path: path.clone(), reason: error.to_string() })?;
        let mut store = Self::empty(path.clone());
        let mut numbers: HashMap<String, usize> = HashMap::new();
        for (name, file) in index.weight_map {
            let plain = Path::new(&file).components().collect::<Vec<_>>();
            if !matches!(plain[..], [Component::Normal(_)]) {
                let reason = format!("tensor `{name}` is listed in {file:?}, expected a file name");
                return Err(ModelError::Index { path, reason });
            }
            let next = store.shards.len();
            let shard = *numbers.entry(file.clone()).or_insert(next);
            if shard == next {
                store.shards.push(Shard { path: dir.join(&file), mapped: None });
            }
            store.names.insert(name, shard);
        }
        Ok(store)
    }

    /// Paths of all shards.
    #[cfg(feature = "fuzzing")]
    pub(super) fn shard_paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    fn shard(&mut self, number: usize) -> Result<&Mapped, ModelError> {
        let shard = &mut self.shards[number];
        if shard.mapped.is_none() {
            shard.mapped = Some(Mapped::open(&shard.path)?);
        }
        Ok(shard.mapped.as_ref().expect("the shard was mapped just now"))
    }

    /// Looks up all tensors whose names begin with one of `prefixes`, so that the fingerprint covers them. Only names in the
    /// files' headers count: an index may list others. No prefix begins with another one.
    pub(super) fn find_all(&mut self, mut prefixes: Vec<String>) -> Result<(), ModelError> {
        prefixes.sort_unstable();
        // Only the last prefix that does not sort after a name can be the name's beginning.
        let begins = |name: &str| {
            let after = prefixes.partition_point(|prefix| prefix.as_str() <= name);
            after > 0 && name.starts_with(&prefixes[after - 1])
        };
        let names = self.names.iter().filter(|(name, _)| begins(name));
        let mut shards: Vec<usize> = names.map(|(_, &shard)| shard).collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in shards {
            let header = self.shard(shard)?.header();
            let names = header.names().into_iter().filter(|name| begins(name));
            let found: Vec<_> =
                names.filter_map(|name| header.entry(&name).map(|entry| (name, entry))).collect();
            for (name, entry) in found {
                self.insert(&name, shard, entry);
            }
        }
        Ok(())
    }

    /// The id of a tensor, which is new if the tensor was not looked up before.
    fn insert(&mut self, name: &str, shard: usize, entry: Entry) -> TensorId {
        if let Some(&id) = self.known.get(name) {
            return id;
        }
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        let Entry { dtype, shape, range } = entry;
        self.tensors.push(TensorInfo { name: name.to_owned(), dtype, shape, shard, range });
        self.known.insert(name.to_owned(), id);
        id
    }

    /// Whether the checkpoint lists a tensor. Does not open its shard.
    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// A tensor name that ends in `suffix`, for error messages.
    pub(super) fn example(&self, suffix: &str) -> Option<&str> {
        self.names.keys().filter(|name| name.ends_with(suffix)).min().map(String::as_str)
    }

    /// An error about a missing tensor.
    pub(super) fn missing(&self, name: &str, reason: &str) -> ModelError {
        ModelError::MissingTensor {
            path: self.listing.clone(),
            tensor: name.to_owned(),
            reason: reason.to_owned(),
        }
    }

    /// Looks a tensor up, which opens its shard.
    pub(super) fn find(&mut self, name: &str, reason: &str) -> Result<TensorId, ModelError> {
        if let Some(&id) = self.known.get(name) {
            return Ok(id);
        }
        let Some(&shard) = self.names.get(name) else { return Err(self.missing(name, reason)) };
        let Some(entry) = self.shard(shard)?.header().entry(name) else {
            let reason =
                format!("{} lists it in this file, but the file's header does not", file_name(&self.listing));
            let path = self.shards[shard].path.clone();
            return Err(ModelError::MissingTensor { path, tensor: name.to_owned(), reason });
        };
        Ok(self.insert(name, shard, entry))
    }

    /// The type, shape and location of a tensor.
    pub(super) fn info(&self, id: TensorId) -> &TensorInfo {
        &self.tensors[id.0 as usize]
    }

    /// The file that holds a tensor.
    pub(super) fn path(&self, id: TensorId) -> &Path {
        &self.shards[self.info(id).shard].path
    }

    /// The bytes of a tensor.
    pub(super) fn bytes(&self, id: TensorId) -> &[u8] {
        let info = self.info(id);
        &self.mapped(info.shard).bytes()[info.range.clone()]
    }

    /// The shard that holds `bytes`, a result of [`bytes`](Self::bytes) or a part of one, and their range in its file.
    pub(super) fn place(&self, bytes: &[u8]) -> (usize, Range<usize>) {
        let find = |(number, shard): (usize, &Shard)| {
            let mapped = shard.mapped.as_ref()?.bytes().as_ptr_range();
            let given = bytes.as_ptr_range();
            let is_in = mapped.start <= given.start && given.end <= mapped.end;
            let start = given.start.addr().wrapping_sub(mapped.start.addr());
            is_in.then_some((number, start..start + bytes.len()))
        };
        self.shards.iter().enumerate().find_map(find).expect("the bytes are those of a mapped file")
    }

    /// A shard that was mapped.
    pub(super) fn mapped(&self, shard: usize) -> &Mapped {
        self.shards[shard].mapped.as_ref().expect("the shard of a tensor that was looked up is mapped")
    }

    /// The error for a shard whose bytes cannot be read.
    pub(super) fn read_error(&self, shard: usize, source: std::io::Error) -> ModelError {
        let path = self.shards[shard].path.clone();
        match source.kind() {
            // The file was longer when its header was read.
            std::io::ErrorKind::UnexpectedEof => ModelError::Written { path },
            _ => ModelError::Io { path, action: "read it", source },
        }
    }

    /// Advises the kernel whether only few bytes in scattered places are accessed through the mappings; it then reads nothing
    /// around them.
    pub(super) fn expect_few_bytes(&self, few: bool) {
        self.shards
            .iter()
            .filter_map(|shard| shard.mapped.as_ref())
            .for_each(|mapped| mapped.expect_few_bytes(few));
    }

    /// Calls [`Mapped::will_need`] for a slice that [`bytes`](Self::bytes) returned.
    pub(super) fn will_need(&self, bytes: &[u8]) {
        let (shard, place) = self.place(bytes);
        self.mapped(shard).will_need(place);
    }

    /// Every tensor that was looked up, with its bytes.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&TensorInfo, &[u8])> {
        (0..).map(TensorId).zip(&self.tensors).map(|(id, info)| (info, self.bytes(id)))
    }

    /// Checks that no mapped file was written to or truncated since it was opened. A file that replaced it in its folder
    /// does not count: the mapped one is still whole.
    pub(super) fn check_unchanged(&self) -> Result<(), ModelError> {
        let mut mapped = self.shards.iter().filter_map(|shard| Some((shard, shard.mapped.as_ref()?)));
        mapped.try_for_each(|(shard, mapped)| mapped.check_unchanged(&shard.path))
    }

    /// Checks the shape of a tensor.
    pub(super) fn expect_shape(
        &self,
        id: TensorId,
        expected: &[usize],
        reason: &str,
    ) -> Result<(), ModelError> {
        let info = self.info(id);
        if info.shape == expected {
            return Ok(());
        }
        Err(ModelError::Shape {
            path: self.path(id).to_owned(),
            tensor: info.name.clone(),
            expected: expected.to_vec(),
            found: info.shape.clone(),
            reason: reason.to_owned(),
        })
    }

    /// An error about the element type of a tensor.
    pub(super) fn wrong_dtype(&self, id: TensorId, expected: &str) -> ModelError {
        let info = self.info(id);
        ModelError::DType {
            path: self.path(id).to_owned(),
            tensor: info.name.clone(),
            expected: expected.to_owned(),
            found: format!("{:?}", info.dtype),
        }
    }

    /// An error about the contents of a tensor.
    pub(super) fn wrong_contents(&self, id: TensorId, reason: String) -> ModelError {
        let (path, tensor) = (self.path(id).to_owned(), self.info(id).name.clone());
        ModelError::Contents { path, tensor, reason }
    }

    /// All elements of a tensor of type I64 or I32.
    pub(super) fn integers(&self, id: TensorId) -> Vec<i64> {
        let bytes = self.bytes(id);
        match self.info(id).dtype {
            Dtype::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
            _ => bytes.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
        }
    }

    /// `count` floating-point elements of a tensor as f32, `stride` elements apart, from element `first` on.
    pub(super) fn floats(&self, id: TensorId, first: usize, stride: usize, count: usize) -> Vec<f32> {
        let (bytes, dtype) = (self.bytes(id), self.info(id).dtype);
        let size = dtype.bitsize() / 8;
        let at = |i: usize| &bytes[(first + i * stride) * size..][..size];
        (0..count)
            .map(|i| match (dtype, at(i)) {
                (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
                (Dtype::BF16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
                (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
                (Dtype::F8_E8M0, &[a]) => e8m0(a),
                _ => unreachable!("types are checked when the tensor is looked up"),
            })
            .collect()
    }

    /// A table of experts by token id `[vocab, top_k]`. Its ids are checked, because they determine where rows are
    /// sent.
    pub(super) fn token_table(
        &self,
        id: TensorId,
        top_k: usize,
        experts: usize,
    ) -> Result<Vec<i32>, ModelError> {
        let table = self.integers(id);
        for (token, row) in table.chunks(top_k).enumerate() {
            for (i, expert) in row.iter().enumerate() {
                let problem = if usize::try_from(*expert).is_ok_and(|e| e < experts) {
                    if !row[..i].contains(expert) {
                        continue;
                    }
                    format!("lists expert {expert} twice for token {token}")
                } else {
                    format!("lists expert {expert} for token {token}, expected 0 to {}", experts - 1)
                };
                return Err(self.wrong_contents(id, problem));
            }
        }
        Ok(table
            .into_iter()
            .map(|e| i32::try_from(e).expect("the id is below the number of experts"))
            .collect())
    }

    /// Looks up a tensor of floating-point numbers.
    pub(super) fn find_floats(&mut self, name: &str, reason: &str) -> Result<TensorId, ModelError> {
        let id = self.find(name, reason)?;
        match self.info(id).dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F8_E8M0 => Ok(id),
            _ => Err(self.wrong_dtype(id, "F32, BF16 or F16")),
        }
    }
}

/// `2^(bits - 127)`; all ones is NaN.
fn e8m0(bits: u8) -> f32 {
    match bits {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        b => f32::from_bits(u32::from(b) << 23),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Names of a directory's files, for error messages.
fn list(dir: &Path) -> String {
    let Ok(entries) = std::fs::read_dir(dir) else { return "nothing: there is no such directory".into() };
    let mut names: Vec<String> =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
    names.sort();
    let more = names.len().saturating_sub(8);
    names.truncate(8);
    match (names.is_empty(), more) {
        (true, _) => "an empty directory".into(),
        (false, 0) => names.join(", "),
        (false, more) => format!("{}, and {more} more", names.join(", ")),
    }
}
