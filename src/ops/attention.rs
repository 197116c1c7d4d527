//! Grouped-query attention of packed rows over a key/value cache, causal by order in the cache.

use candle_core::{DType, Tensor};

use super::{check, Context};
use crate::error::{Error, Result};

const OP: &str = "attention";

/// Attention of one sequence's rows. `q` is `[rows, heads, head_dim]`; `k` and `v` are `[kv_heads, capacity, head_dim]`
/// caches whose first `len` slots are filled, the last `rows` of them by these very rows: row `r` sees slots
/// `0 ..= len - rows + r`. Query head `h` reads key head `h / (heads / kv_heads)`. All of one dtype (f32, bf16 or f16),
/// which the result `[rows, heads, head_dim]` has too. Sums and the softmax are f32.
pub fn attention(
    cx: &Context,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    len: usize,
    scale: f32,
) -> Result<Tensor> {
    let dtype = checked(q, k, len)?;
    check::dtype(OP, "v", v, dtype)?;
    let shape: Vec<_> = k.dims().iter().map(|d| Some(*d)).collect();
    check::shape(OP, "v", v, &shape)?;
    if q.dim(0)? > len {
        return Err(Error::argument(
            OP,
            format!("{} rows, but only {len} filled slots", q.dim(0)?),
        ));
    }
    cx.routes().count(OP, "reference", dtype);
    reference(q, k, v, len, scale)
}

/// Softmax of `q · k` over the first `len` slots, without a causal mask: `[heads, rows, len]` f32. SpecPrefill scores
/// a prompt's tokens with it.
pub fn attention_probabilities(
    cx: &Context,
    q: &Tensor,
    k: &Tensor,
    len: usize,
    scale: f32,
) -> Result<Tensor> {
    let dtype = checked(q, k, len)?;
    cx.routes()
        .count("attention_probabilities", "reference", dtype);
    let scores = scores(q, k, len, scale)?;
    Ok(candle_nn::ops::softmax_last_dim(&scores)?)
}

fn checked(q: &Tensor, k: &Tensor, len: usize) -> Result<DType> {
    let dtype = check::activation(OP, "q", q)?;
    check::dtype(OP, "k", k, dtype)?;
    check::shape(OP, "q", q, &[None; 3])?;
    let (_, heads, dim) = q.dims3()?;
    check::shape(OP, "k", k, &[None, None, Some(dim)])?;
    let (kv_heads, capacity, _) = k.dims3()?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(Error::argument(
            OP,
            format!("{heads} query heads cannot share {kv_heads} key heads"),
        ));
    }
    if len > capacity {
        return Err(Error::argument(
            OP,
            format!("{len} slots asked for, the cache holds {capacity}"),
        ));
    }
    Ok(dtype)
}

fn scores(q: &Tensor, k: &Tensor, len: usize, scale: f32) -> Result<Tensor> {
    let (rows, heads, dim) = q.dims3()?;
    let kv_heads = k.dim(0)?;
    let group = heads / kv_heads;
    let q = q
        .to_dtype(DType::F32)?
        .reshape((rows, kv_heads, group, dim))?
        .permute((1, 2, 0, 3))?;
    let q = q.contiguous()?.reshape((kv_heads, group * rows, dim))?;
    let k = k.narrow(1, 0, len)?.to_dtype(DType::F32)?.contiguous()?;
    Ok(
        (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * scale as f64)?
            .reshape((heads, rows, len))?,
    )
}

/// The oracle of [`attention`].
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, len: usize, scale: f32) -> Result<Tensor> {
    let (rows, heads, dim) = q.dims3()?;
    let kv_heads = k.dim(0)?;
    let hidden = |r: usize, s: usize| {
        if s > len - rows + r {
            f32::NEG_INFINITY
        } else {
            0.0
        }
    };
    let mask: Vec<f32> = (0..rows)
        .flat_map(|r| (0..len).map(move |s| hidden(r, s)))
        .collect();
    let mask = Tensor::from_vec(mask, (1, rows, len), q.device())?;
    let scores = scores(q, k, len, scale)?.broadcast_add(&mask)?;
    let p = candle_nn::ops::softmax_last_dim(&scores)?.reshape((
        kv_heads,
        heads / kv_heads * rows,
        len,
    ))?;
    let v = v.narrow(1, 0, len)?.to_dtype(DType::F32)?.contiguous()?;
    let out = p
        .matmul(&v)?
        .reshape((heads, rows, dim))?
        .transpose(0, 1)?
        .contiguous()?;
    Ok(out.to_dtype(q.dtype())?)
}
