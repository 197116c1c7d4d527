//! From a checkpoint's names and conventions to the model's weights.

use candle_core::{DType, Device};

use crate::error::{Error, Result};
use crate::ops::affine_matmul::Weight;

use super::checkpoint::{Checkpoint, DRAFTS};
use super::config::Config;
use super::scope::Scope;

/// Prefixes of the text trunk: Hugging Face multimodal, MLX, Hugging Face text-only.
const TRUNKS: [&str; 3] = ["model.language_model.", "language_model.model.", "model."];
const HEADS: [&str; 2] = ["lm_head", "language_model.lm_head"];

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
        if let Some(mlx) = self.checkpoint.separate_head_is_mlx() {
            return Ok(!mlx && !self.checkpoint.contains(&quantized));
        }
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
        self.scope(self.trunk, self.trunk_zero_centred)
    }

    /// The draft head's part, when the checkpoint has one.
    pub(crate) fn draft(&self) -> Option<Scope<'_>> {
        self.draft
            .map(|prefix| self.scope(prefix, self.draft_zero_centred))
    }

    /// The tensors that a load reads, with the draft head's or without.
    pub(crate) fn names(&self, draft: bool) -> impl Iterator<Item = &str> {
        let trunk =
            ["layers.", "embed_tokens.", "norm."].map(|part| format!("{}{part}", self.trunk));
        let head = HEADS.map(|head| format!("{head}."));
        let head = head
            .into_iter()
            .filter(|_| !self.config.text.tie_word_embeddings);
        let draft = self.draft.filter(|_| draft).map(String::from);
        let read: Vec<String> = trunk.into_iter().chain(head).chain(draft).collect();
        let names = self.checkpoint.names();
        names.filter(move |name| read.iter().any(|prefix| name.starts_with(prefix)))
    }

    fn scope(&self, prefix: &str, zero_centred: bool) -> Scope<'_> {
        Scope {
            checkpoint: self.checkpoint,
            quantization: self.config.quantization.as_ref(),
            device: self.device,
            prefix: prefix.to_string(),
            zero_centred,
        }
    }

    /// The output head; `None` when it is the embedding table.
    pub(crate) fn lm_head(&self) -> Result<Option<Weight>> {
        let text = &self.config.text;
        let has_head = |p: &&&str| self.checkpoint.contains(&format!("{p}.weight"));
        match HEADS.iter().find(has_head) {
            Some(name) if !text.tie_word_embeddings => {
                let root = self.scope("", false);
                root.linear(name, text.vocab_size, text.hidden_size)
                    .map(Some)
            }
            None if !text.tie_word_embeddings => Err(missing(
                self.checkpoint,
                &format!("{}.weight", HEADS[0]),
                "missing, and tie_word_embeddings is false",
            )),
            _ => Ok(None),
        }
    }
}

pub(super) fn missing(checkpoint: &Checkpoint, tensor: &str, what: &str) -> Error {
    Error::Tensor {
        file: checkpoint.file(tensor).to_path_buf(),
        tensor: tensor.to_string(),
        what: what.to_string(),
    }
}
