//! Gated delta net: causal depthwise convolution, SiLU, normalised keys and queries, and the gated delta rule
//! (Yang et al., arXiv 2412.06464).

use candle_core::{DType, Device, Tensor};

use super::{check, Context};
use crate::error::{Error, Result};

const OP: &str = "gated_delta";

/// The sizes of a gated delta net layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedDeltaDims {
    /// Heads of keys and queries.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`: value head `i` uses key head `i / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Size of a key.
    pub key_dim: usize,
    /// Size of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
}

impl GatedDeltaDims {
    /// Columns of the input: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// A layer's own weights, f32.
#[derive(Clone, Debug)]
pub struct GatedDeltaParams {
    /// Sizes.
    pub dims: GatedDeltaDims,
    /// `[channels, taps]`, the last tap meets the newest row.
    pub conv: Tensor,
    /// `[value_heads]`: `A_log`.
    pub a_log: Tensor,
    /// `[value_heads]`: `dt_bias`.
    pub dt_bias: Tensor,
}

/// Whether a pass's rows may be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The rows are committed at once (prefill, plain decoding).
    Commit,
    /// The rows stay pending until `accept(n)` keeps the first `n`.
    Pending,
}

/// One sequence's state in one layer: a checkpoint and the pending rows.
#[derive(Clone, Debug)]
pub struct GatedDeltaState {
    dims: GatedDeltaDims,
    state: Vec<f32>,
    conv: Vec<f32>,
    tape: Vec<(Vec<f32>, Vec<f32>)>,
}

impl GatedDeltaState {
    /// The empty state.
    pub fn new(dims: GatedDeltaDims, _device: &Device) -> Result<Self> {
        let state = vec![0.0; dims.value_heads * dims.key_dim * dims.value_dim];
        let conv = vec![0.0; dims.channels() * (dims.taps - 1)];
        Ok(Self {
            dims,
            state,
            conv,
            tape: vec![],
        })
    }

    /// Rows of the last pass that are not committed.
    pub fn pending(&self) -> usize {
        self.tape.len()
    }

    /// Commits the first `n` pending rows and forgets the rest.
    pub fn accept(&mut self, n: usize) -> Result<()> {
        if n > self.tape.len() {
            return Err(Error::Cache(format!(
                "{n} rows accepted, {} are pending",
                self.tape.len()
            )));
        }
        let tape = std::mem::take(&mut self.tape);
        if let Some((state, conv)) = tape.into_iter().take(n).next_back() {
            (self.state, self.conv) = (state, conv);
        }
        Ok(())
    }

    /// The committed recurrent state `[value_heads, key_dim, value_dim]` f32.
    pub fn recurrent(&self) -> Result<Tensor> {
        let d = self.dims;
        Ok(Tensor::from_slice(
            &self.state,
            (d.value_heads, d.key_dim, d.value_dim),
            &Device::Cpu,
        )?)
    }

    /// The committed last `taps - 1` input rows, `[taps - 1, channels]`, f32.
    pub fn conv_inputs(&self) -> Result<Tensor> {
        Ok(Tensor::from_slice(
            &self.conv,
            (self.dims.taps - 1, self.dims.channels()),
            &Device::Cpu,
        )?)
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        (self.state.len() + self.conv.len()) * 4 * (1 + self.tape.len())
    }
}

/// Runs one sequence's rows: `qkv` is `[rows, channels]` (queries, keys, values, heads contiguous), `a` and `b` are
/// `[rows, value_heads]`, all of one dtype (f32, bf16 or f16); the result `[rows, value_heads, value_dim]` has it too.
/// Everything inside is f32. `state` must have no pending rows left undecided (call `accept` first).
pub fn gated_delta(
    cx: &Context,
    qkv: &Tensor,
    a: &Tensor,
    b: &Tensor,
    params: &GatedDeltaParams,
    state: &mut GatedDeltaState,
    keep: Keep,
) -> Result<Tensor> {
    let d = params.dims;
    let dtype = check::activation(OP, "qkv", qkv)?;
    check::dtype(OP, "a", a, dtype)?;
    check::dtype(OP, "b", b, dtype)?;
    check::shape(OP, "qkv", qkv, &[None, Some(d.channels())])?;
    let rows = qkv.dim(0)?;
    check::shape(OP, "a", a, &[Some(rows), Some(d.value_heads)])?;
    check::shape(OP, "b", b, &[Some(rows), Some(d.value_heads)])?;
    if state.pending() > 0 {
        return Err(Error::Cache(format!(
            "{} rows are pending: accept some or none of them first",
            state.pending()
        )));
    }
    cx.routes().count(OP, "reference", dtype);
    let f =
        |t: &Tensor| -> Result<Vec<f32>> { Ok(t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?) };
    let (qkv, a, b) = (f(qkv)?, f(a)?, f(b)?);
    let (conv_w, a_log, dt_bias) = (f(&params.conv)?, f(&params.a_log)?, f(&params.dt_bias)?);
    let c = d.channels();
    let (mut s, mut conv) = (state.state.clone(), state.conv.clone());
    let mut out = vec![0f32; rows * d.value_heads * d.value_dim];
    let mut tape = vec![];
    for r in 0..rows {
        let x = &qkv[r * c..][..c];
        let tap = |i: usize, ch: usize| {
            if i + 1 == d.taps {
                x[ch]
            } else {
                conv[i * c + ch]
            }
        };
        let act: Vec<f32> = (0..c)
            .map(|ch| {
                (0..d.taps)
                    .map(|i| conv_w[ch * d.taps + i] * tap(i, ch))
                    .sum::<f32>()
            })
            .map(|v| v / (1.0 + (-v).exp()))
            .collect();
        let normalise = |v: &[f32], scale: f32| -> Vec<f32> {
            let inv = scale / (v.iter().map(|x| x * x).sum::<f32>() + 1e-6).sqrt();
            v.iter().map(|x| x * inv).collect()
        };
        let kd = d.key_heads * d.key_dim;
        for h in 0..d.value_heads {
            let kh = h / (d.value_heads / d.key_heads) * d.key_dim;
            let q = normalise(&act[kh..][..d.key_dim], (d.key_dim as f32).powf(-0.5));
            let k = normalise(&act[kd + kh..][..d.key_dim], 1.0);
            let v = &act[2 * kd + h * d.value_dim..][..d.value_dim];
            let beta = 1.0 / (1.0 + (-b[r * d.value_heads + h]).exp());
            let t = a[r * d.value_heads + h] + dt_bias[h];
            let softplus = if t > 20.0 { t } else { t.exp().ln_1p() };
            let decay = (-a_log[h].exp() * softplus).exp();
            let s = &mut s[h * d.key_dim * d.value_dim..][..d.key_dim * d.value_dim];
            let o = &mut out[(r * d.value_heads + h) * d.value_dim..][..d.value_dim];
            for j in 0..d.value_dim {
                let mut mem = 0.0;
                for i in 0..d.key_dim {
                    s[i * d.value_dim + j] *= decay;
                    mem += k[i] * s[i * d.value_dim + j];
                }
                let delta = (v[j] - mem) * beta;
                for i in 0..d.key_dim {
                    s[i * d.value_dim + j] += k[i] * delta;
                    o[j] += q[i] * s[i * d.value_dim + j];
                }
            }
        }
        conv.drain(..c.min(conv.len()));
        if d.taps > 1 {
            conv.extend_from_slice(x);
        }
        if keep == Keep::Pending {
            tape.push((s.clone(), conv.clone()));
        }
    }
    match keep {
        Keep::Commit => (state.state, state.conv) = (s, conv),
        Keep::Pending => state.tape = tape,
    }
    let out = Tensor::from_vec(out, (rows, d.value_heads, d.value_dim), qkv_device(params))?;
    Ok(out.to_dtype(dtype)?)
}

fn qkv_device(params: &GatedDeltaParams) -> &Device {
    params.conv.device()
}
