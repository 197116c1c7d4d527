//! `y = x · Wᵀ` for MLX affine and for plain weights: one pass over the weights for all rows, every row exact.
//!
//! On the CPU, rows become fixed point per group of `group_size` (a power-of-two step; 16 bits for bf16 and f16 rows, 23
//! for f32 rows), products with codes are summed exactly in integers, and scales and biases are applied in f32 in one fixed
//! order. So a row's bits depend neither on other rows, nor on the number of threads, nor on the instruction set. A row
//! with a NaN or an infinity is summed in plain f32, by itself.

mod cpu;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::cpu::{for_element, with_slice, Element};
use super::{check, Context};
use crate::affine::AffineFormat;
use crate::error::{Error, Result};
use cpu::packed::Packed;
use cpu::rows::FixedRows;

const OP: &str = "affine_matmul";

#[derive(Clone, Debug)]
enum Form {
    Affine(Arc<Packed>),
    Dense(Tensor),
}

/// A linear layer's weight `[n, k]`, prepared once for the kernels: quantized weights stay quantized.
#[derive(Clone, Debug)]
pub struct Weight {
    n: usize,
    k: usize,
    form: Form,
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
        on_cpu(device)?;
        check::dtype(OP, "codes", codes, DType::U32)?;
        check::activation(OP, "scales", scales)?;
        check::dtype(OP, "biases", biases, scales.dtype())?;
        check::shape(OP, "scales", scales, &[None, None])?;
        let (n, groups) = scales.dims2()?;
        let k = groups * format.group_size;
        check::shape(OP, "codes", codes, &[Some(n), Some(k * format.bits / 32)])?;
        check::shape(OP, "biases", biases, &[Some(n), Some(groups)])?;
        not_empty(n, k)?;
        let constants = |t: &Tensor| -> Result<Vec<f32>> {
            let values: Vec<f32> = t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            match values.iter().find(|v| !v.is_finite()) {
                Some(bad) => Err(Error::argument(OP, format!("a scale or bias is {bad}"))),
                None => Ok(values),
            }
        };
        let (s, b) = (constants(scales)?, constants(biases)?);
        let exact_bf16 = scales.dtype() == DType::BF16;
        let packed = with_slice::<u32, _>(OP, codes, |rows| {
            Ok(Packed::new(rows, &s, &b, n, k, format, exact_bf16))
        })?;
        let form = Form::Affine(Arc::new(packed));
        Ok(Self { n, k, form })
    }

    /// From a plain weight `[n, k]` (f32, bf16 or f16), kept in its dtype.
    pub fn dense(weight: &Tensor, device: &Device) -> Result<Self> {
        on_cpu(device)?;
        check::activation(OP, "weight", weight)?;
        check::shape(OP, "weight", weight, &[None, None])?;
        let (n, k) = weight.dims2()?;
        not_empty(n, k)?;
        let form = Form::Dense(weight.contiguous()?);
        Ok(Self { n, k, form })
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
        match &self.form {
            Form::Affine(packed) => Some(packed.format),
            Form::Dense(_) => None,
        }
    }

    /// Bytes that the prepared weight holds, which a pass reads once.
    pub fn size_bytes(&self) -> usize {
        match &self.form {
            Form::Affine(packed) => packed.size_bytes(),
            Form::Dense(w) => w.elem_count() * w.dtype().size_in_bytes(),
        }
    }

    /// Rows of the weight as embeddings `[ids.len(), k]` of `dtype`. An id past the last row is an error.
    pub fn embed(&self, ids: &[u32], dtype: DType) -> Result<Tensor> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.n) {
            let what = format!("token id {id} is outside the vocabulary of {}", self.n);
            return Err(Error::Prompt(what));
        }
        match &self.form {
            Form::Affine(packed) => {
                let mut rows = vec![0f32; ids.len() * self.k];
                for (id, row) in ids.iter().zip(rows.chunks_exact_mut(self.k)) {
                    packed.column(*id as usize, row);
                }
                Ok(Tensor::from_vec(rows, (ids.len(), self.k), &Device::Cpu)?.to_dtype(dtype)?)
            }
            Form::Dense(w) => {
                let ids = Tensor::new(ids, w.device())?;
                Ok(w.index_select(&ids, 0)?.to_dtype(dtype)?)
            }
        }
    }

    /// The weight as f32 `[n, k]`, for oracles.
    pub fn dequantize(&self) -> Result<Tensor> {
        match &self.form {
            Form::Affine(_) => {
                let ids: Vec<u32> = (0..self.n as u32).collect();
                self.embed(&ids, DType::F32)
            }
            Form::Dense(w) => Ok(w.to_dtype(DType::F32)?),
        }
    }
}

fn on_cpu(device: &Device) -> Result<()> {
    match device {
        Device::Cpu => Ok(()),
        other => {
            let what = format!("device {other:?} is not supported by this build: use the CPU");
            Err(Error::argument(OP, what))
        }
    }
}

fn not_empty(n: usize, k: usize) -> Result<()> {
    match n * k {
        0 => Err(Error::argument(OP, format!("a [{n}, {k}] weight is empty"))),
        _ => Ok(()),
    }
}

/// `x · Wᵀ` for `x` of `[rows, k]` (f32, bf16 or f16), in `x`'s dtype.
pub fn matmul(cx: &Context, x: &Tensor, weight: &Weight) -> Result<Tensor> {
    let mut out = matmul_grouped(cx, x, &[weight])?;
    Ok(out.remove(0))
}

/// Several projections of one `x`: bitwise what [`matmul`] gives for each, with the rows prepared once.
pub fn matmul_grouped(cx: &Context, x: &Tensor, weights: &[&Weight]) -> Result<Vec<Tensor>> {
    let dtype = check::activation(OP, "x", x)?;
    for weight in weights {
        check::shape(OP, "x", x, &[None, Some(weight.k)])?;
        cx.routes().count(OP, route(weight), dtype);
    }
    for_element!(dtype, run(x, weights))
}

/// `silu(x · Gᵀ) * (x · Uᵀ)`: bitwise the unfused form (both products rounded to `x`'s dtype, then f32, rounded once).
pub fn gate_up_silu(cx: &Context, x: &Tensor, gate: &Weight, up: &Weight) -> Result<Tensor> {
    if gate.n != up.n {
        let what = format!("gate has {} columns, up has {}", gate.n, up.n);
        return Err(Error::argument(OP, what));
    }
    let products = matmul_grouped(cx, x, &[gate, up])?;
    for_element!(x.dtype(), silu_mul(&products[0], &products[1]))
}

fn silu_mul<T: Element>(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let silu = |g: f32| g / (1.0 + super::cpu::exp(-g));
    let out: Vec<T> = with_slice::<T, _>(OP, gate, |gate| {
        with_slice::<T, _>(OP, up, |up| {
            let pairs = gate.iter().zip(up);
            Ok(pairs
                .map(|(g, u)| T::round(silu(g.f32()) * u.f32()))
                .collect())
        })
    })?;
    Ok(Tensor::from_vec(out, gate.shape(), &Device::Cpu)?)
}

fn route(weight: &Weight) -> &'static str {
    match weight.format().map(|f| f.bits) {
        None => "cpu_dense",
        Some(2) => "cpu_fixed_b2",
        Some(3) => "cpu_fixed_b3",
        Some(4) => "cpu_fixed_b4",
        Some(5) => "cpu_fixed_b5",
        Some(6) => "cpu_fixed_b6",
        Some(_) => "cpu_fixed_b8",
    }
}

fn run<T: Element>(x: &Tensor, weights: &[&Weight]) -> Result<Vec<Tensor>> {
    let rows = x.dim(0)?;
    let wide = x.dtype() == DType::F32;
    with_slice::<T, _>(OP, x, |x| {
        let mut prepared: Vec<FixedRows> = vec![];
        let mut outs = Vec::with_capacity(weights.len());
        for w in weights {
            let out: Vec<T> = match &w.form {
                Form::Affine(packed) => {
                    let group = packed.format.group_size;
                    let at = match prepared.iter().position(|p| p.group == group) {
                        Some(at) => at,
                        None => {
                            prepared.push(FixedRows::new(x, w.k, group, wide));
                            prepared.len() - 1
                        }
                    };
                    cpu::matmul(x, &prepared[at], packed)
                }
                Form::Dense(weight) => {
                    let x: Vec<f32> = x.iter().map(|v| v.f32()).collect();
                    match weight.dtype() {
                        DType::BF16 => dense::<half::bf16, T>(&x, weight, w)?,
                        DType::F16 => dense::<half::f16, T>(&x, weight, w)?,
                        _ => dense::<f32, T>(&x, weight, w)?,
                    }
                }
            };
            outs.push(Tensor::from_vec(out, (rows, w.n), &Device::Cpu)?);
        }
        Ok(outs)
    })
}

// `for_element!` names one type; the output's is inferred.
fn dense<W: Element, T: Element>(x: &[f32], weight: &Tensor, w: &Weight) -> Result<Vec<T>> {
    with_slice::<W, _>(OP, weight, |weight| {
        Ok(cpu::dense::matmul::<W, T>(x, weight, w.n, w.k))
    })
}

/// The oracle of [`matmul`]: products of the dequantized weight in f32.
pub fn reference(x: &Tensor, weight: &Weight) -> Result<Tensor> {
    let w = weight.dequantize()?.t()?;
    Ok(x.to_dtype(DType::F32)?.matmul(&w)?.to_dtype(x.dtype())?)
}
