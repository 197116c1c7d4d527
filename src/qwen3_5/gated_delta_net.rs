//! The linear-attention layer: projections around the gated delta rule.

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::gated_delta::{GatedDeltaParams, GatedDeltaState, Keep};
use crate::ops::{self, Context};

use super::attention::last_rows;
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
    /// How many of them, the last ones, an output is wanted of.
    pub(crate) wanted: usize,
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

    /// `x` is `[rows, hidden]`; the spans' rows follow each other. The result has the wanted rows, `None` where there are none:
    /// every row goes through the state, but gate, norm and output projection are computed for wanted rows only.
    pub(crate) fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
        spans: &mut [Span],
    ) -> Result<Option<Tensor>> {
        let dims = self.params.dims;
        let sizes: Vec<_> = spans.iter().map(|s| (s.rows, s.wanted)).collect();
        let wanted: usize = sizes.iter().map(|(_, wanted)| wanted).sum();
        let all = wanted == x.dim(0)?;
        let weights = [&self.qkv, &self.a, &self.b, &self.z];
        let mut projected = ops::matmul_grouped(cx, x, &weights[..if all { 4 } else { 3 }])?;
        if !all && wanted > 0 {
            projected.push(ops::matmul(cx, &last_rows(x, &sizes)?, &self.z)?);
        }
        let mut start = 0;
        let mut outs = Vec::with_capacity(spans.len());
        for span in spans {
            let part = |t: &Tensor| t.narrow(0, start, span.rows);
            let (qkv, a, b) = (
                part(&projected[0])?,
                part(&projected[1])?,
                part(&projected[2])?,
            );
            let out = ops::gated_delta(cx, &qkv, &a, &b, &self.params, span.state, span.keep)?;
            if span.wanted > 0 {
                outs.push(out.narrow(0, span.rows - span.wanted, span.wanted)?);
            }
            start += span.rows;
        }
        let out = match outs.len() {
            0 => return Ok(None),
            1 => outs.remove(0),
            _ => Tensor::cat(&outs, 0)?,
        };
        let z = projected[3].reshape((wanted, dims.value_heads, dims.value_dim))?;
        let out = ops::rms_norm_gated(cx, &out, &z, &self.norm, self.eps)?;
        Ok(Some(ops::matmul(cx, &out.flatten_from(1)?, &self.out)?))
    }
}
