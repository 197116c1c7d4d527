//! Tensors below a prefix of a checkpoint, read in whichever form their writer chose.

use candle_core::{DType, Device, Tensor};

use crate::affine::AffineFormat;
use crate::error::{Error, Result};
use crate::ops::affine_matmul::Weight;

use super::checkpoint::Checkpoint;
use super::config::Quantization;
use super::weights::missing;

/// Names below a prefix.
#[derive(Clone)]
pub(crate) struct Scope<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) quantization: Option<&'a Quantization>,
    pub(super) device: &'a Device,
    pub(super) prefix: String,
    pub(super) zero_centred: bool,
}

/// The matrix `[n, k]` that is wanted of a stored tensor.
#[derive(Clone, Copy)]
struct Part {
    n: usize,
    k: usize,
    /// First row, the tensor's leading dimensions taken together.
    first: usize,
    /// Rows in all.
    rows: usize,
    /// Matrices that are stacked in the tensor; `None` when it is one matrix.
    stacked: Option<usize>,
}

impl Part {
    fn shape(&self, columns: usize) -> Vec<usize> {
        match self.stacked {
            None => vec![self.rows, columns],
            Some(count) => vec![count, self.rows / count, columns],
        }
    }
}

/// Suffixes of a module's tensors. Hugging Face's fused experts are parameters and have no `.weight`.
const SUFFIXES: [&str; 2] = [".weight", ""];

impl Scope<'_> {
    pub(crate) fn pp(&self, name: &str) -> Self {
        Self {
            prefix: format!("{}{name}.", self.prefix),
            ..self.clone()
        }
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn error(&self, name: &str, what: impl AsRef<str>) -> Error {
        missing(self.checkpoint, &self.full(name), what.as_ref())
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.checkpoint.shape(&self.full(name))
    }

    fn check_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        match self.shape(name) {
            Some(found) if found == shape => Ok(()),
            None => Err(self.error(name, "missing")),
            Some(found) => {
                let what = format!("shape {found:?}, expected {shape:?} by config.json");
                Err(self.error(name, what))
            }
        }
    }

    /// A small float tensor as f32 on the model's device.
    pub(crate) fn f32(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.check_shape(name, shape)?;
        let tensor = self.checkpoint.tensor(&self.full(name))?;
        if !matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            let what = format!("dtype {:?}, expected f32, bf16 or f16", tensor.dtype());
            return Err(self.error(name, what));
        }
        Ok(tensor.to_dtype(DType::F32)?.to_device(self.device)?)
    }

    /// The gain of an RMSNorm: `1 + w` in f32 where the checkpoint is zero-centred, else `w`.
    pub(crate) fn norm(&self, name: &str, size: usize) -> Result<Tensor> {
        let weight = self.f32(&format!("{name}.weight"), &[size])?;
        Ok(match self.zero_centred {
            true => (weight + 1.0)?,
            false => weight,
        })
    }

    /// The convolution as `[channels, taps]`, from either layout.
    pub(crate) fn conv(&self, name: &str, channels: usize, taps: usize) -> Result<Tensor> {
        let shape = match self.shape(name) {
            Some([_, 1, k]) if *k == taps => [channels, 1, taps],
            _ => [channels, taps, 1],
        };
        Ok(self.f32(name, &shape)?.reshape((channels, taps))?)
    }

    /// Whether the checkpoint has a module of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        SUFFIXES
            .iter()
            .any(|suffix| self.shape(&format!("{name}{suffix}")).is_some())
    }

    /// A linear weight `[n, k]`: quantized when it has scales, else plain.
    pub(crate) fn linear(&self, name: &str, n: usize, k: usize) -> Result<Weight> {
        self.part(
            name,
            Part {
                n,
                k,
                first: 0,
                rows: n,
                stacked: None,
            },
        )
    }

    /// Rows `first..first + n` of each of `count` stacked matrices `[of, k]`.
    pub(crate) fn stacked(
        &self,
        name: &str,
        count: usize,
        (first, n, of): (usize, usize, usize),
        k: usize,
    ) -> Result<Vec<Weight>> {
        let part = |i| Part {
            n,
            k,
            first: i * of + first,
            rows: count * of,
            stacked: Some(count),
        };
        (0..count).map(|i| self.part(name, part(i))).collect()
    }

    fn part(&self, name: &str, part: Part) -> Result<Weight> {
        let suffix = |s: &&&str| self.shape(&format!("{name}{s}")).is_some();
        let suffix = SUFFIXES.iter().find(suffix).unwrap_or(&SUFFIXES[0]);
        let weight = format!("{name}{suffix}");
        let (scales, biases) = (format!("{name}.scales"), format!("{name}.biases"));
        let rows = |name: &str| {
            let full = self.full(name);
            self.checkpoint.rows(&full, part.first, part.n)
        };
        let failed = |e: Error| self.error(&weight, e.to_string());
        if self.shape(&scales).is_none() {
            if self.checkpoint.is_packed(&self.full(&weight)) {
                return Err(self.error(&weight, "holds packed codes, but there are no scales"));
            }
            self.check_shape(&weight, &part.shape(part.k))?;
            return Weight::dense(&rows(&weight)?, self.device).map_err(failed);
        }
        let format = self.format(name, &weight, &scales, part)?;
        let groups = part.k / format.group_size;
        self.check_shape(&weight, &part.shape(part.k * format.bits / 32))?;
        self.check_shape(&scales, &part.shape(groups))?;
        self.check_shape(&biases, &part.shape(groups))?;
        let (codes, scales, biases) = (rows(&weight)?, rows(&scales)?, rows(&biases)?);
        for (name, tensor) in [("scales", &scales), ("biases", &biases)] {
            let values = tensor.to_dtype(DType::F32)?.flatten_all()?;
            if let Some(bad) = values.to_vec1::<f32>()?.iter().find(|v| !v.is_finite()) {
                return Err(self.error(&weight, format!("one of its {name} is {bad}")));
            }
        }
        Weight::affine(&codes, &scales, &biases, format, self.device).map_err(failed)
    }

    /// Bits and group size follow from the shapes; config.json must agree where it speaks of this module.
    fn format(&self, name: &str, weight: &str, scales: &str, part: Part) -> Result<AffineFormat> {
        let k = part.k;
        let columns = |name: &str| match (self.shape(name), part.stacked) {
            (Some([rows, columns]), None) if *rows == part.rows => Some(*columns),
            (Some([count, rows, columns]), Some(_)) if count * rows == part.rows => Some(*columns),
            _ => None,
        };
        let (words, groups) = match (columns(weight), columns(scales)) {
            (Some(words), Some(groups)) if groups > 0 => (words, groups),
            _ if self.shape(weight).is_none() => return Err(self.error(weight, "missing")),
            _ => {
                let what = format!(
                    "codes {:?} and scales {:?} do not make a {:?} weight",
                    self.shape(weight),
                    self.shape(scales),
                    part.shape(k)
                );
                return Err(self.error(weight, what));
            }
        };
        if !k.is_multiple_of(groups) || !words.saturating_mul(32).is_multiple_of(k) {
            let what =
                format!("{words} words and {groups} groups per row do not divide {k} columns");
            return Err(self.error(weight, what));
        }
        let format = AffineFormat::new(words * 32 / k, k / groups)
            .map_err(|e| self.error(weight, e.to_string()))?;
        let stated = self
            .quantization
            .and_then(|q| q.format_for(&self.full(name)));
        match stated {
            Some(stated) if stated != format => {
                let what =
                    format!("holds {format:?} by its shapes, but config.json says {stated:?}");
                Err(self.error(weight, what))
            }
            _ => Ok(format),
        }
    }
}
