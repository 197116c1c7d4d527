//! The gated feed-forward layer.

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::{self, Context};

use super::config::TextConfig;
use super::moe::Moe;
use super::scope::Scope;

pub(crate) struct Mlp {
    gate: Weight,
    up: Weight,
    down: Weight,
}

impl Mlp {
    pub(crate) fn new(gate: Weight, up: Weight, down: Weight) -> Self {
        Self { gate, up, down }
    }

    pub(crate) fn load(scope: &Scope, hidden: usize, inner: usize) -> Result<Self> {
        Ok(Self {
            gate: scope.linear("gate_proj", inner, hidden)?,
            up: scope.linear("up_proj", inner, hidden)?,
            down: scope.linear("down_proj", hidden, inner)?,
        })
    }

    /// Gate, up and down.
    pub(crate) fn weights(&self) -> [&Weight; 3] {
        [&self.gate, &self.up, &self.down]
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let weights = [&self.gate, &self.up, &self.down];
        weights.iter().map(|w| w.size_bytes()).sum()
    }

    pub(crate) fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        let inner = ops::gate_up_silu(cx, x, &self.gate, &self.up)?;
        ops::matmul(cx, &inner, &self.down)
    }
}

/// A layer's feed-forward half.
pub(crate) enum FeedForward {
    Dense(Box<Mlp>),
    Experts(Box<Moe>),
}

impl FeedForward {
    pub(crate) fn load(scope: &Scope, config: &TextConfig) -> Result<Self> {
        let hidden = config.hidden_size;
        Ok(match &config.moe {
            None => Self::Dense(Box::new(Mlp::load(
                scope,
                hidden,
                config.intermediate_size,
            )?)),
            Some(moe) => Self::Experts(Box::new(Moe::load(scope, hidden, moe)?)),
        })
    }

    pub(crate) fn size_bytes(&self) -> usize {
        match self {
            Self::Dense(mlp) => mlp.size_bytes(),
            Self::Experts(moe) => moe.size_bytes(),
        }
    }

    pub(crate) fn experts(&self) -> usize {
        match self {
            Self::Dense(_) => 0,
            Self::Experts(moe) => moe.experts(),
        }
    }

    pub(crate) fn expert_bytes(&self) -> usize {
        match self {
            Self::Dense(_) => 0,
            Self::Experts(moe) => moe.expert_bytes(),
        }
    }

    pub(crate) fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(cx, x),
            Self::Experts(moe) => moe.forward(cx, x),
        }
    }
}
