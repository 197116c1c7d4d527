//! The MLX affine format: `w = scale * code + bias` per group along K, codes of 2, 3, 4, 5, 6 or 8 bits.
//!
//! A row of codes is a little-endian bit stream: code `i` occupies bits `[i*bits, (i+1)*bits)` counted from the low bit
//! of byte 0; the stored u32 words are that stream read little-endian. Scales may have either sign.

mod quantize;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

pub use quantize::{quantize, Quantized};

const OP: &str = "affine";

/// How a weight is quantized.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct AffineFormat {
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: usize,
    /// Codes that share a scale and a bias: 32, 64 or 128.
    pub group_size: usize,
}

impl AffineFormat {
    /// Checks bits and group size.
    pub fn new(bits: usize, group_size: usize) -> Result<Self> {
        if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) || !matches!(group_size, 32 | 64 | 128) {
            return Err(Error::argument(
                OP,
                format!("{bits} bits in groups of {group_size}: bits must be 2, 3, 4, 5, 6 or 8, groups 32, 64 or 128"),
            ));
        }
        Ok(Self { bits, group_size })
    }
}

/// Unpacks one row of `k` codes (of 1 to 8 bits) from its words; codes past their end are 0.
pub fn unpack_row(words: &[u32], bits: usize, k: usize) -> Vec<u8> {
    let bits = bits.clamp(1, 8);
    let mask = (1u64 << bits) - 1;
    let at = |word: usize| words.get(word).copied().unwrap_or(0) as u64;
    let code = |i: usize| {
        let (word, shift) = (i * bits / 32, i * bits % 32);
        let pair = at(word) | at(word + 1) << 32;
        (pair >> shift & mask) as u8
    };
    (0..k).map(code).collect()
}

/// The f32 weight `[n, k]` of codes `[n, k*bits/32]` (u32), scales and biases `[n, k/group_size]` (f32, bf16 or f16).
pub fn dequantize(
    codes: &Tensor,
    scales: &Tensor,
    biases: &Tensor,
    format: AffineFormat,
) -> Result<Tensor> {
    let format = AffineFormat::new(format.bits, format.group_size)?;
    let (n, groups) = scales.dims2()?;
    let k = groups * format.group_size;
    let expected = [
        ("codes", codes, [n, k * format.bits / 32]),
        ("biases", biases, [n, groups]),
    ];
    for (name, tensor, expected) in expected {
        if tensor.dims() != expected {
            return Err(Error::Shape {
                op: "dequantize",
                name,
                found: tensor.dims().to_vec(),
                expected: format!("{expected:?} by the scales"),
            });
        }
    }
    let words = codes.to_vec2::<u32>()?;
    let scales = scales.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let biases = biases.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let mut out = Vec::with_capacity(n * k);
    for ((words, scales), biases) in words.iter().zip(&scales).zip(&biases) {
        for (i, code) in unpack_row(words, format.bits, k).into_iter().enumerate() {
            let g = i / format.group_size;
            out.push(scales[g] * code as f32 + biases[g]);
        }
    }
    Ok(Tensor::from_vec(out, (n, k), codes.device())?)
}
