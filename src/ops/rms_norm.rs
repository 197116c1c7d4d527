//! Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467), plain and gated with SiLU.

use candle_core::{DType, Tensor, D};

use super::{check, Context};
use crate::error::Result;

const OP: &str = "rms_norm";

/// `x * rsqrt(mean(x^2) + eps) * weight` over the last dimension of `x` (f32, bf16 or f16); `weight` is f32 of that size.
/// Computed in f32, rounded once to `x`'s dtype. Zero-centred weights are loaded as `1 + w`.
pub fn rms_norm(cx: &Context, x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let dtype = check::activation(OP, "x", x)?;
    check::dtype(OP, "weight", weight, DType::F32)?;
    check::shape(OP, "weight", weight, &[Some(x.dim(D::Minus1)?)])?;
    cx.routes().count(OP, "reference", dtype);
    reference(x, weight, eps)
}

/// `rms_norm(x) * silu(z)`: the gated form that follows the delta rule. `z` has `x`'s shape and dtype. f32 inside.
pub fn rms_norm_gated(
    cx: &Context,
    x: &Tensor,
    z: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let dtype = check::activation(OP, "x", x)?;
    check::dtype(OP, "z", z, dtype)?;
    check::dtype(OP, "weight", weight, DType::F32)?;
    check::shape(OP, "weight", weight, &[Some(x.dim(D::Minus1)?)])?;
    let shape: Vec<_> = x.dims().iter().map(|d| Some(*d)).collect();
    check::shape(OP, "z", z, &shape)?;
    cx.routes().count(OP, "gated_reference", dtype);
    reference_gated(x, z, weight, eps)
}

fn normalised(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let x = x.to_dtype(DType::F32)?;
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    Ok(x.broadcast_mul(&scale)?.broadcast_mul(weight)?)
}

/// The oracle of [`rms_norm`].
pub fn reference(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Ok(normalised(x, weight, eps)?.to_dtype(x.dtype())?)
}

/// The oracle of [`rms_norm_gated`].
pub fn reference_gated(x: &Tensor, z: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let gate = z.to_dtype(DType::F32)?.silu()?;
    Ok((normalised(x, weight, eps)? * gate)?.to_dtype(x.dtype())?)
}
