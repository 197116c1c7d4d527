//! The gated feed-forward layer.

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::{self, Context};

use super::config::TextConfig;
use super::weights::Scope;

pub(crate) struct Mlp {
    gate: Weight,
    up: Weight,
    down: Weight,
}

impl Mlp {
    pub(crate) fn load(scope: &Scope, config: &TextConfig) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate: scope.linear("gate_proj", inner, hidden)?,
            up: scope.linear("up_proj", inner, hidden)?,
            down: scope.linear("down_proj", hidden, inner)?,
        })
    }

    pub(crate) fn weights(&self) -> [&Weight; 3] {
        [&self.gate, &self.up, &self.down]
    }

    pub(crate) fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        let inner = ops::gate_up_silu(cx, x, &self.gate, &self.up)?;
        ops::matmul(cx, &inner, &self.down)
    }
}
