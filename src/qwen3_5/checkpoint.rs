//! A checkpoint folder's safetensors files, checked before anything is read.
//!
//! Tensors are read from their place in the file and not through a map: what has been packed leaves no pages behind, and a
//! file that another process shortens is an error, not a signal.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use safetensors::tensor::Metadata;
use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::{Error, Result};

/// The weights of a checkpoint in one file.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Which file of a sharded checkpoint holds which tensor.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// What the format's own reader allows.
const MAX_HEADER: u64 = 100_000_000;
/// Draft heads that some writers keep beside the trunk.
pub(crate) const SIDE_CARS: [&str; 3] = [
    "mtp.safetensors",
    "model-mtp.safetensors",
    "mtp/weights.safetensors",
];

/// Prefixes of a draft head's tensors.
pub(crate) const DRAFTS: [&str; 3] = ["mtp.", "language_model.mtp.", "model.mtp."];

struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// First byte in the file.
    start: u64,
    bytes: usize,
}

struct Shard {
    path: PathBuf,
    file: Mutex<File>,
}

/// An open checkpoint: every tensor's name, shape and dtype, and its bytes on demand.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    entries: BTreeMap<String, Entry>,
    mlx: bool,
    /// Whether MLX wrote the draft head that came from a repository of its own.
    separate_head: Option<bool>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names, and side-car draft heads
    /// (`mtp.safetensors`, `model-mtp.safetensors`, `mtp/weights.safetensors`). Headers are validated against file sizes,
    /// so a truncated shard is an error here and not zeros later.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if !dir.is_dir() {
            return Err(file_error(
                dir,
                "no such folder: name a folder with config.json and *.safetensors",
            ));
        }
        let mut checkpoint = Self {
            dir: dir.to_path_buf(),
            shards: vec![],
            entries: BTreeMap::new(),
            mlx: false,
            separate_head: None,
        };
        let index = dir.join(INDEX);
        if index.is_file() {
            checkpoint.add_indexed(&index)?;
        } else if dir.join(SINGLE).is_file() {
            checkpoint.add(&dir.join(SINGLE), false)?;
        } else {
            let what = format!("holds neither {SINGLE} nor {INDEX}");
            return Err(file_error(dir, what));
        }
        for side_car in SIDE_CARS.map(|name| dir.join(name)) {
            if side_car.is_file() && !checkpoint.shards.iter().any(|s| s.path == side_car) {
                checkpoint.add(&side_car, true)?;
            }
        }
        Ok(checkpoint)
    }

    /// Takes the draft head of a repository of its own (`model_type` `qwen3_5_mtp`: tensors without the prefix `mtp.`), in
    /// place of one that this checkpoint may have.
    pub fn with_head(mut self, dir: impl AsRef<Path>) -> Result<Self> {
        let head = Self::open(dir)?;
        let names = |name: &str| {
            DRAFTS
                .iter()
                .find_map(|p| name.strip_prefix(p))
                .map(String::from)
        };
        let prefixed = head.entries.keys().any(|name| names(name).is_some());
        let first = self.shards.len();
        let mut entries = vec![];
        for (name, mut entry) in head.entries {
            let own = match prefixed {
                true => names(&name),
                false => Some(name),
            };
            entry.file += first;
            entries.extend(own.map(|own| (format!("{}{own}", DRAFTS[0]), entry)));
        }
        if !entries
            .iter()
            .any(|(name, _)| *name == format!("{}fc.weight", DRAFTS[0]))
        {
            let what = "holds no MTP head: there is no tensor fc.weight or mtp.fc.weight";
            return Err(file_error(&head.dir, what));
        }
        self.entries.retain(|name, _| names(name).is_none());
        self.entries.extend(entries);
        self.shards.extend(head.shards);
        self.separate_head = Some(head.mlx);
        Ok(self)
    }

    /// Whether MLX wrote the head that [`Checkpoint::with_head`] added; `None` without such a head.
    pub(crate) fn separate_head_is_mlx(&self) -> Option<bool> {
        self.separate_head
    }

    fn add_indexed(&mut self, index: &Path) -> Result<()> {
        let parsed = Index::read(index)?;
        for name in parsed.files(index)? {
            let path = self.dir.join(name);
            if !path.is_file() {
                return Err(file_error(
                    index,
                    format!("names {name}, which is missing: fetch the whole repository"),
                ));
            }
            self.add(&path, false)?;
        }
        for (tensor, name) in &parsed.weight_map {
            let path = self.dir.join(name);
            let held = self
                .entries
                .get(tensor)
                .is_some_and(|e| self.shards[e.file].path == path);
            if !held {
                return Err(tensor_error(
                    &path,
                    tensor,
                    format!("{INDEX} says it is in this file, but it is not"),
                ));
            }
        }
        Ok(())
    }

    /// Reads a file's header and takes up its tensors. `replace` is for side-cars, which may repeat what the trunk's file
    /// holds.
    fn add(&mut self, path: &Path, replace: bool) -> Result<()> {
        let mut file = File::open(path).map_err(|e| Error::io(path, e))?;
        let (data, header) = read_header(path, &mut file)?;
        let format = header.metadata().as_ref().and_then(|m| m.get("format"));
        self.mlx |= format.is_some_and(|f| f == "mlx");
        for (name, info) in header.tensors() {
            let (from, to) = info.data_offsets;
            let entry = Entry {
                file: self.shards.len(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                start: data + from as u64,
                bytes: to - from,
            };
            if self.entries.insert(name.clone(), entry).is_some() && !replace {
                return Err(tensor_error(
                    path,
                    &name,
                    "is in another file of this checkpoint too",
                ));
            }
        }
        self.shards.push(Shard {
            path: path.to_path_buf(),
            file: Mutex::new(file),
        });
        Ok(())
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file that holds a tensor, or the folder when none does.
    pub fn file(&self, tensor: &str) -> &Path {
        match self.entries.get(tensor) {
            Some(entry) => &self.shards[entry.file].path,
            None => &self.dir,
        }
    }

    /// Whether MLX wrote it, by its metadata.
    pub fn is_mlx(&self) -> bool {
        self.mlx
    }

    /// Whether it has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// A tensor's shape.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|e| e.shape.as_slice())
    }

    /// A tensor's dtype, where candle has it.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        match self.entries.get(name)?.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::BF16 => Some(DType::BF16),
            Dtype::F16 => Some(DType::F16),
            Dtype::U32 => Some(DType::U32),
            Dtype::U8 => Some(DType::U8),
            Dtype::I64 => Some(DType::I64),
            _ => None,
        }
    }

    /// Whether a tensor holds packed codes.
    pub(crate) fn is_packed(&self, name: &str) -> bool {
        self.entries
            .get(name)
            .is_some_and(|e| e.dtype == Dtype::U32)
    }

    /// Bytes that a tensor takes in its file.
    pub fn size_bytes(&self, name: &str) -> Option<usize> {
        self.entries.get(name).map(|e| e.bytes)
    }

    /// A tensor on the CPU, in the dtype that it is stored in.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let shape = self.shape(name).map(<[usize]>::to_vec);
        self.read(name, 0, shape)
    }

    /// `count` rows from `first` of a tensor seen as `[rows, columns]`, its leading dimensions taken together: an expert of
    /// a stack, without the rest of it.
    pub fn rows(&self, name: &str, first: usize, count: usize) -> Result<Tensor> {
        let shape = match self.shape(name) {
            Some([leading @ .., columns]) => {
                let rows: usize = leading.iter().product();
                if first.checked_add(count).is_none_or(|end| end > rows) {
                    let what = format!("has {rows} rows, not {count} from {first}");
                    return Err(tensor_error(&self.dir, name, what));
                }
                Some(vec![count, *columns])
            }
            _ => None,
        };
        self.read(name, first, shape)
    }

    fn read(&self, name: &str, first_row: usize, shape: Option<Vec<usize>>) -> Result<Tensor> {
        let (Some(entry), Some(shape)) = (self.entries.get(name), shape) else {
            return Err(tensor_error(&self.dir, name, "missing"));
        };
        let shard = &self.shards[entry.file];
        let columns = entry.shape.last().copied().unwrap_or(1);
        let source = Source {
            shard,
            first: (first_row * columns) as u64,
            start: entry.start,
            len: shape.iter().product(),
        };
        let device = &Device::Cpu;
        Ok(match entry.dtype {
            Dtype::F32 => Tensor::from_vec(source.values::<f32>()?, shape, device)?,
            Dtype::BF16 => Tensor::from_vec(source.values::<bf16>()?, shape, device)?,
            Dtype::F16 => Tensor::from_vec(source.values::<f16>()?, shape, device)?,
            Dtype::U32 => Tensor::from_vec(source.values::<u32>()?, shape, device)?,
            Dtype::U8 => Tensor::from_vec(source.values::<u8>()?, shape, device)?,
            Dtype::I64 => Tensor::from_vec(source.values::<i64>()?, shape, device)?,
            other => {
                let what = format!(
                    "dtype {other:?} is not supported: expected F32, BF16, F16 or packed U32"
                );
                return Err(tensor_error(&shard.path, name, what));
            }
        })
    }
}

/// `model.safetensors.index.json`.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).map_err(|e| Error::io(file, e))?;
        serde_json::from_str(&text).map_err(|e| file_error(file, e.to_string()))
    }

    /// The files that it names, each once, all of them inside the folder.
    fn files(&self, file: &Path) -> Result<Vec<&String>> {
        let mut files: Vec<&String> = self.weight_map.values().collect();
        files.sort();
        files.dedup();
        for name in &files {
            let mut parts = Path::new(name).components();
            if name.is_empty() || !parts.all(|c| matches!(c, Component::Normal(_))) {
                let what = format!("names the file {name:?}, which lies outside the folder");
                return Err(file_error(file, what));
            }
        }
        Ok(files)
    }
}

/// The weight files that an index names.
#[cfg(feature = "hub")]
pub(crate) fn indexed_files(index: &Path) -> Result<Vec<String>> {
    let parsed = Index::read(index)?;
    Ok(parsed.files(index)?.into_iter().cloned().collect())
}

/// The header of a safetensors file, checked against the file's size, and where its data begin.
fn read_header(path: &Path, file: &mut File) -> Result<(u64, Metadata)> {
    let invalid = |what: &str| {
        let what = format!("not a valid safetensors file ({what})");
        file_error(path, what)
    };
    let size = file.metadata().map_err(|e| Error::io(path, e))?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length)
        .map_err(|_| invalid("shorter than its header's length"))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size.saturating_sub(8) {
        return Err(invalid(&format!(
            "a header of {length} bytes in a file of {size}; is it truncated?"
        )));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header)
        .map_err(|e| invalid(&e.to_string()))?;
    let malformed = |e: serde_json::Error| invalid(&format!("header: {e}"));
    let DistinctNames = serde_json::from_slice(&header).map_err(malformed)?;
    let header: Metadata = serde_json::from_slice(&header).map_err(malformed)?;
    let (data, expected) = (8 + length, header.data_len() as u64);
    if size - data != expected {
        return Err(invalid(&format!(
            "{} bytes of data where its header promises {expected}; is it truncated?",
            size - data
        )));
    }
    Ok((data, header))
}

/// An object that names nothing twice: of two tensors of one name a map would keep either.
struct DistinctNames;

impl<'de> Deserialize<'de> for DistinctNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self)
    }
}

impl<'de> Visitor<'de> for DistinctNames {
    type Value = Self;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut seen = HashSet::new();
        while let Some((name, IgnoredAny)) = map.next_entry::<String, _>()? {
            if seen.contains(&name) {
                return Err(A::Error::custom(format!("names {name} twice")));
            }
            seen.insert(name);
        }
        Ok(self)
    }
}

/// A run of values in a file.
struct Source<'a> {
    shard: &'a Shard,
    start: u64,
    /// Values to skip.
    first: u64,
    len: usize,
}

impl Source<'_> {
    fn values<T: Number>(&self) -> Result<Vec<T>> {
        let mut values = vec![T::default(); self.len];
        // SAFETY: a `Number` is plain bytes without padding, any of which are a value; the borrow is exclusive.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                values.as_mut_ptr().cast::<u8>(),
                std::mem::size_of_val(values.as_slice()),
            )
        };
        let mut file = (self.shard.file.lock()).unwrap_or_else(PoisonError::into_inner);
        let at = self.start + self.first * std::mem::size_of::<T>() as u64;
        file.seek(SeekFrom::Start(at))
            .and_then(|_| file.read_exact(bytes))
            .map_err(|e| Error::io(&self.shard.path, e))?;
        Ok(values)
    }
}

/// A number as a file holds it.
///
/// # Safety
/// Every bit pattern must be a value.
unsafe trait Number: Copy + Default {}
unsafe impl Number for f32 {}
unsafe impl Number for bf16 {}
unsafe impl Number for f16 {}
unsafe impl Number for u32 {}
unsafe impl Number for u8 {}
unsafe impl Number for i64 {}

fn file_error(file: &Path, what: impl Into<String>) -> Error {
    Error::File {
        file: file.to_path_buf(),
        what: what.into(),
    }
}

fn tensor_error(file: &Path, tensor: &str, what: impl Into<String>) -> Error {
    Error::Tensor {
        file: file.to_path_buf(),
        tensor: tensor.to_string(),
        what: what.into(),
    }
}
