//! `cargo bench --bench affine_matmul`: the affine matmul by rows, over more weights than a cache holds.

use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candle_specprefill::affine::AffineFormat;
use candle_specprefill::ops::affine_matmul::Weight;
use candle_specprefill::ops::{matmul, Context};
use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};

/// More than the last-level cache of most machines; `bench matmul --rotate-mb` takes more.
const ROTATE: usize = 320 << 20;

fn weight(n: usize, k: usize, bits: usize, group: usize) -> Result<Weight> {
    let cpu = &Device::Cpu;
    let words = n * k * bits / 32;
    let codes: Vec<u32> = (0..words as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) ^ i << 7)
        .collect();
    let codes = Tensor::from_vec(codes, (n, k * bits / 32), cpu)?;
    let floats = |s| Tensor::randn(0f32, s, (n, k / group), cpu)?.to_dtype(DType::BF16);
    let format = AffineFormat::new(bits, group).map_err(candle_core::Error::wrap)?;
    Weight::affine(&codes, &floats(0.01)?, &floats(0.1)?, format, cpu)
        .map_err(candle_core::Error::wrap)
}

fn rows(c: &mut Criterion) {
    let mut group = c.benchmark_group("affine_matmul");
    group.warm_up_time(Duration::from_millis(300));
    group.measurement_time(Duration::from_secs(1));
    group.sample_size(20);
    for (n, k) in [(4096, 4096), (3584, 1024), (1024, 3584)] {
        let weight = weight(n, k, 4, 64).expect("a weight of fixed shape");
        let bytes = weight.size_bytes();
        let weights = vec![weight; ROTATE.div_ceil(bytes)];
        let cx = Context::default();
        for m in [1, 2, 4, 8, 16] {
            let x = Tensor::randn(0f32, 1.0, (m, k), &Device::Cpu)
                .and_then(|x| x.to_dtype(DType::BF16))
                .expect("an x of fixed shape");
            group.throughput(Throughput::Bytes(bytes as u64));
            let mut at = 0;
            group.bench_function(BenchmarkId::new(format!("{n}x{k} 4-bit bf16"), m), |b| {
                // On a thread of the pool, as a model's passes run.
                rayon::scope(|_| {
                    b.iter(|| {
                        at = (at + 1) % weights.len();
                        matmul(&cx, &x, &weights[at])
                    })
                })
            });
        }
    }
    group.finish();
}

criterion_group!(benches, rows);
criterion_main!(benches);
