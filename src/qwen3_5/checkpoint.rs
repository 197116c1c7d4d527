//! A checkpoint folder's safetensors files, mapped and checked before anything is read.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Draft heads that some writers keep beside the trunk.
const SIDE_CARS: [&str; 3] = [
    "mtp.safetensors",
    "model-mtp.safetensors",
    "mtp/weights.safetensors",
];

struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
}

struct Shard {
    path: PathBuf,
    map: Mmap,
}

/// An open checkpoint: every tensor's name, shape and dtype, and its bytes on demand.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    entries: BTreeMap<String, Entry>,
    mlx: bool,
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

    fn add_indexed(&mut self, index: &Path) -> Result<()> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let text = std::fs::read_to_string(index).map_err(|e| Error::io(index, e))?;
        let parsed: Index =
            serde_json::from_str(&text).map_err(|e| file_error(index, e.to_string()))?;
        let mut files: Vec<&String> = parsed.weight_map.values().collect();
        files.sort();
        files.dedup();
        for name in files {
            let plain = Path::new(name)
                .components()
                .all(|c| matches!(c, Component::Normal(_)));
            if !plain || name.is_empty() {
                return Err(file_error(
                    index,
                    format!("names the file {name:?}, which lies outside the folder"),
                ));
            }
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

    /// Maps a file and takes up its tensors. `replace` is for side-cars, which may repeat what the trunk's file holds.
    fn add(&mut self, path: &Path, replace: bool) -> Result<()> {
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        // SAFETY: the map is only read; a file that another process shortens while it is mapped is outside what can be
        // checked (README, limits).
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
        let (_, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| file_error(path, format!("not a valid safetensors file ({e})")))?;
        let parsed = SafeTensors::deserialize(&map).map_err(|e| {
            file_error(
                path,
                format!("not a valid safetensors file ({e}); is it truncated?"),
            )
        })?;
        let format = metadata
            .metadata()
            .as_ref()
            .and_then(|m: &HashMap<_, _>| m.get("format"));
        self.mlx |= format.is_some_and(|f| f == "mlx");
        for (name, view) in parsed.tensors() {
            let entry = Entry {
                file: self.shards.len(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
            };
            if self.entries.insert(name.clone(), entry).is_some() && !replace {
                return Err(tensor_error(
                    path,
                    &name,
                    "is in another file of this checkpoint too",
                ));
            }
        }
        drop(parsed);
        self.shards.push(Shard {
            path: path.to_path_buf(),
            map,
        });
        Ok(())
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
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

    /// A tensor on the CPU, in the dtype that it is stored in.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let Some(entry) = self.entries.get(name) else {
            return Err(tensor_error(&self.dir, name, "missing"));
        };
        let shard = &self.shards[entry.file];
        let dtype = match entry.dtype {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::U32 => DType::U32,
            Dtype::U8 => DType::U8,
            Dtype::I64 => DType::I64,
            other => {
                let what = format!(
                    "dtype {other:?} is not supported: expected F32, BF16, F16 or packed U32"
                );
                return Err(tensor_error(&shard.path, name, what));
            }
        };
        let parsed = SafeTensors::deserialize(&shard.map)
            .map_err(|e| file_error(&shard.path, format!("not a valid safetensors file ({e})")))?;
        let view = parsed
            .tensor(name)
            .map_err(|e| tensor_error(&shard.path, name, e.to_string()))?;
        Ok(Tensor::from_raw_buffer(
            view.data(),
            dtype,
            &entry.shape,
            &Device::Cpu,
        )?)
    }
}

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
