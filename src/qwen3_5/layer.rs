//! A decoder layer: a mixer and a feed-forward layer, each behind a norm and added to the residual stream.

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::{self, Context};

use super::attention::Attention;
use super::config::{LayerType, TextConfig};
use super::gated_delta_net::GatedDeltaNet;
use super::mlp::FeedForward;
use super::scope::Scope;

pub(crate) enum Mixer {
    Attention(Box<Attention>),
    Delta(Box<GatedDeltaNet>),
}

pub(crate) struct Layer {
    input_norm: Tensor,
    pub(crate) mixer: Mixer,
    post_norm: Tensor,
    feed_forward: FeedForward,
    eps: f64,
}

impl Layer {
    pub(crate) fn load(scope: &Scope, kind: LayerType, config: &TextConfig) -> Result<Self> {
        let mixer = match kind {
            LayerType::FullAttention => {
                Mixer::Attention(Box::new(Attention::load(&scope.pp("self_attn"), config)?))
            }
            LayerType::LinearAttention => Mixer::Delta(Box::new(GatedDeltaNet::load(
                &scope.pp("linear_attn"),
                config,
            )?)),
        };
        Ok(Self {
            input_norm: scope.norm("input_layernorm", config.hidden_size)?,
            mixer,
            post_norm: scope.norm("post_attention_layernorm", config.hidden_size)?,
            feed_forward: FeedForward::load(&scope.pp("mlp"), config)?,
            eps: config.rms_norm_eps,
        })
    }

    /// The mixer's input.
    pub(crate) fn normed(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(cx, x, &self.input_norm, self.eps)
    }

    /// Runs the layer; `mix` runs its mixer on the normalised rows and gives those that `residual` takes from `x`, or
    /// `None` when nobody wants any.
    pub(crate) fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
        residual: impl FnOnce(&Tensor) -> Result<Tensor>,
        mix: impl FnOnce(&Mixer, &Tensor) -> Result<Option<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let normed = self.normed(cx, x)?;
        let Some(mixed) = mix(&self.mixer, &normed)? else {
            return Ok(None);
        };
        let x = (residual(x)? + mixed)?;
        let normed = ops::rms_norm(cx, &x, &self.post_norm, self.eps)?;
        Ok(Some((&x + self.feed_forward.forward(cx, &normed)?)?))
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let sum = |weights: &[&Weight]| weights.iter().map(|w| w.size_bytes()).sum::<usize>();
        let mixer = match &self.mixer {
            Mixer::Attention(m) => sum(&m.weights()),
            Mixer::Delta(m) => sum(&m.weights()),
        };
        mixer + self.feed_forward.size_bytes()
    }

    pub(crate) fn experts(&self) -> usize {
        self.feed_forward.experts()
    }

    pub(crate) fn expert_bytes(&self) -> usize {
        self.feed_forward.expert_bytes()
    }
}
