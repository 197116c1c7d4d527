//! Noise and comparisons that the tests of ops share.
#![allow(dead_code)]

use candle_core::{DType, Device, Tensor};

pub const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Uniform noise in `-spread .. spread`, the same on every run.
pub fn noise(shape: &[usize], seed: u64, spread: f32, dtype: DType) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * spread
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    let t = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    t.to_dtype(dtype).unwrap()
}

pub fn floats(t: &Tensor) -> Vec<f32> {
    let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    t.to_vec1().unwrap()
}

pub fn bits(t: &Tensor) -> Vec<u32> {
    floats(t).iter().map(|x| x.to_bits()).collect()
}

/// Relative tolerance of one rounding to `dtype`, or of reordered f32 sums.
pub fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-5,
    }
}

pub fn assert_close(got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()));
    for (g, w) in floats(got).iter().zip(floats(want)) {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "{g} for {w}");
    }
}

/// The same tensor with other strides and an offset: transposed in memory, inside a larger one.
pub fn strided(t: &Tensor) -> Tensor {
    let last = t.rank() - 1;
    let pad = Tensor::cat(&[t, t, t], 0).unwrap();
    let pad = pad.transpose(0, last).unwrap().contiguous().unwrap();
    let t = pad
        .transpose(0, last)
        .unwrap()
        .narrow(0, t.dims()[0], t.dims()[0]);
    t.unwrap()
}
