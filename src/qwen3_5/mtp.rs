//! The multi-token-prediction head: one attention layer that predicts the token after the next.
//!
//! Row `t` takes the embedding of token `t + 1` and the trunk's hidden state of row `t` after its final norm, at row `t`'s
//! position. Deeper drafts take the head's own output (after `mtp.norm`) as the hidden state.

use candle_core::{Tensor, D};

use crate::error::{Error, Result};
use crate::ops::affine_matmul::Weight;
use crate::ops::rope::Rope;
use crate::ops::{self, Context};

use super::attention::Span;
use super::config::{LayerType, TextConfig};
use super::layer::{Layer, Mixer};
use super::scope::Scope;

pub(crate) struct DraftHead {
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    fc: Weight,
    layer: Layer,
    norm: Tensor,
    eps: f64,
}

impl DraftHead {
    pub(crate) fn load(scope: &Scope, config: &TextConfig) -> Result<Self> {
        let hidden = config.hidden_size;
        let layer = scope.pp("layers").pp("0");
        Ok(Self {
            embedding_norm: scope.norm("pre_fc_norm_embedding", hidden)?,
            hidden_norm: scope.norm("pre_fc_norm_hidden", hidden)?,
            fc: scope.linear("fc", hidden, 2 * hidden)?,
            layer: Layer::load(&layer, LayerType::FullAttention, config)?,
            norm: scope.norm("norm", hidden)?,
            eps: config.rms_norm_eps,
        })
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.fc.size_bytes() + self.layer.size_bytes()
    }

    /// The layer's input: `fc` of the normalised embedding and hidden state, in this order.
    pub(crate) fn combine(
        &self,
        cx: &Context,
        embeddings: &Tensor,
        hidden: &Tensor,
    ) -> Result<Tensor> {
        let e = ops::rms_norm(cx, embeddings, &self.embedding_norm, self.eps)?;
        let h = ops::rms_norm(cx, hidden, &self.hidden_norm, self.eps)?;
        ops::matmul(cx, &Tensor::cat(&[e, h], D::Minus1)?, &self.fc)
    }

    pub(crate) fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
        positions: &Tensor,
        rope: &Rope,
        spans: &mut [Span],
    ) -> Result<Tensor> {
        let all = |x: &Tensor| Ok(x.clone());
        let out = self.layer.forward(cx, x, all, |mixer, x| match mixer {
            Mixer::Attention(a) => Ok(Some(a.forward(cx, x, positions, rope, spans, None)?)),
            Mixer::Delta(_) => Err(not_attention()),
        })?;
        let out = out.ok_or_else(not_attention)?;
        ops::rms_norm(cx, &out, &self.norm, self.eps)
    }

    /// Writes the rows' keys and values, bitwise those of [`DraftHead::forward`], and computes nothing else.
    pub(crate) fn prime(
        &self,
        cx: &Context,
        x: &Tensor,
        positions: &Tensor,
        rope: &Rope,
        spans: &mut [Span],
    ) -> Result<()> {
        let x = self.layer.normed(cx, x)?;
        match &self.layer.mixer {
            Mixer::Attention(a) => a.prime(cx, &x, positions, rope, spans),
            Mixer::Delta(_) => Err(not_attention()),
        }
    }
}

fn not_attention() -> Error {
    Error::argument("mtp", "the head's layer is not attention")
}
