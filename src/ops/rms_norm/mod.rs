//! Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467), plain and gated with SiLU.

mod metal;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Layout, Shape, Tensor, D};
use rayon::prelude::*;

use super::cpu::{contiguous, for_element, to_f32, Element};
use super::launch::{self, Operand};
use super::vector::{self, Kernel};
use super::{check, Context};
use crate::error::Result;

const OP: &str = "rms_norm";

/// Below this many elements a call runs on the calling thread.
const PARALLEL: usize = 1 << 15;

/// `x * rsqrt(mean(x^2) + eps) * weight` over the last dimension of `x` (f32, bf16 or f16); `weight` is f32 of that size.
/// Computed in f32, rounded once to `x`'s dtype. Zero-centred weights are loaded as `1 + w`.
pub fn rms_norm(cx: &Context, x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let dtype = checked(x, weight)?;
    if launch::wanted(cx, x) {
        cx.routes().count(OP, "metal", dtype);
        return on_metal(cx, x, None, weight, eps);
    }
    cx.routes().count(OP, "cpu", dtype);
    let op = RmsNorm::new(weight, eps)?;
    Ok(x.contiguous()?.apply_op1_no_bwd(&op)?)
}

/// `rms_norm(x) * silu(z)`: the gated form that follows the delta rule. `z` has `x`'s shape and dtype. f32 inside.
pub fn rms_norm_gated(
    cx: &Context,
    x: &Tensor,
    z: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let dtype = checked(x, weight)?;
    check::dtype(OP, "z", z, dtype)?;
    let shape: Vec<_> = x.dims().iter().map(|d| Some(*d)).collect();
    check::shape(OP, "z", z, &shape)?;
    if launch::wanted(cx, x) {
        cx.routes().count(OP, "gated/metal", dtype);
        return on_metal(cx, x, Some(z), weight, eps);
    }
    cx.routes().count(OP, "gated_cpu", dtype);
    let op = RmsNorm::new(weight, eps)?;
    let (x, z) = (x.contiguous()?, z.contiguous()?);
    Ok(x.apply_op2_no_bwd(&z, &op)?)
}

fn on_metal(
    cx: &Context,
    x: &Tensor,
    z: Option<&Tensor>,
    weight: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let weight = weight.contiguous()?;
    let of = |t: &Tensor| Operand::of(OP, t);
    let followed = Operand::common_rows(&of(x)?, &of(z.unwrap_or(x))?).is_some();
    let (x, z) = match followed {
        true => (x.clone(), z.cloned()),
        false => (x.contiguous()?, z.map(|z| z.contiguous()).transpose()?),
    };
    let z_operand = z.as_ref().map(of).transpose()?;
    let plan = metal::plan(&of(&x)?, &of(&weight)?, z_operand.as_ref(), eps as f32)?;
    let operands: Vec<&Tensor> = [&x, &weight].into_iter().chain(&z).collect();
    launch::run_one(cx, &plan, &operands)
}

fn checked(x: &Tensor, weight: &Tensor) -> Result<DType> {
    let dtype = check::activation(OP, "x", x)?;
    check::dtype(OP, "weight", weight, DType::F32)?;
    check::shape(OP, "weight", weight, &[Some(x.dim(D::Minus1)?)])?;
    Ok(dtype)
}

struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    fn new(weight: &Tensor, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: to_f32::<f32>(OP, weight)?,
            eps: eps as f32,
        })
    }

    fn on_cpu<T: Element>(&self, x: &[T], z: Option<&[T]>) -> Vec<T> {
        let width = self.weight.len();
        let mut out = vec![T::round(0.0); x.len()];
        if width == 0 {
            return out;
        }
        let row = |(r, out): (usize, &mut [T])| {
            vector::run(Row {
                norm: self,
                x: &x[r * width..][..width],
                z: z.map(|z| &z[r * width..][..width]),
                out,
            })
        };
        if x.len() < PARALLEL {
            out.chunks_mut(width).enumerate().for_each(row);
        } else {
            out.par_chunks_mut(width).enumerate().for_each(row);
        }
        out
    }
}

/// One row: its bits depend on nothing else.
struct Row<'a, T> {
    norm: &'a RmsNorm,
    x: &'a [T],
    z: Option<&'a [T]>,
    out: &'a mut [T],
}

impl<T: Element> Kernel for Row<'_, T> {
    #[inline(always)]
    fn call(self) {
        let weight = &self.norm.weight;
        let mut lanes = [0f32; 16];
        for x in self.x.chunks(16) {
            for (lane, x) in lanes.iter_mut().zip(x) {
                *lane = x.f32().mul_add(x.f32(), *lane);
            }
        }
        let mean = vector::sum16(lanes) / self.x.len() as f32;
        let scale = 1.0 / (mean + self.norm.eps).sqrt();
        let scaled = self.x.iter().zip(weight).map(|(x, w)| x.f32() * scale * w);
        match self.z {
            None => {
                for (o, y) in self.out.iter_mut().zip(scaled) {
                    *o = T::round(y);
                }
            }
            Some(z) => {
                for ((o, y), z) in self.out.iter_mut().zip(scaled).zip(z) {
                    *o = T::round(y * vector::silu(z.f32()));
                }
            }
        }
    }
}

impl CustomOp1 for RmsNorm {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            op: &RmsNorm,
            x: &CpuStorage,
            layout: &Layout,
        ) -> candle_core::Result<CpuStorage> {
            let out = op.on_cpu(contiguous::<T>(x, layout)?, None);
            Ok(T::to_cpu_storage_owned(out))
        }
        let out = for_element!(x.dtype(), run(self, x, layout))?;
        Ok((out, layout.shape().clone()))
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm_gated"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        z: &CpuStorage,
        z_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            op: &RmsNorm,
            (x, x_layout): (&CpuStorage, &Layout),
            (z, z_layout): (&CpuStorage, &Layout),
        ) -> candle_core::Result<CpuStorage> {
            let z = contiguous::<T>(z, z_layout)?;
            let out = op.on_cpu(contiguous::<T>(x, x_layout)?, Some(z));
            Ok(T::to_cpu_storage_owned(out))
        }
        let out = for_element!(x.dtype(), run(self, (x, x_layout), (z, z_layout)))?;
        Ok((out, x_layout.shape().clone()))
    }
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
