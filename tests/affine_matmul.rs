//! The affine matmul: accuracy against float64, rows that do not depend on their company, MLX's own values.

mod support;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::affine::AffineFormat;
use candle_specprefill::ops::affine_matmul::Weight;
use candle_specprefill::ops::{self, Context};
use candle_specprefill::Error;
use proptest::prelude::*;
use support::{distance, same_bits, tensors, values};

const CPU: Device = Device::Cpu;

/// Values of a wide range, a few of them large, as activations have them.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n)
        .map(|_| (next() + next()) * next().exp2() * 2.0)
        .collect()
}

fn weight(n: usize, k: usize, format: AffineFormat, seed: u64) -> (Weight, Vec<f64>) {
    let words = n * k * format.bits / 32;
    let codes: Vec<u32> = noise(words, seed)
        .iter()
        .map(|v| v.to_bits().wrapping_mul(2_654_435_769))
        .collect();
    let codes = Tensor::from_vec(codes, (n, k * format.bits / 32), &CPU).unwrap();
    let groups = k / format.group_size;
    let constants = |seed| {
        let t = Tensor::from_vec(noise(n * groups, seed), (n, groups), &CPU).unwrap();
        t.to_dtype(DType::BF16).unwrap()
    };
    let (scales, biases) = (constants(seed + 1), constants(seed + 2));
    let plain = candle_specprefill::affine::dequantize(&codes, &scales, &biases, format).unwrap();
    let w = Weight::affine(&codes, &scales, &biases, format, &CPU).unwrap();
    (w, values(&plain).iter().map(|v| *v as f64).collect())
}

fn rows(m: usize, k: usize, dtype: DType, seed: u64) -> Tensor {
    let x = Tensor::from_vec(noise(m * k, seed), (m, k), &CPU).unwrap();
    x.to_dtype(dtype).unwrap()
}

fn run(x: &Tensor, w: &Weight) -> Tensor {
    ops::matmul(&Context::default(), x, w).unwrap()
}

fn formats() -> impl Strategy<Value = AffineFormat> {
    let bits = prop::sample::select(vec![2, 3, 4, 5, 6, 8]);
    let groups = prop::sample::select(vec![32, 64, 128]);
    (bits, groups).prop_map(|(b, g)| AffineFormat::new(b, g).unwrap())
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::F32, DType::BF16, DType::F16])
}

/// Normalised squared error of `y` against float64 products.
fn error(x: &Tensor, w: &[f64], y: &Tensor) -> f64 {
    let (m, k) = x.dims2().unwrap();
    let n = w.len() / k;
    let (x, y) = (values(x), values(y));
    let (mut wrong, mut all) = (0.0, 0.0);
    for (i, y) in y.iter().enumerate() {
        let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
        let exact: f64 = x.iter().zip(w).map(|(x, w)| *x as f64 * w).sum();
        wrong += (exact - *y as f64).powi(2);
        all += exact * exact;
    }
    assert_eq!(y.len(), m * n);
    wrong / all.max(1e-30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn close_to_float64_and_rows_alone(
        format in formats(), dtype in dtypes(), n in 1usize..70, groups in 1usize..6, m in 1usize..20, seed in 1u64..1000,
    ) {
        let k = groups * 128;
        let (w, exact) = weight(n, k, format, seed);
        let x = rows(m, k, dtype, seed + 9);
        let y = run(&x, &w);
        prop_assert_eq!(y.dtype(), dtype);
        let bound = match dtype { DType::F32 => 1e-12, DType::F16 => 1e-6, _ => 5e-5 };
        let e = error(&x, &exact, &y);
        prop_assert!(e < bound, "{:?} {:?}: {}", format, dtype, e);
        for r in 0..m {
            let alone = run(&x.narrow(0, r, 1).unwrap(), &w);
            prop_assert!(same_bits(&alone, &y.narrow(0, r, 1).unwrap()), "row {} of {}", r, m);
        }
    }

    #[test]
    fn plain_weights_too(
        kind in dtypes(), dtype in dtypes(), n in 1usize..40, k in 1usize..300, m in 1usize..20, seed in 1u64..1000,
    ) {
        let plain = rows(n, k, kind, seed);
        let w = Weight::dense(&plain, &CPU).unwrap();
        let exact: Vec<f64> = values(&plain).iter().map(|v| *v as f64).collect();
        let x = rows(m, k, dtype, seed + 9);
        let y = run(&x, &w);
        // A single column may cancel to almost nothing, so the bound is on terms, not on the sum.
        let terms = rows(1, 1, DType::F32, 1).elem_count() as f64;
        let bound = match dtype { DType::F32 => 1e-9, DType::F16 => 1e-5, _ => 5e-4 } * terms;
        prop_assert!(m * n < 8 || error(&x, &exact, &y) < bound);
        for r in 0..m {
            let alone = run(&x.narrow(0, r, 1).unwrap(), &w);
            prop_assert!(same_bits(&alone, &y.narrow(0, r, 1).unwrap()));
        }
    }

    #[test]
    fn a_bad_row_stays_alone(
        format in formats(), dtype in dtypes(), at in 0usize..6, bad in prop::sample::select(vec![f32::NAN, f32::INFINITY]), seed in 1u64..100,
    ) {
        let (w, _) = weight(19, 256, format, seed);
        let good = rows(6, 256, dtype, seed);
        let mut spoiled = values(&good);
        spoiled[at * 256 + 100] = bad;
        let spoiled = Tensor::from_vec(spoiled, (6, 256), &CPU).unwrap().to_dtype(dtype).unwrap();
        let (want, got) = (run(&good, &w), run(&spoiled, &w));
        for r in 0..6 {
            let (want, got) = (want.narrow(0, r, 1).unwrap(), got.narrow(0, r, 1).unwrap());
            if r == at {
                prop_assert!(values(&got).iter().all(|v| !v.is_finite()));
            } else {
                prop_assert!(same_bits(&want, &got));
            }
        }
    }

    #[test]
    fn offsets_and_strides_are_honoured(format in formats(), dtype in dtypes(), seed in 1u64..100) {
        let (w, _) = weight(33, 128, format, seed);
        let wide = rows(9, 300, dtype, seed);
        let view = wide.narrow(1, 57, 128).unwrap().narrow(0, 3, 5).unwrap();
        prop_assert!(same_bits(&run(&view, &w), &run(&view.contiguous().unwrap(), &w)));
        let turned = rows(128, 7, dtype, seed).t().unwrap();
        prop_assert!(same_bits(&run(&turned, &w), &run(&turned.contiguous().unwrap(), &w)));
    }

    #[test]
    fn fused_forms_equal_single_calls(a in formats(), b in formats(), dtype in dtypes(), m in 1usize..9, seed in 1u64..100) {
        let cx = Context::default();
        let ((gate, _), (up, _)) = (weight(37, 256, a, seed), weight(37, 256, b, seed + 5));
        let x = rows(m, 256, dtype, seed);
        let both = ops::matmul_grouped(&cx, &x, &[&gate, &up]).unwrap();
        prop_assert!(same_bits(&both[0], &run(&x, &gate)));
        prop_assert!(same_bits(&both[1], &run(&x, &up)));
        let fused = ops::gate_up_silu(&cx, &x, &gate, &up).unwrap();
        for r in 0..m {
            let alone = ops::gate_up_silu(&cx, &x.narrow(0, r, 1).unwrap(), &gate, &up).unwrap();
            prop_assert!(same_bits(&alone, &fused.narrow(0, r, 1).unwrap()));
        }
    }
}

#[test]
fn thread_count_does_not_matter() {
    let (w, _) = weight(640, 512, AffineFormat::new(4, 64).unwrap(), 3);
    let x = rows(70, 512, DType::BF16, 4);
    let pool = |n| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(n)
            .build()
            .unwrap()
    };
    let one = pool(1).install(|| run(&x, &w));
    for n in [2, 3, 7] {
        assert!(same_bits(&one, &pool(n).install(|| run(&x, &w))));
    }
}

#[test]
fn mlx_values_for_every_width_and_group() {
    let mut seen = 0;
    for bits in [2, 3, 4, 5, 6, 8] {
        let g = tensors(&format!("qmm/qmm_b{bits}.safetensors"));
        for key in g
            .keys()
            .filter(|k| k.ends_with(".wq") && !k.contains(".f16."))
        {
            let name = key.trim_end_matches(".wq");
            let group = name.split("_g").nth(1).unwrap().split('_').next().unwrap();
            let format = AffineFormat::new(bits, group.parse().unwrap()).unwrap();
            let part = |p: &str| &g[&format!("{name}.{p}")];
            let w =
                Weight::affine(part("wq"), part("scales"), part("biases"), format, &CPU).unwrap();
            let x = part("x").to_dtype(DType::F32).unwrap();
            let d = distance(&run(&x, &w), part("y_f32"));
            assert!(d < 2e-4, "{name}: {d}");
            seen += 1;
        }
    }
    assert!(seen >= 18, "{seen} goldens");
}

#[test]
fn mlx_packing() {
    let g = tensors("qmm/packing.safetensors");
    for bits in [2, 3, 4, 5, 6, 8] {
        let words = g[&format!("b{bits}.words")].to_vec2::<u32>().unwrap();
        let codes = g[&format!("b{bits}.codes_stored")]
            .to_dtype(DType::U32)
            .unwrap();
        for (words, codes) in words.iter().zip(codes.to_vec2::<u32>().unwrap()) {
            let ours = candle_specprefill::affine::unpack_row(words, bits, codes.len());
            let ours: Vec<u32> = ours.into_iter().map(u32::from).collect();
            assert_eq!(ours, codes, "{bits} bits");
        }
    }
}

#[test]
fn mixed_dtypes_and_shapes_are_errors() {
    let (w, _) = weight(8, 128, AffineFormat::new(4, 64).unwrap(), 3);
    let cx = Context::default();
    let x = Tensor::zeros((2, 64), DType::F32, &CPU).unwrap();
    assert!(matches!(ops::matmul(&cx, &x, &w), Err(Error::Shape { .. })));
    let x = Tensor::zeros((2, 128), DType::U32, &CPU).unwrap();
    assert!(matches!(ops::matmul(&cx, &x, &w), Err(Error::DType { .. })));
    assert!(AffineFormat::new(7, 64).is_err() && AffineFormat::new(4, 16).is_err());
    let nan = Tensor::full(f32::NAN, (8, 2), &CPU).unwrap();
    let codes = Tensor::zeros((8, 16), DType::U32, &CPU).unwrap();
    let format = AffineFormat::new(4, 64).unwrap();
    assert!(Weight::affine(&codes, &nan, &nan, format, &CPU).is_err());
    let empty = Tensor::zeros((0, 128), DType::F32, &CPU).unwrap();
    let w = run(&empty, &w);
    assert_eq!(w.dims(), [0, 8]);
}
