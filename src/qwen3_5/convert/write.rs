//! Safetensors files written as their tensors are made, so that no more than a part of one is in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{CpuStorage, DType, Storage, Tensor};
use serde_json::{json, Map, Value};

use crate::error::{Error, Result};

/// A tensor that will be written.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Slot {
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size_in_bytes() as u64
    }
}

/// A file whose header is written and whose data come in any order.
pub(super) struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    /// Where each tensor's next bytes go.
    next: BTreeMap<String, u64>,
}

impl Writer {
    pub fn create(path: &Path, slots: &[Slot]) -> Result<Self> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "mlx"}));
        let mut at = 0;
        let mut next = BTreeMap::new();
        for slot in slots {
            let dtype = match slot.dtype {
                DType::BF16 => "BF16",
                DType::F16 => "F16",
                DType::U32 => "U32",
                _ => "F32",
            };
            let end = at + slot.bytes();
            header.insert(
                slot.name.clone(),
                json!({"dtype": dtype, "shape": slot.shape, "data_offsets": [at, end]}),
            );
            next.insert(slot.name.clone(), at);
            at = end;
        }
        let mut text = Value::Object(header).to_string();
        while !text.len().is_multiple_of(8) {
            text.push(' ');
        }
        let io = |e| Error::io(path, e);
        let mut file = BufWriter::new(File::create(path).map_err(io)?);
        file.write_all(&(text.len() as u64).to_le_bytes())
            .and_then(|_| file.write_all(text.as_bytes()))
            .map_err(io)?;
        let data = 8 + text.len() as u64;
        next.values_mut().for_each(|at| *at += data);
        // The whole length now: a full disk shows at once.
        file.get_ref().set_len(data + at).map_err(io)?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            next,
        })
    }

    /// Appends values to a tensor of this file.
    pub fn append(&mut self, name: &str, values: &Tensor) -> Result<()> {
        let Some(next) = self.next.get_mut(name) else {
            return Err(Error::argument(
                "convert",
                format!("{name} was not announced"),
            ));
        };
        let bytes = bytes(values)?;
        let io = |e| Error::io(&self.path, e);
        self.file.seek(SeekFrom::Start(*next)).map_err(io)?;
        self.file.write_all(&bytes).map_err(io)?;
        *next += bytes.len() as u64;
        Ok(())
    }

    /// Flushes to the disk.
    pub fn finish(mut self) -> Result<()> {
        let done = self
            .file
            .flush()
            .and_then(|_| self.file.get_ref().sync_all());
        done.map_err(|e| Error::io(&self.path, e))
    }
}

/// A tensor's values, little-endian.
fn bytes(values: &Tensor) -> Result<Vec<u8>> {
    let values = values.contiguous()?;
    let (storage, layout) = values.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + values.elem_count();
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v[range].iter().flat_map(|v| v.to_le_bytes()).collect(),
        Storage::Cpu(CpuStorage::BF16(v)) => {
            v[range].iter().flat_map(|v| v.to_le_bytes()).collect()
        }
        Storage::Cpu(CpuStorage::F16(v)) => v[range].iter().flat_map(|v| v.to_le_bytes()).collect(),
        Storage::Cpu(CpuStorage::U32(v)) => v[range].iter().flat_map(|v| v.to_le_bytes()).collect(),
        _ => {
            let what = format!("a tensor of {:?} cannot be written", values.dtype());
            return Err(Error::argument("convert", what));
        }
    })
}
