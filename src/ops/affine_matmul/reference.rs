//! The contract of the op, spelled out one element at a time.

use candle_core::{Device, Tensor};

use super::packed::{Affine, Dense};
use super::{run, Storage, Weight};
use crate::error::Result;

/// The oracle of [`matmul`](super::matmul), bitwise on the CPU. Affine weights: each group of `x` becomes integers `q` (16 bits
/// for bf16 and f16, 24 for f32) times a power-of-two step; per group, in order,
/// `y = fma(bias, f32(Σq) * step, fma(scale, f32(Σ code * q) * step, y))`, where 24-bit sums are made of
/// `fma(f32(Σ code * (q >> 8)), 256, f32(Σ code * (q & 255)))`. Rows with NaN or Inf are summed in f64. Plain weights: see
/// [`matmul`](super::matmul).
pub fn reference(x: &Tensor, weight: &Weight) -> Result<Tensor> {
    let rows = x.dim(0)?;
    let (n, k) = (weight.n(), weight.k());
    let mut out = Vec::with_capacity(rows * n);
    match &weight.storage {
        Storage::Affine(w) => {
            let bits = if x.dtype() == candle_core::DType::F32 {
                23
            } else {
                15
            };
            for row in run::values(x)?.chunks_exact(k.max(1)) {
                out.extend((0..n).map(|n| affine(w, n, row, bits)));
            }
        }
        Storage::Dense(w) => {
            for row in run::values(x)?.chunks_exact(k.max(1)) {
                out.extend((0..n).map(|n| dense(w, n, row)));
            }
        }
        Storage::Device(w) => {
            let all: Vec<u32> = (0..n as u32).collect();
            let w = w.rows(&all)?.to_device(x.device())?;
            return super::device_matmul(x, &w);
        }
    }
    Ok(Tensor::from_vec(out, (rows, n), &Device::Cpu)?.to_dtype(x.dtype())?)
}

fn affine(w: &Affine, n: usize, x: &[f32], bits: i32) -> f32 {
    if x.iter().any(|v| !v.is_finite()) {
        return w
            .row(n)
            .zip(x)
            .map(|(w, x)| w as f64 * *x as f64)
            .sum::<f64>() as f32;
    }
    let size = w.format.group_size;
    let mut y = 0f32;
    for (g, x) in x.chunks_exact(size).enumerate() {
        let largest = x.iter().fold(0f32, |m, v| m.max(v.abs())) as f64;
        let mut step = 2f64.powi(-126);
        while largest >= step * 2f64.powi(bits) {
            step *= 2.0;
        }
        let limit = 2f64.powi(bits) - 1.0;
        let q: Vec<i64> = x
            .iter()
            .map(|v| (*v as f64 / step).round_ties_even().clamp(-limit, limit) as i64)
            .collect();
        let dot = |f: fn(i64) -> i64| -> f32 {
            let codes = (0..size).map(|i| w.code(n, g * size + i) as i64);
            codes.zip(&q).map(|(c, q)| c * f(*q)).sum::<i64>() as f32
        };
        let codes_x = match bits {
            15 => dot(|q| q),
            _ => dot(|q| q >> 8).mul_add(256.0, dot(|q| q & 255)),
        };
        let (scale, bias) = w.scale_bias(n, g);
        let sum = q.iter().sum::<i64>() as f32 * step as f32;
        y = bias.mul_add(sum, scale.mul_add(codes_x * step as f32, y));
    }
    y
}

fn dense(w: &Dense, n: usize, x: &[f32]) -> f32 {
    let mut y = 0f32;
    let row: Vec<f32> = w.row(n).collect();
    for (w, x) in row.chunks(64).zip(x.chunks(64)) {
        let mut sums = [0f32; 2];
        for (k, (w, x)) in w.iter().zip(x).enumerate() {
            sums[k % 2] = w.mul_add(*x, sums[k % 2]);
        }
        y += sums[0] + sums[1];
    }
    y
}
