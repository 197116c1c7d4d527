//! Gated full attention: per-head normalised queries and keys, partial RoPE, a sigmoid gate on the output.

use candle_core::{Tensor, D};

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::rope::Rope;
use crate::ops::{self, Context};

use super::cache::KeyValues;
use super::config::TextConfig;
use super::scope::Scope;

pub(crate) struct Attention {
    q: Weight,
    k: Weight,
    v: Weight,
    o: Weight,
    q_norm: Tensor,
    k_norm: Tensor,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
}

/// One sequence's rows of a pass, as an attention layer sees them.
pub(crate) struct Span<'a> {
    pub(crate) key_values: &'a mut KeyValues,
    /// Slots filled before this pass.
    pub(crate) filled: usize,
    pub(crate) rows: usize,
    /// How many of them, the last ones, an output is wanted of.
    pub(crate) wanted: usize,
}

impl Attention {
    pub(crate) fn load(scope: &Scope, config: &TextConfig) -> Result<Self> {
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (dim, hidden) = (config.head_dim, config.hidden_size);
        Ok(Self {
            q: scope.linear("q_proj", 2 * heads * dim, hidden)?,
            k: scope.linear("k_proj", kv_heads * dim, hidden)?,
            v: scope.linear("v_proj", kv_heads * dim, hidden)?,
            o: scope.linear("o_proj", hidden, heads * dim)?,
            q_norm: scope.norm("q_norm", dim)?,
            k_norm: scope.norm("k_norm", dim)?,
            heads,
            kv_heads,
            head_dim: dim,
            eps: config.rms_norm_eps,
        })
    }

    pub(crate) fn weights(&self) -> [&Weight; 4] {
        [&self.q, &self.k, &self.v, &self.o]
    }

    fn keys_values(
        &self,
        cx: &Context,
        projected: &[Tensor],
        positions: &Tensor,
        rope: &Rope,
    ) -> Result<(Tensor, Tensor)> {
        let shape = (projected[0].dim(0)?, self.kv_heads, self.head_dim);
        let k = projected[0].reshape(shape)?;
        let k = ops::rms_norm(cx, &k, &self.k_norm, self.eps)?;
        Ok((
            ops::rope(cx, &k, positions, rope)?,
            projected[1].reshape(shape)?,
        ))
    }

    /// Queries after normalisation and RoPE, `[rows, heads, head_dim]`, and their gates.
    fn queries(
        &self,
        cx: &Context,
        projected: &Tensor,
        positions: &Tensor,
        rope: &Rope,
    ) -> Result<(Tensor, Tensor)> {
        // Per head: the query, then its gate.
        let q_gate = projected.reshape((projected.dim(0)?, self.heads, 2 * self.head_dim))?;
        let q = q_gate.narrow(2, 0, self.head_dim)?;
        let gate = q_gate.narrow(2, self.head_dim, self.head_dim)?;
        let q = ops::rms_norm(cx, &q, &self.q_norm, self.eps)?;
        Ok((ops::rope(cx, &q, positions, rope)?, gate))
    }

    /// The queries of `x` as [`Attention::forward`] has them, for a scorer that reads nothing else of the layer.
    pub(crate) fn queries_only(
        &self,
        cx: &Context,
        x: &Tensor,
        positions: &Tensor,
        rope: &Rope,
    ) -> Result<Tensor> {
        let projected = ops::matmul(cx, x, &self.q)?;
        Ok(self.queries(cx, &projected, positions, rope)?.0)
    }

    /// Writes the rows' keys and values and computes nothing else.
    pub(crate) fn prime(
        &self,
        cx: &Context,
        x: &Tensor,
        positions: &Tensor,
        rope: &Rope,
        spans: &mut [Span],
    ) -> Result<()> {
        let projected = ops::matmul_grouped(cx, x, &[&self.k, &self.v])?;
        let (k, v) = self.keys_values(cx, &projected, positions, rope)?;
        self.write(&k, &v, spans)
    }

    fn write(&self, k: &Tensor, v: &Tensor, spans: &mut [Span]) -> Result<()> {
        let mut start = 0;
        for span in spans {
            let part = |t: &Tensor| t.narrow(0, start, span.rows);
            span.key_values.write(&part(k)?, &part(v)?, span.filled)?;
            start += span.rows;
        }
        Ok(())
    }

    /// `x` is `[rows, hidden]`; the spans' rows follow each other. The result has the wanted rows. `queries` receives their
    /// rotated queries.
    pub(crate) fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
        positions: &Tensor,
        rope: &Rope,
        spans: &mut [Span],
        queries: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor> {
        let all = spans.iter().all(|s| s.wanted == s.rows);
        let (q, gate) = if all {
            let projected = ops::matmul_grouped(cx, x, &[&self.q, &self.k, &self.v])?;
            let (k, v) = self.keys_values(cx, &projected[1..], positions, rope)?;
            self.write(&k, &v, spans)?;
            self.queries(cx, &projected[0], positions, rope)?
        } else {
            self.prime(cx, x, positions, rope, spans)?;
            let sizes: Vec<_> = spans.iter().map(|s| (s.rows, s.wanted)).collect();
            let projected = ops::matmul(cx, &last_rows(x, &sizes)?, &self.q)?;
            let positions = match positions.rank() {
                1 => last_rows(positions, &sizes)?,
                _ => last_rows(&positions.t()?, &sizes)?.t()?,
            };
            self.queries(cx, &projected, &positions, rope)?
        };
        let scale = (self.head_dim as f32).powf(-0.5);
        let mut start = 0;
        let mut outs = Vec::with_capacity(spans.len());
        for span in spans.iter().filter(|s| s.wanted > 0) {
            let q = q.narrow(0, start, span.wanted)?;
            let (keys, values) = (span.key_values.keys(), span.key_values.values());
            let len = span.filled + span.rows;
            outs.push(ops::attention(cx, &q, keys, values, len, scale)?);
            start += span.wanted;
        }
        let out = match outs.len() {
            1 => outs.remove(0),
            _ => Tensor::cat(&outs, 0)?,
        };
        if let Some(queries) = queries {
            queries.push(q);
        }
        let gated = ops::sigmoid_gate(cx, &out, &gate)?;
        ops::matmul(cx, &gated.flatten_from(D::Minus2)?, &self.o)
    }
}

/// Of packed rows, the last `wanted` of every `(rows, wanted)`. At least one row must be wanted.
pub(crate) fn last_rows(x: &Tensor, sizes: &[(usize, usize)]) -> Result<Tensor> {
    if sizes.iter().all(|(rows, wanted)| rows == wanted) {
        return Ok(x.clone());
    }
    let mut start = 0;
    let mut parts = vec![];
    for (rows, wanted) in sizes {
        if *wanted > 0 {
            parts.push(x.narrow(0, start + rows - wanted, *wanted)?);
        }
        start += rows;
    }
    Ok(match parts.len() {
        1 => parts.remove(0).contiguous()?,
        _ => Tensor::cat(&parts, 0)?,
    })
}
