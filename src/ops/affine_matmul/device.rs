//! Weights as the Metal kernels read them: MLX's own layout, untouched, on the tensors' device.

use candle_core::{DType, Device, Tensor};

use super::packed::{Affine, Dense, Float};
use crate::affine::AffineFormat;
use crate::error::Result;
use crate::ops::memory;

/// A weight's tensors, contiguous.
#[derive(Clone, Debug)]
pub(super) enum OnDevice {
    /// Codes `[n, k*bits/32]`, scales and biases `[n, k/group_size]` of one dtype.
    Affine {
        codes: Tensor,
        scales: Tensor,
        biases: Tensor,
        format: AffineFormat,
    },
    /// `[n, k]` in its own dtype.
    Dense(Tensor),
}

impl OnDevice {
    pub(super) fn affine(
        codes: &Tensor,
        scales: &Tensor,
        biases: &Tensor,
        format: AffineFormat,
        device: &Device,
    ) -> Result<Self> {
        // Mixed dtypes are read as f32.
        let dtype = match scales.dtype() == biases.dtype() {
            true => scales.dtype(),
            false => DType::F32,
        };
        Ok(Self::Affine {
            codes: memory::place(codes, device)?,
            scales: memory::place(&scales.to_dtype(dtype)?, device)?,
            biases: memory::place(&biases.to_dtype(dtype)?, device)?,
            format,
        })
    }

    /// Affine weights of one shape and format, one below the other; `None` for others: the kernel of stacked experts takes no plain
    /// weights, and parts must start at multiples of 16 bytes.
    pub(super) fn stack(parts: &[&Self]) -> Result<Option<Self>> {
        let Some(Self::Affine { format, .. }) = parts.first() else {
            return Ok(None);
        };
        let alike = |a: &Tensor, b: &Tensor| {
            let bytes = a.elem_count() * a.dtype().size_in_bytes();
            a.dtype() == b.dtype() && a.dims() == b.dims() && bytes.is_multiple_of(16)
        };
        let first = parts[0].tensors();
        let fits = |part: &&Self| {
            let mut pairs = first.iter().zip(part.tensors());
            part.format() == Some(*format) && pairs.all(|(a, b)| alike(a, b))
        };
        if !parts.iter().all(fits) {
            return Ok(None);
        }
        let all = |i: usize| {
            let each: Vec<_> = parts.iter().map(|p| p.tensors()[i]).collect();
            memory::stack_rows(&each)
        };
        Ok(Some(Self::Affine {
            codes: all(0)?,
            scales: all(1)?,
            biases: all(2)?,
            format: *format,
        }))
    }

    /// The same of each tensor.
    fn map(&self, part: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Affine {
                codes,
                scales,
                biases,
                format,
            } => Self::Affine {
                codes: part(codes)?,
                scales: part(scales)?,
                biases: part(biases)?,
                format: *format,
            },
            Self::Dense(w) => Self::Dense(part(w)?),
        })
    }

    /// Rows `first..first + n`, which share this weight's memory.
    pub(super) fn narrow(&self, first: usize, n: usize) -> Result<Self> {
        self.map(|t| t.narrow(0, first, n))
    }

    pub(super) fn dense(weight: &Tensor, device: &Device) -> Result<Self> {
        Ok(Self::Dense(memory::place(weight, device)?))
    }

    /// Unpacks a CPU weight, for launches that run on CPU tensors.
    pub(super) fn unpack_affine(w: &Affine) -> Result<Self> {
        let (n, k, bits) = (w.n, w.k(), w.format.bits);
        let row_words = k * bits / 32;
        let mut words = vec![0u32; n * row_words];
        let (mut scales, mut biases) = (vec![], vec![]);
        for r in 0..n {
            let row = &mut words[r * row_words..][..row_words];
            for i in 0..k {
                let (code, at) = (w.code(r, i) as u64, i * bits);
                let placed = code << (at % 32);
                row[at / 32] |= placed as u32;
                if placed >> 32 != 0 {
                    row[at / 32 + 1] |= (placed >> 32) as u32;
                }
            }
            for g in 0..w.groups {
                let (scale, bias) = w.scale_bias(r, g);
                scales.push(scale);
                biases.push(bias);
            }
        }
        let cpu = &Device::Cpu;
        let floats =
            |v: Vec<f32>| Tensor::from_vec(v, (n, w.groups), cpu)?.to_dtype(dtype(w.float));
        Ok(Self::Affine {
            codes: Tensor::from_vec(words, (n, row_words), cpu)?,
            scales: floats(scales)?,
            biases: floats(biases)?,
            format: w.format,
        })
    }

    /// The same for a plain weight.
    pub(super) fn unpack_dense(w: &Dense) -> Result<Self> {
        let values: Vec<f32> = (0..w.n).flat_map(|r| w.row(r)).collect();
        let weight = Tensor::from_vec(values, (w.n, w.k), &Device::Cpu)?;
        Ok(Self::Dense(weight.to_dtype(dtype(w.float))?))
    }

    /// The tensors, codes first.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Affine {
                codes,
                scales,
                biases,
                ..
            } => vec![codes, scales, biases],
            Self::Dense(w) => vec![w],
        }
    }

    pub(super) fn format(&self) -> Option<AffineFormat> {
        match self {
            Self::Affine { format, .. } => Some(*format),
            Self::Dense(_) => None,
        }
    }

    pub(super) fn size_bytes(&self) -> usize {
        let of = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        self.tensors().into_iter().map(of).sum()
    }

    /// The weight of the rows with these numbers.
    pub(super) fn select(&self, ids: &[u32]) -> Result<Self> {
        let ids = Tensor::new(ids, self.device())?;
        self.map(|t| t.index_select(&ids, 0))
    }

    /// The rows with these numbers, in f32 on the CPU.
    pub(super) fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let cpu = |t: &Tensor| t.to_device(&Device::Cpu);
        match self.select(ids)? {
            Self::Affine {
                codes,
                scales,
                biases,
                format,
            } => crate::affine::dequantize(&cpu(&codes)?, &cpu(&scales)?, &cpu(&biases)?, format),
            Self::Dense(w) => Ok(cpu(&w)?.to_dtype(DType::F32)?),
        }
    }

    pub(super) fn device(&self) -> &Device {
        match self {
            Self::Affine { codes, .. } => codes.device(),
            Self::Dense(w) => w.device(),
        }
    }
}

fn dtype(float: Float) -> DType {
    match float {
        Float::F32 => DType::F32,
        Float::Bf16 => DType::BF16,
        Float::F16 => DType::F16,
    }
}
