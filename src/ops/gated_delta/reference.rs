//! The oracle: one row, one head, one lane at a time, as the paper writes it.

use candle_core::{DType, Tensor};

use super::{GatedDeltaParams, GatedDeltaState};
use crate::error::Result;

/// The output, and the recurrent state and convolution inputs (as [`GatedDeltaState::recurrent`] and
/// [`GatedDeltaState::conv_inputs`] give them) after all rows.
pub fn reference(
    qkv: &Tensor,
    a: &Tensor,
    b: &Tensor,
    params: &GatedDeltaParams,
    state: &GatedDeltaState,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (d, dtype, rows) = (params.dims, qkv.dtype(), qkv.dim(0)?);
    let f =
        |t: &Tensor| -> Result<Vec<f32>> { Ok(t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?) };
    let (qkv, a, b) = (f(qkv)?, f(a)?, f(b)?);
    let (conv_w, a_log, dt_bias) = (f(&params.conv)?, f(&params.a_log)?, f(&params.dt_bias)?);
    let c = d.channels();
    let (mut s, mut conv) = (f(&state.recurrent()?)?, f(&state.conv_inputs()?)?);
    let mut out = vec![0f32; rows * d.value_heads * d.value_dim];
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
    }
    let device = params.conv.device();
    let out = Tensor::from_vec(out, (rows, d.value_heads, d.value_dim), device)?;
    Ok((
        out.to_dtype(dtype)?,
        Tensor::from_vec(s, (d.value_heads, d.key_dim, d.value_dim), device)?,
        Tensor::from_vec(conv, (d.taps - 1, c), device)?,
    ))
}
