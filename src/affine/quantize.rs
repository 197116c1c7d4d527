//! Quantizing to the affine format, with MLX's own arithmetic so that codes, scales and biases are MLX's to the bit.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::{AffineFormat, OP};
use crate::error::{Error, Result};

/// A weight in the affine format.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// `[n, k*bits/32]` u32.
    pub codes: Tensor,
    /// `[n, k/group_size]` in the weight's dtype.
    pub scales: Tensor,
    /// `[n, k/group_size]` in the weight's dtype.
    pub biases: Tensor,
}

/// Quantizes `weight` `[n, k]` (f32, bf16 or f16; `k` a multiple of the group size). A value that is not finite is an error.
pub fn quantize(weight: &Tensor, format: AffineFormat) -> Result<Quantized> {
    let format = AffineFormat::new(format.bits, format.group_size)?;
    let AffineFormat { bits, group_size } = format;
    let dtype = weight.dtype();
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        return Err(Error::DType {
            op: OP,
            name: "weight",
            found: dtype,
            expected: "f32, bf16 or f16".into(),
        });
    }
    let (n, k) = weight.dims2()?;
    if !k.is_multiple_of(group_size) {
        return Err(Error::argument(
            OP,
            format!("rows of {k} do not divide into groups of {group_size}: take another group size or leave the weight plain"),
        ));
    }
    let values = weight
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        return Err(Error::argument(
            OP,
            format!("weight [{}, {}] is {}", at / k, at % k, values[at]),
        ));
    }
    let (groups, group_words) = (k / group_size, group_size * bits / 32);
    let mut words = vec![0u32; n * groups * group_words];
    let floats: Vec<(f32, f32)> = values
        .par_chunks_exact(group_size)
        .zip(words.par_chunks_exact_mut(group_words))
        .map(|(values, words)| quantize_group(values, words, bits))
        .collect();
    let (scales, biases): (Vec<f32>, Vec<f32>) = floats.into_iter().unzip();
    let device = weight.device();
    let float = |v: Vec<f32>| Tensor::from_vec(v, (n, groups), device)?.to_dtype(dtype);
    Ok(Quantized {
        codes: Tensor::from_vec(words, (n, groups * group_words), device)?,
        scales: float(scales)?,
        biases: float(biases)?,
    })
}

/// The end of larger magnitude lies exactly on a code, and so does zero, near enough.
fn quantize_group(values: &[f32], words: &mut [u32], bits: usize) -> (f32, f32) {
    let top = ((1u32 << bits) - 1) as f32;
    let fold = |f: fn(f32, f32) -> f32, start| values.iter().copied().fold(start, f);
    let (min, max) = (
        fold(f32::min, f32::INFINITY),
        fold(f32::max, f32::NEG_INFINITY),
    );
    let from_min = min.abs() > max.abs();
    let size = ((max - min) / top).max(1e-7);
    let (mut scale, edge) = if from_min { (size, min) } else { (-size, max) };
    let zero = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    if zero != 0.0 {
        scale = edge / zero;
        bias = edge;
    }
    for (i, v) in values.iter().enumerate() {
        let code = ((v - bias) / scale).round_ties_even().clamp(0.0, top) as u64;
        let (word, shift) = (i * bits / 32, i * bits % 32);
        let placed = code << shift;
        words[word] |= placed as u32;
        if placed >> 32 != 0 {
            words[word + 1] |= (placed >> 32) as u32;
        }
    }
    (scale, bias)
}
