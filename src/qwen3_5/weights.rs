//! From a checkpoint's names and conventions to the model's weights.

use candle_core::{DType, Device, Tensor};

use crate::affine::AffineFormat;
use crate::error::{Error, Result};
use crate::ops::affine_matmul::Weight;

use super::checkpoint::Checkpoint;
use super::config::Config;

/// Prefixes of the text trunk: Hugging Face multimodal, MLX, Hugging Face text-only.
const TRUNKS: [&str; 3] = ["model.language_model.", "language_model.model.", "model."];
const HEADS: [&str; 2] = ["lm_head", "language_model.lm_head"];
const DRAFTS: [&str; 3] = ["mtp.", "language_model.mtp.", "model.mtp."];

/// A checkpoint seen through its naming and storage conventions.
pub(crate) struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a Config,
    device: &'a Device,
    trunk: &'static str,
    draft: Option<&'static str>,
    /// Norm weights of the trunk are zero-centred (the norm multiplies by `1 + w`).
    trunk_zero_centred: bool,
    draft_zero_centred: bool,
}

impl<'a> Weights<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        config: &'a Config,
        device: &'a Device,
    ) -> Result<Self> {
        let has_trunk = |p: &&&str| checkpoint.contains(&format!("{p}norm.weight"));
        let Some(trunk) = TRUNKS.iter().find(has_trunk).copied() else {
            return Err(missing(
                checkpoint,
                "model.language_model.norm.weight",
                &format!("no text model found under any of the prefixes {TRUNKS:?}"),
            ));
        };
        let has_draft = |p: &&&str| checkpoint.contains(&format!("{p}fc.weight"));
        let draft = DRAFTS.iter().find(has_draft).copied();
        let mut weights = Self {
            checkpoint,
            config,
            device,
            trunk,
            draft,
            trunk_zero_centred: false,
            draft_zero_centred: false,
        };
        weights.trunk_zero_centred = weights.conv_is_hugging_face()?;
        weights.draft_zero_centred = weights.draft_norms_are_zero_centred()?;
        Ok(weights)
    }

    /// The only safe sign of a raw Hugging Face trunk is its convolution layout `[C, 1, K]` (MLX writes `[C, K, 1]`).
    fn conv_is_hugging_face(&self) -> Result<bool> {
        let taps = self.config.text.linear_conv_kernel_dim;
        let mut found = None;
        for layer in 0..self.config.text.num_hidden_layers {
            let name = format!("{}layers.{layer}.linear_attn.conv1d.weight", self.trunk);
            let raw = match self.checkpoint.shape(&name) {
                None => continue,
                Some([_, 1, k]) if *k == taps => true,
                Some([_, k, 1]) if *k == taps => false,
                Some(other) => {
                    let what =
                        format!("shape {other:?}, expected [_, 1, {taps}] or [_, {taps}, 1]");
                    return Err(missing(self.checkpoint, &name, &what));
                }
            };
            if *found.get_or_insert(raw) != raw {
                let what =
                    "its layout differs from the other layers': the checkpoint mixes conventions";
                return Err(missing(self.checkpoint, &name, what));
            }
        }
        Ok(found.unwrap_or(!self.checkpoint.is_mlx()))
    }

    /// A quantized head, or one beside a trunk that is raw, follows its writer. A float head beside a converted trunk
    /// may be either: its layer norms tell (zero-centred ones lie around 0, the others around 1).
    fn draft_norms_are_zero_centred(&self) -> Result<bool> {
        let Some(draft) = self.draft else {
            return Ok(false);
        };
        let quantized = format!("{draft}layers.0.self_attn.q_proj.scales");
        if self.checkpoint.contains(&quantized) || self.trunk_zero_centred {
            return Ok(!self.checkpoint.contains(&quantized));
        }
        let norms = ["input_layernorm", "post_attention_layernorm"];
        let mut sum = 0.0;
        for norm in norms {
            let name = format!("{draft}layers.0.{norm}.weight");
            let mean = self.checkpoint.tensor(&name)?.to_dtype(DType::F32)?;
            sum += mean.mean_all()?.to_scalar::<f32>()?;
        }
        Ok(sum / (norms.len() as f32) < 0.5)
    }

    /// The trunk's part of the checkpoint.
    pub(crate) fn trunk(&self) -> Scope<'_> {
        Scope {
            weights: self,
            prefix: self.trunk.to_string(),
            zero_centred: self.trunk_zero_centred,
        }
    }

    /// The draft head's part, when the checkpoint has one.
    pub(crate) fn draft(&self) -> Option<Scope<'_>> {
        self.draft.map(|prefix| Scope {
            weights: self,
            prefix: prefix.to_string(),
            zero_centred: self.draft_zero_centred,
        })
    }

    /// The output head; `None` when it is the embedding table.
    pub(crate) fn lm_head(&self) -> Result<Option<Weight>> {
        let text = &self.config.text;
        let has_head = |p: &&&str| self.checkpoint.contains(&format!("{p}.weight"));
        match HEADS.iter().find(has_head) {
            Some(name) if !text.tie_word_embeddings => {
                let root = Scope {
                    weights: self,
                    prefix: String::new(),
                    zero_centred: false,
                };
                root.linear(name, text.vocab_size, text.hidden_size)
                    .map(Some)
            }
            None if !text.tie_word_embeddings => Err(missing(
                self.checkpoint,
                HEADS[0],
                "missing, and tie_word_embeddings is false",
            )),
            _ => Ok(None),
        }
    }
}

fn missing(checkpoint: &Checkpoint, tensor: &str, what: &str) -> Error {
    Error::Tensor {
        file: checkpoint.dir().to_path_buf(),
        tensor: tensor.to_string(),
        what: what.to_string(),
    }
}

/// Names below a prefix.
pub(crate) struct Scope<'a> {
    weights: &'a Weights<'a>,
    prefix: String,
    zero_centred: bool,
}

impl<'a> Scope<'a> {
    pub(crate) fn pp(&self, name: &str) -> Self {
        Self {
            weights: self.weights,
            prefix: format!("{}{name}.", self.prefix),
            zero_centred: self.zero_centred,
        }
    }

    fn error(&self, name: &str, what: impl AsRef<str>) -> Error {
        missing(
            self.weights.checkpoint,
            &format!("{}{name}", self.prefix),
            what.as_ref(),
        )
    }

    /// A tensor as stored, of exactly this shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self
            .weights
            .checkpoint
            .tensor(&format!("{}{name}", self.prefix))?;
        if tensor.dims() != shape {
            let what = format!(
                "shape {:?}, expected {shape:?} by config.json",
                tensor.dims()
            );
            return Err(self.error(name, what));
        }
        Ok(tensor)
    }

    /// A small float tensor as f32 on the model's device.
    pub(crate) fn f32(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.tensor(name, shape)?;
        if !matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            let what = format!("dtype {:?}, expected f32, bf16 or f16", tensor.dtype());
            return Err(self.error(name, what));
        }
        Ok(tensor
            .to_dtype(DType::F32)?
            .to_device(self.weights.device)?)
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
        let full = format!("{}{name}", self.prefix);
        let shape = match self.weights.checkpoint.shape(&full) {
            Some([_, 1, k]) if *k == taps => [channels, 1, taps],
            _ => [channels, taps, 1],
        };
        Ok(self.f32(name, &shape)?.reshape((channels, taps))?)
    }

    /// A linear weight `[n, k]`: quantized when it has scales, else plain.
    pub(crate) fn linear(&self, name: &str, n: usize, k: usize) -> Result<Weight> {
        let (weight, scales, biases) = (
            format!("{name}.weight"),
            format!("{name}.scales"),
            format!("{name}.biases"),
        );
        let full = |n: &str| format!("{}{n}", self.prefix);
        let checkpoint = self.weights.checkpoint;
        if !checkpoint.contains(&full(&scales)) {
            let tensor = checkpoint.tensor(&full(&weight))?;
            if tensor.dtype() == DType::U32 {
                return Err(self.error(&weight, "holds packed codes, but there are no scales"));
            }
            return Weight::dense(&self.tensor(&weight, &[n, k])?, self.weights.device)
                .map_err(|e| self.error(&weight, e.to_string()));
        }
        let format = self.format(name, &weight, &scales, n, k)?;
        let groups = k / format.group_size;
        let codes = self.tensor(&weight, &[n, k * format.bits / 32])?;
        let scales = self.tensor(&scales, &[n, groups])?;
        let biases = self.tensor(&biases, &[n, groups])?;
        for (name, tensor) in [("scales", &scales), ("biases", &biases)] {
            let values = tensor.to_dtype(DType::F32)?.flatten_all()?;
            if let Some(bad) = values.to_vec1::<f32>()?.iter().find(|v| !v.is_finite()) {
                return Err(self.error(&weight, format!("one of its {name} is {bad}")));
            }
        }
        Weight::affine(&codes, &scales, &biases, format, self.weights.device)
            .map_err(|e| self.error(&weight, e.to_string()))
    }

    /// Bits and group size follow from the shapes; config.json must agree where it speaks of this module.
    fn format(
        &self,
        name: &str,
        weight: &str,
        scales: &str,
        n: usize,
        k: usize,
    ) -> Result<AffineFormat> {
        let shape = |name: &str| {
            let full = format!("{}{name}", self.prefix);
            self.weights.checkpoint.shape(&full).map(<[usize]>::to_vec)
        };
        let (words, groups) = match (shape(weight).as_deref(), shape(scales).as_deref()) {
            (Some([a, words]), Some([b, groups])) if *a == n && *b == n && *groups > 0 => {
                (*words, *groups)
            }
            (codes, scales) => {
                let what = format!(
                    "codes {codes:?} and scales {scales:?} do not make a [{n}, {k}] weight"
                );
                return Err(self.error(weight, what));
            }
        };
        if !k.is_multiple_of(groups) || !(words * 32).is_multiple_of(k) {
            let what =
                format!("{words} words and {groups} groups per row do not divide {k} columns");
            return Err(self.error(weight, what));
        }
        let format = AffineFormat::new(words * 32 / k, k / groups)
            .map_err(|e| self.error(weight, e.to_string()))?;
        let path = format!("{}{name}", self.prefix);
        let stated = self.weights.config.quantization.as_ref();
        if let Some(stated) = stated.and_then(|q| q.format_for(&path)) {
            if stated != format {
                let what =
                    format!("holds {format:?} by its shapes, but config.json says {stated:?}");
                return Err(self.error(weight, what));
            }
        }
        Ok(format)
    }
}
