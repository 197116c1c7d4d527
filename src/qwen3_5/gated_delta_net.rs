//! The linear-attention layer: projections around the gated delta rule.

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::gated_delta::{GatedDeltaParams, GatedDeltaState, Keep};
use crate::ops::{self, Context};

use super::cache::delta_dims;
use super::config::TextConfig;
use super::scope::Scope;

pub(crate) struct GatedDeltaNet {
    qkv: Weight,
    z: Weight,
    a: Weight,
    b: Weight,
    out: Weight,
    params: GatedDeltaParams,
    norm: Tensor,
    eps: f64,
}

/// One sequence's rows of a pass, as a gated-delta layer sees them.
pub(crate) struct Span<'a> {
    pub(crate) state: &'a mut GatedDeltaState,
    pub(crate) rows: usize,
    pub(crate) keep: Keep,
}

impl GatedDeltaNet {
    pub(crate) fn load(scope: &Scope, config: &TextConfig) -> Result<Self> {
        let dims = delta_dims(config);
        let hidden = config.hidden_size;
        let value = dims.value_heads * dims.value_dim;
        Ok(Self {
            qkv: scope.linear("in_proj_qkv", dims.channels(), hidden)?,
            z: scope.linear("in_proj_z", value, hidden)?,
            a: scope.linear("in_proj_a", dims.value_heads, hidden)?,
            b: scope.linear("in_proj_b", dims.value_heads, hidden)?,
            out: scope.linear("out_proj", hidden, value)?,
            params: GatedDeltaParams::new(
                dims,
                scope.conv("conv1d.weight", dims.channels(), dims.taps)?,
                scope.f32("A_log", &[dims.value_heads])?,
                scope.f32("dt_bias", &[dims.value_heads])?,
            )?,
            // Plain in every convention, never shifted by one.
            norm: scope.f32("norm.weight", &[dims.value_dim])?,
            eps: config.rms_norm_eps,
        })
    }

    pub(crate) fn weights(&self) -> [&Weight; 5] {
        [&self.qkv, &self.z, &self.a, &self.b, &self.out]
    }

    /// `x` is `[rows, hidden]`; the spans' rows follow each other.
    pub(crate) fn forward(&self, cx: &Context, x: &Tensor, spans: &mut [Span]) -> Result<Tensor> {
        let dims = self.params.dims;
        let rows = x.dim(0)?;
        let projected = ops::matmul_grouped(cx, x, &[&self.qkv, &self.z, &self.a, &self.b])?;
        let z = projected[1].reshape((rows, dims.value_heads, dims.value_dim))?;
        let mut start = 0;
        let mut outs = Vec::with_capacity(spans.len());
        for span in spans {
            let part = |t: &Tensor| t.narrow(0, start, span.rows);
            let (qkv, a, b) = (
                part(&projected[0])?,
                part(&projected[2])?,
                part(&projected[3])?,
            );
            let out = ops::gated_delta(cx, &qkv, &a, &b, &self.params, span.state, span.keep)?;
            outs.push(out);
            start += span.rows;
        }
        let out = match outs.len() {
            1 => outs.remove(0),
            _ => Tensor::cat(&outs, 0)?,
        };
        let out = ops::rms_norm_gated(cx, &out, &z, &self.norm, self.eps)?;
        ops::matmul(cx, &out.flatten_from(1)?, &self.out)
    }
}
