//! Grouped-query attention of packed rows over a key/value cache, causal by order in the cache.

mod cpu;
mod metal;

use candle_core::{DType, Device, Tensor};

use super::cpu::{for_element, to_f32, with_slice, Element};
use super::launch::{self, Operand};
use super::{check, Context};
use crate::error::{Error, Result};

const OP: &str = "attention";

/// Attention of one sequence's rows. `q` is `[rows, heads, head_dim]`; `k` and `v` are `[kv_heads, capacity, head_dim]`
/// caches whose first `len` slots are filled, the last `rows` of them by these very rows: row `r` sees slots
/// `0 ..= len - rows + r`. Query head `h` reads key head `h / (heads / kv_heads)`. All of one dtype (f32, bf16 or f16),
/// which the result `[rows, heads, head_dim]` has too. Sums and the softmax are f32; memory is linear in `len`.
pub fn attention(
    cx: &Context,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    len: usize,
    scale: f32,
) -> Result<Tensor> {
    let (dtype, dims) = checked(q, k, len, scale)?;
    check::dtype(OP, "v", v, dtype)?;
    let shape: Vec<_> = k.dims().iter().map(|d| Some(*d)).collect();
    check::shape(OP, "v", v, &shape)?;
    if dims.rows > len {
        let what = format!("{} rows, but only {len} filled slots", dims.rows);
        return Err(Error::argument(OP, what));
    }
    if launch::wanted(cx, q) {
        cx.routes().count(OP, metal::route(dims.rows), dtype);
        let (q, k, v) = (dense(q)?, dense(k)?, dense(v)?);
        let of = |x: &Tensor| Operand::of(OP, x);
        let plan = metal::plan(dims, &of(&q)?, &of(&k)?, &of(&v)?)?;
        return launch::run_one(cx, &plan, &[&q, &k, &v]);
    }
    cx.routes().count(OP, "cpu", dtype);
    for_element!(dtype, on_cpu(q, k, v, dims))
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
    let (dtype, dims) = checked(q, k, len, scale)?;
    if launch::wanted(cx, q) && len > 0 {
        cx.routes().count("attention_probabilities", "metal", dtype);
        let (q, k) = (dense(q)?, dense(k)?);
        let plan = metal::probabilities(dims, &Operand::of(OP, &q)?, &Operand::of(OP, &k)?)?;
        return launch::run_one(cx, &plan, &[&q, &k]);
    }
    cx.routes().count("attention_probabilities", "cpu", dtype);
    for_element!(dtype, probabilities_on_cpu(q, k, dims))
}

/// With a head's lanes side by side, as the Metal kernels read them.
fn dense(x: &Tensor) -> Result<Tensor> {
    Ok(match x.stride()[2] {
        1 => x.clone(),
        _ => x.contiguous()?,
    })
}

fn checked(q: &Tensor, k: &Tensor, len: usize, scale: f32) -> Result<(DType, cpu::Dims)> {
    let dtype = check::activation(OP, "q", q)?;
    check::dtype(OP, "k", k, dtype)?;
    check::shape(OP, "q", q, &[None; 3])?;
    let (rows, heads, dim) = q.dims3()?;
    check::shape(OP, "k", k, &[None, None, Some(dim)])?;
    let (kv_heads, capacity, _) = k.dims3()?;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let what = format!("{heads} query heads cannot share {kv_heads} key heads");
        return Err(Error::argument(OP, what));
    }
    if len > capacity {
        let what = format!("{len} slots asked for, the cache holds {capacity}");
        return Err(Error::argument(OP, what));
    }
    let dims = cpu::Dims {
        rows,
        heads,
        kv_heads,
        dim,
        capacity,
        len,
        scale,
    };
    Ok((dtype, dims))
}

fn on_cpu<T: Element>(q: &Tensor, k: &Tensor, v: &Tensor, d: cpu::Dims) -> Result<Tensor> {
    if q.elem_count() == 0 {
        return Ok(q.clone());
    }
    let queries = to_f32::<T>(OP, q)?;
    let out = with_slice::<T, _>(OP, k, |k| {
        with_slice::<T, _>(OP, v, |v| Ok(cpu::attention(&queries, k, v, d)))
    })?;
    Ok(Tensor::from_vec(
        out,
        (d.rows, d.heads, d.dim),
        &Device::Cpu,
    )?)
}

fn probabilities_on_cpu<T: Element>(q: &Tensor, k: &Tensor, d: cpu::Dims) -> Result<Tensor> {
    let shape = (d.heads, d.rows, d.len);
    if q.elem_count() == 0 || d.len == 0 {
        return Ok(Tensor::zeros(shape, DType::F32, q.device())?);
    }
    let queries = to_f32::<T>(OP, q)?;
    let out = with_slice::<T, _>(OP, k, |k| Ok(cpu::probabilities(&queries, k, d)))?;
    Ok(Tensor::from_vec(out, shape, &Device::Cpu)?)
}

fn scores(q: &Tensor, k: &Tensor, len: usize, scale: f32) -> Result<Tensor> {
    let (rows, heads, dim) = q.dims3()?;
    let kv_heads = k.dim(0)?;
    let group = heads / kv_heads;
    let q = q.to_dtype(DType::F32)?;
    let q = q
        .reshape((rows, kv_heads, group, dim))?
        .permute((1, 2, 0, 3))?;
    let q = q.contiguous()?.reshape((kv_heads, group * rows, dim))?;
    let k = k.narrow(1, 0, len)?.to_dtype(DType::F32)?;
    let k = k.transpose(1, 2)?.contiguous()?;
    Ok((q.matmul(&k)? * scale as f64)?.reshape((heads, rows, len))?)
}

/// The oracle of [`attention_probabilities`], in tensor ops.
pub fn reference_probabilities(q: &Tensor, k: &Tensor, len: usize, scale: f32) -> Result<Tensor> {
    Ok(candle_nn::ops::softmax_last_dim(&scores(
        q, k, len, scale,
    )?)?)
}

/// The oracle of [`attention`], in tensor ops.
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, len: usize, scale: f32) -> Result<Tensor> {
    let (rows, heads, dim) = q.dims3()?;
    let kv_heads = k.dim(0)?;
    let hidden = |r: usize, s: usize| match s > len - rows + r {
        true => f32::NEG_INFINITY,
        false => 0.0,
    };
    let mask = (0..rows).flat_map(|r| (0..len).map(move |s| hidden(r, s)));
    let mask = Tensor::from_vec(mask.collect::<Vec<f32>>(), (1, rows, len), q.device())?;
    let scores = scores(q, k, len, scale)?.broadcast_add(&mask)?;
    let p = candle_nn::ops::softmax_last_dim(&scores)?;
    let p = p.reshape((kv_heads, heads / kv_heads * rows, len))?;
    let v = v.narrow(1, 0, len)?.to_dtype(DType::F32)?.contiguous()?;
    let out = p.matmul(&v)?.reshape((heads, rows, dim))?;
    Ok(out.transpose(0, 1)?.contiguous()?.to_dtype(q.dtype())?)
}
