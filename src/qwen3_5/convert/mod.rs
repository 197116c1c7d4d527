//! A Hugging Face checkpoint as an MLX affine one, which this crate and mlx-lm load.
//!
//! Codes, scales and biases are MLX's to the bit ([`quantize`](crate::affine::quantize)). The MTP head goes to
//! `mtp.safetensors`, which mlx-lm does not read; its `fc` stays plain. Vision towers are left out.

mod plan;
mod write;

use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use serde_json::{json, Map, Value};

use super::checkpoint::Checkpoint;
use super::config::Config;
use crate::affine::{self, AffineFormat};
use crate::error::{Error, Result};
use plan::{Change, Item, Plan};
use write::{Slot, Writer};

const HEAD: &str = "mtp.safetensors";
/// Values that are quantized at a time.
const CHUNK: usize = 1 << 24;

/// How a checkpoint is quantized.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Bits and group size of everything that no override names; routers of experts take 8 bits.
    pub format: AffineFormat,
    /// Names of modules (`lm_head`, `layers.0.mlp`, `mlp.down_proj`) and what they get, `None` for plain; the last match
    /// counts.
    pub overrides: Vec<(String, Option<AffineFormat>)>,
    /// Replace a checkpoint that is there already.
    pub overwrite: bool,
    /// Most bytes of a weights file.
    pub shard_bytes: u64,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            format: AffineFormat {
                bits: 4,
                group_size: 64,
            },
            overrides: vec![],
            overwrite: false,
            shard_bytes: 5 << 30,
        }
    }
}

/// How far a conversion is.
#[derive(Clone, Copy, Debug)]
pub struct ConvertProgress<'a> {
    /// Bytes of the new checkpoint that are written.
    pub done: u64,
    /// Bytes of the new checkpoint.
    pub total: u64,
    /// The module that was just written.
    pub module: &'a str,
}

/// What a conversion did.
#[derive(Clone, Debug)]
pub struct Converted {
    /// Bytes of tensors written.
    pub bytes: u64,
    /// Bits per weight of the matrices, scales and biases included.
    pub bits_per_weight: f64,
    /// Modules that were quantized.
    pub quantized: usize,
    /// Whether there was an MTP head.
    pub mtp_head: bool,
    /// Modules left plain because their rows do not divide into groups.
    pub undivided: Vec<String>,
    /// Tensors of other towers, left out.
    pub dropped: usize,
}

/// Quantizes the Hugging Face checkpoint in `source` into the new folder `target`. Everything is written to a folder beside
/// it first and renamed at the end, so that `target` is whole or not there.
pub fn convert(
    source: &Path,
    target: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(ConvertProgress),
) -> Result<Converted> {
    AffineFormat::new(options.format.bits, options.format.group_size)?;
    for (_, format) in &options.overrides {
        format.map_or(Ok(options.format), |f| {
            AffineFormat::new(f.bits, f.group_size)
        })?;
    }
    Config::read(source)?;
    let checkpoint = Checkpoint::open(source)?;
    check_target(source, target, options)?;
    let plan = plan::plan(&checkpoint, options)?;
    let partial = beside(target, "partial")?;
    remove(&partial)?;
    std::fs::create_dir_all(&partial).map_err(|e| Error::io(&partial, e))?;
    let converted = Conversion {
        checkpoint: &checkpoint,
        dir: &partial,
        done: 0,
        total: bytes(&plan.trunk) + bytes(&plan.head),
        progress,
    }
    .run(source, &plan, options)
    .and_then(|converted| replace(&partial, target).map(|_| converted));
    if converted.is_err() {
        remove(&partial)?;
    }
    converted
}

struct Conversion<'a> {
    checkpoint: &'a Checkpoint,
    dir: &'a Path,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(ConvertProgress),
}

impl Conversion<'_> {
    fn run(mut self, source: &Path, plan: &Plan, options: &ConvertOptions) -> Result<Converted> {
        let mut shards: Vec<Vec<&Item>> = vec![vec![]];
        let mut filled = 0;
        for item in &plan.trunk {
            let size = slots(item).iter().map(Slot::bytes).sum::<u64>();
            if filled > 0 && filled + size > options.shard_bytes {
                shards.push(vec![]);
                filled = 0;
            }
            filled += size;
            shards.last_mut().into_iter().for_each(|s| s.push(item));
        }
        let count = shards.len();
        let mut weight_map = Map::new();
        for (i, items) in shards.iter().enumerate() {
            let name = match count {
                1 => "model.safetensors".to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            for slot in items.iter().flat_map(|i| slots(i)) {
                weight_map.insert(slot.name, name.clone().into());
            }
            self.file(&name, items)?;
        }
        if !plan.head.is_empty() {
            self.file(HEAD, &plan.head.iter().collect::<Vec<_>>())?;
        }
        let index =
            json!({"metadata": {"total_size": bytes(&plan.trunk)}, "weight_map": weight_map});
        self.json("model.safetensors.index.json", &index)?;
        self.config(source, plan, options)?;
        self.companions(source)?;
        let matrices = plan
            .trunk
            .iter()
            .chain(&plan.head)
            .filter_map(|item| match item {
                Item::Linear {
                    rows,
                    k,
                    stacked,
                    format,
                    ..
                } => Some((
                    rows * k * stacked.unwrap_or(1),
                    slots(item),
                    format.is_some(),
                )),
                Item::Float { .. } => None,
            });
        let (mut weights, mut size, mut quantized) = (0, 0, 0);
        for (count, slots, is_quantized) in matrices {
            weights += count;
            size += slots.iter().map(Slot::bytes).sum::<u64>();
            quantized += is_quantized as usize;
        }
        Ok(Converted {
            bytes: self.total,
            bits_per_weight: size as f64 * 8.0 / weights.max(1) as f64,
            quantized,
            mtp_head: !plan.head.is_empty(),
            undivided: plan.undivided.clone(),
            dropped: plan.dropped.len(),
        })
    }

    fn file(&mut self, name: &str, items: &[&Item]) -> Result<()> {
        let all: Vec<Slot> = items.iter().flat_map(|i| slots(i)).collect();
        let mut writer = Writer::create(&self.dir.join(name), &all)?;
        for item in items {
            self.item(&mut writer, item)?;
            self.done += slots(item).iter().map(Slot::bytes).sum::<u64>();
            let (Item::Float { name: module, .. } | Item::Linear { module, .. }) = item;
            (self.progress)(ConvertProgress {
                done: self.done,
                total: self.total,
                module,
            });
        }
        writer.finish()
    }

    fn item(&self, writer: &mut Writer, item: &Item) -> Result<()> {
        match item {
            Item::Float {
                name,
                source,
                dtype,
                shape,
                change,
            } => {
                let tensor = self.float(source)?;
                let tensor = match change {
                    // In the stored dtype, as mlx-lm adds it.
                    Change::AddOne => (tensor + 1.0)?,
                    _ => tensor,
                };
                // [C, 1, K] and [C, K, 1] are the same bytes.
                writer.append(name, &tensor.to_dtype(*dtype)?.reshape(&shape[..])?)
            }
            Item::Linear {
                module,
                pieces,
                k,
                dtype,
                format,
                ..
            } => {
                let step = (CHUNK / (*k).max(1)).max(1);
                for piece in pieces {
                    for first in (0..piece.rows).step_by(step) {
                        let count = step.min(piece.rows - first);
                        let rows =
                            self.checkpoint
                                .rows(&piece.tensor, piece.first + first, count)?;
                        let rows = self.checked(&piece.tensor, rows)?.to_dtype(*dtype)?;
                        let Some(format) = format else {
                            writer.append(&format!("{module}.weight"), &rows)?;
                            continue;
                        };
                        let q = affine::quantize(&rows, *format)
                            .map_err(|e| self.error(&piece.tensor, e.to_string()))?;
                        writer.append(&format!("{module}.weight"), &q.codes)?;
                        writer.append(&format!("{module}.scales"), &q.scales)?;
                        writer.append(&format!("{module}.biases"), &q.biases)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn float(&self, name: &str) -> Result<Tensor> {
        self.checked(name, self.checkpoint.tensor(name)?)
    }

    fn checked(&self, name: &str, tensor: Tensor) -> Result<Tensor> {
        match tensor.dtype() {
            DType::F32 | DType::BF16 | DType::F16 => Ok(tensor),
            other => Err(self.error(name, format!("dtype {other:?}, expected bf16, f16 or f32"))),
        }
    }

    fn error(&self, tensor: &str, what: String) -> Error {
        Error::Tensor {
            file: self.checkpoint.file(tensor).to_path_buf(),
            tensor: tensor.to_string(),
            what,
        }
    }

    fn json(&self, name: &str, value: &Value) -> Result<()> {
        let path = self.dir.join(name);
        let text = serde_json::to_string_pretty(value).unwrap_or_default();
        std::fs::write(&path, text).map_err(|e| Error::io(&path, e))
    }

    fn config(&self, source: &Path, plan: &Plan, options: &ConvertOptions) -> Result<()> {
        let path = source.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let mut config: Map<String, Value> = serde_json::from_str(&text)
            .map_err(|e| Error::config(&path, format!("not a JSON object ({e})")))?;
        let AffineFormat { bits, group_size } = options.format;
        let mut quantization = Map::new();
        quantization.insert("group_size".into(), group_size.into());
        quantization.insert("bits".into(), bits.into());
        quantization.insert("mode".into(), "affine".into());
        for item in plan.trunk.iter().chain(&plan.head) {
            if let Item::Linear {
                module,
                format: Some(format),
                ..
            } = item
            {
                if *format != options.format {
                    let stated = json!({"group_size": format.group_size, "bits": format.bits});
                    quantization.insert(module.clone(), stated);
                }
            }
        }
        config.insert("quantization".into(), quantization.clone().into());
        config.insert("quantization_config".into(), quantization.into());
        self.json("config.json", &config.into())
    }

    /// Tokenizer, chat template and settings, as they are.
    fn companions(&self, source: &Path) -> Result<()> {
        let entries = std::fs::read_dir(source).map_err(|e| Error::io(source, e))?;
        for entry in entries {
            let path = entry.map_err(|e| Error::io(source, e))?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let kept = ["json", "txt", "jinja", "model"]
                .iter()
                .any(|e| path.extension().is_some_and(|x| x == *e));
            let made = name == "config.json" || name.ends_with(".safetensors.index.json");
            if path.is_file() && kept && !made {
                std::fs::copy(&path, self.dir.join(&name)).map_err(|e| Error::io(&path, e))?;
            }
        }
        Ok(())
    }
}

/// The tensors of a module.
fn slots(item: &Item) -> Vec<Slot> {
    match item {
        Item::Float {
            name, dtype, shape, ..
        } => vec![Slot {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
        }],
        Item::Linear {
            module,
            stacked,
            rows,
            k,
            dtype,
            format,
            ..
        } => {
            let slot = |suffix: &str, dtype, columns| Slot {
                name: format!("{module}.{suffix}"),
                dtype,
                shape: stacked.iter().copied().chain([*rows, columns]).collect(),
            };
            match format {
                None => vec![slot("weight", *dtype, *k)],
                Some(f) => vec![
                    slot("weight", DType::U32, k * f.bits / 32),
                    slot("scales", *dtype, k / f.group_size),
                    slot("biases", *dtype, k / f.group_size),
                ],
            }
        }
    }
}

fn bytes(items: &[Item]) -> u64 {
    items.iter().flat_map(slots).map(|s| s.bytes()).sum()
}

fn check_target(source: &Path, target: &Path, options: &ConvertOptions) -> Result<()> {
    let refuse = |what: &str| {
        Err(Error::File {
            file: target.to_path_buf(),
            what: what.into(),
        })
    };
    if !target.exists() {
        return Ok(());
    }
    let canonical = |p: &Path| p.canonicalize().map_err(|e| Error::io(p, e));
    if canonical(source)? == canonical(target)? {
        return refuse("is the source itself: name another folder");
    }
    let holds_model = target.join("config.json").is_file();
    let empty = target.is_dir() && target.read_dir().is_ok_and(|mut d| d.next().is_none());
    match (empty, holds_model, options.overwrite) {
        (true, ..) | (_, true, true) => Ok(()),
        (_, true, false) => refuse("is there already: name another folder, or ask to overwrite it"),
        _ => refuse("is there already and is no model, so it is not replaced: name another folder"),
    }
}

fn beside(target: &Path, what: &str) -> Result<PathBuf> {
    let Some(name) = target.file_name() else {
        return Err(Error::File {
            file: target.to_path_buf(),
            what: "does not name a folder".into(),
        });
    };
    let name = format!(".{}.{what}-{}", name.to_string_lossy(), std::process::id());
    Ok(target.with_file_name(name))
}

/// Puts the new folder in the target's place; an old one is gone only when the new one is there.
fn replace(partial: &Path, target: &Path) -> Result<()> {
    let old = beside(target, "old")?;
    let io = |e| Error::io(target, e);
    if target.exists() {
        std::fs::rename(target, &old).map_err(io)?;
    }
    if let Err(e) = std::fs::rename(partial, target) {
        if old.exists() {
            std::fs::rename(&old, target).map_err(io)?;
        }
        return Err(io(e));
    }
    remove(&old)
}

fn remove(dir: &Path) -> Result<()> {
    match dir.exists() {
        true => std::fs::remove_dir_all(dir).map_err(|e| Error::io(dir, e)),
        false => Ok(()),
    }
}
