//! `y = x · Wᵀ` for MLX affine and for plain weights: one pass over the weights for all rows, every row exact.

use candle_core::{DType, Device, Tensor, D};

use super::{check, Context};
use crate::affine::{self, AffineFormat};
use crate::error::{Error, Result};

const OP: &str = "affine_matmul";

/// A linear layer's weight `[n, k]`, prepared once for the kernels.
#[derive(Clone, Debug)]
pub struct Weight {
    n: usize,
    k: usize,
    format: Option<AffineFormat>,
    dense: Tensor,
}

impl Weight {
    /// From codes `[n, k*bits/32]` (u32), scales and biases `[n, k/group_size]` (f32, bf16 or f16).
    pub fn affine(
        codes: &Tensor,
        scales: &Tensor,
        biases: &Tensor,
        format: AffineFormat,
        device: &Device,
    ) -> Result<Self> {
        check::dtype(OP, "codes", codes, DType::U32)?;
        let (n, groups) = scales.dims2()?;
        let k = groups * format.group_size;
        check::shape(OP, "codes", codes, &[Some(n), Some(k * format.bits / 32)])?;
        check::shape(OP, "biases", biases, &[Some(n), Some(groups)])?;
        let dense = affine::dequantize(codes, scales, biases, format)?.to_device(device)?;
        Ok(Self {
            n,
            k,
            format: Some(format),
            dense,
        })
    }

    /// From a plain weight `[n, k]` (f32, bf16 or f16).
    pub fn dense(weight: &Tensor, device: &Device) -> Result<Self> {
        check::activation(OP, "weight", weight)?;
        let (n, k) = weight.dims2()?;
        Ok(Self {
            n,
            k,
            format: None,
            dense: weight.to_dtype(DType::F32)?.to_device(device)?,
        })
    }

    /// Columns of the output.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns of the input.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How the weight is quantized; `None` when it is plain.
    pub fn format(&self) -> Option<AffineFormat> {
        self.format
    }

    /// Bytes that the prepared weight holds.
    pub fn size_bytes(&self) -> usize {
        self.dense.elem_count() * 4
    }

    /// Rows of the weight as embeddings `[ids.len(), k]` of `dtype`. An id past the last row is an error.
    pub fn embed(&self, ids: &[u32], dtype: DType) -> Result<Tensor> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.n) {
            return Err(Error::Prompt(format!(
                "token {id} is outside the vocabulary of {}",
                self.n
            )));
        }
        let ids = Tensor::new(ids, self.dense.device())?;
        Ok(self.dense.index_select(&ids, 0)?.to_dtype(dtype)?)
    }
}

/// `x · Wᵀ` for `x` of `[rows, k]` (f32, bf16 or f16), in `x`'s dtype.
pub fn matmul(cx: &Context, x: &Tensor, weight: &Weight) -> Result<Tensor> {
    let dtype = check::activation(OP, "x", x)?;
    check::shape(OP, "x", x, &[None, Some(weight.k)])?;
    cx.routes().count(OP, "reference", dtype);
    reference(x, weight)
}

/// Several projections of one `x`: bitwise what [`matmul`] gives for each.
pub fn matmul_grouped(cx: &Context, x: &Tensor, weights: &[&Weight]) -> Result<Vec<Tensor>> {
    weights.iter().map(|w| matmul(cx, x, w)).collect()
}

/// `silu(x · Gᵀ) * (x · Uᵀ)`: bitwise the unfused form (both products rounded to `x`'s dtype, then f32 inside, rounded once).
pub fn gate_up_silu(cx: &Context, x: &Tensor, gate: &Weight, up: &Weight) -> Result<Tensor> {
    let g = matmul(cx, x, gate)?.to_dtype(DType::F32)?;
    let u = matmul(cx, x, up)?.to_dtype(DType::F32)?;
    Ok((g.silu()? * u)?.to_dtype(x.dtype())?)
}

/// The oracle of [`matmul`]: f32 products of the dequantized weight.
pub fn reference(x: &Tensor, weight: &Weight) -> Result<Tensor> {
    let rows = x.dim(0)?;
    let w = weight.dense.t()?;
    let row = |r| -> Result<Tensor> { Ok(x.narrow(0, r, 1)?.to_dtype(DType::F32)?.matmul(&w)?) };
    let rows = (0..rows).map(row).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(&rows, D::Minus2)?.to_dtype(x.dtype())?)
}
