//! A quantized weight of any format, shapes and bytes: an error, or a product of the right shape.
#![no_main]

use candle_core::{DType, Device, Tensor};
use candle_specprefill::affine::AffineFormat;
use candle_specprefill::ops::affine_matmul::Weight;
use candle_specprefill::ops::{self, Context};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    bits: u8,
    group_size: u8,
    n: u8,
    words: u8,
    groups: u8,
    rows: u8,
    scales_are_f16: bool,
    bytes: Vec<u8>,
}

impl Input {
    /// Bytes over and over, so that short inputs fill large shapes.
    fn word(&self, i: usize) -> u32 {
        let byte = |j: usize| self.bytes.get((4 * i + j) % self.bytes.len().max(1));
        u32::from_le_bytes([0, 1, 2, 3].map(|j| byte(j).copied().unwrap_or(0)))
    }
}

fuzz_target!(|input: Input| {
    let (n, words, groups) = (input.n as usize, input.words as usize, input.groups as usize);
    let format = AffineFormat { bits: input.bits as usize, group_size: input.group_size as usize };
    let codes: Vec<u32> = (0..n * words).map(|i| input.word(i)).collect();
    let floats: Vec<f32> = (0..n * groups).map(|i| f32::from_bits(input.word(i))).collect();
    let dtype = if input.scales_are_f16 { DType::F16 } else { DType::F32 };
    let device = Device::Cpu;
    let tensor = |shape: (usize, usize)| Tensor::from_vec(floats.clone(), shape, &device).and_then(|t| t.to_dtype(dtype));
    let (Ok(codes), Ok(scales)) = (Tensor::from_vec(codes, (n, words), &device), tensor((n, groups))) else {
        return;
    };
    let Ok(weight) = Weight::affine(&codes, &scales, &scales, format, &device) else {
        return;
    };
    let (rows, k) = (input.rows as usize % 20 + 1, words * 32 / input.bits as usize);
    let x = Tensor::ones((rows, k), DType::F32, &device).expect("ones");
    let y = ops::matmul(&Context::default(), &x, &weight).expect("a weight that was made can be used");
    assert_eq!(y.dims(), [rows, n]);
});
