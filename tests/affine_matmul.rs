//! The affine and the plain matmul: against the integer reference (bitwise), float64, MLX's goldens; rows, threads, fusions.

use std::collections::HashMap;

use candle_core::{safetensors, DType, Device, Tensor, D};
use candle_specprefill::affine::{dequantize, AffineFormat};
use candle_specprefill::ops::affine_matmul::policy::{choose, Call, Isa};
use candle_specprefill::ops::affine_matmul::{matmul_gathered, matmul_on, reference, Weight};
use candle_specprefill::ops::{gate_up_silu, matmul, matmul_grouped, silu_gate, Context};
use candle_specprefill::Error;

const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
const GROUPS: [usize; 3] = [32, 64, 128];
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    fn normal(&mut self) -> f32 {
        (0..6)
            .map(|_| self.next() as f32 / u32::MAX as f32 - 0.5)
            .sum()
    }

    fn tensor(&mut self, rows: usize, columns: usize, scale: f32) -> Tensor {
        let values: Vec<f32> = (0..rows * columns).map(|_| self.normal() * scale).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
    }
}

struct Parts {
    codes: Tensor,
    scales: Tensor,
    biases: Tensor,
    format: AffineFormat,
}

impl Parts {
    fn new(seed: u64, n: usize, k: usize, bits: usize, group: usize, dtype: DType) -> Self {
        let mut random = Random(seed);
        let words: Vec<u32> = (0..n * k * bits / 32).map(|_| random.next()).collect();
        let top = ((1 << bits) - 1) as f32;
        Self {
            codes: Tensor::from_vec(words, (n, k * bits / 32), &Device::Cpu).unwrap(),
            scales: random
                .tensor(n, k / group, 0.2 / top)
                .to_dtype(dtype)
                .unwrap(),
            biases: random.tensor(n, k / group, 0.1).to_dtype(dtype).unwrap(),
            format: AffineFormat::new(bits, group).unwrap(),
        }
    }

    fn weight(&self) -> Weight {
        let cpu = &Device::Cpu;
        Weight::affine(&self.codes, &self.scales, &self.biases, self.format, cpu).unwrap()
    }

    fn dense(&self) -> Tensor {
        dequantize(&self.codes, &self.scales, &self.biases, self.format).unwrap()
    }
}

fn bits_of(t: &Tensor) -> Vec<u32> {
    let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    t.to_vec1::<f32>()
        .unwrap()
        .iter()
        .map(|v| v.to_bits())
        .collect()
}

fn nmse(y: &Tensor, exact: &Tensor) -> f64 {
    let y = y.to_dtype(DType::F64).unwrap();
    let error = (y - exact).unwrap().sqr().unwrap().sum_all().unwrap();
    let power = exact.sqr().unwrap().sum_all().unwrap();
    error.to_scalar::<f64>().unwrap() / power.to_scalar::<f64>().unwrap()
}

/// Squared error over power that each dtype may show, its own rounding included.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-12,
        DType::F16 => 1e-6,
        _ => 5e-5,
    }
}

fn exact(x: &Tensor, w: &Tensor) -> Tensor {
    let (x, w) = (
        x.to_dtype(DType::F64).unwrap(),
        w.to_dtype(DType::F64).unwrap(),
    );
    x.matmul(&w.t().unwrap()).unwrap()
}

#[test]
fn every_isa_gives_the_references_bits_and_float64s_values() {
    let cx = Context::default();
    for (i, bits) in BITS.into_iter().enumerate() {
        for (j, group) in GROUPS.into_iter().enumerate() {
            for (d, dtype) in DTYPES.into_iter().enumerate() {
                let (n, k) = ([40, 7, 33][d], group * [3, 2, 5][j]);
                let parts = Parts::new(
                    (i * 9 + j * 3 + d) as u64,
                    n,
                    k,
                    bits,
                    group,
                    DTYPES[(d + i) % 3],
                );
                let weight = parts.weight();
                for m in [1, 2, 3, 5, 8, 13] {
                    let x = Random(m as u64).tensor(m, k, 1.5).to_dtype(dtype).unwrap();
                    let expected = reference(&x, &weight).unwrap();
                    for isa in Isa::available() {
                        let y = matmul_on(&cx, &x, &weight, *isa).unwrap();
                        assert_eq!(y.dtype(), dtype);
                        let what =
                            format!("{bits} bits, groups of {group}, {m} rows, {dtype:?}, {isa:?}");
                        assert_eq!(bits_of(&y), bits_of(&expected), "{what}");
                    }
                    let error = nmse(&expected, &exact(&x, &parts.dense()));
                    assert!(
                        error <= bound(dtype),
                        "{bits} {group} {m} {dtype:?}: {error:e}"
                    );
                }
            }
        }
    }
    assert!(!cx.routes().fell_back());
}

#[test]
fn plain_weights_too() {
    let cx = Context::default();
    for dtype in DTYPES {
        for (n, k) in [(5, 1), (16, 64), (33, 67), (48, 200), (7, 1023)] {
            for stored in DTYPES {
                let w = Random(3).tensor(n, k, 0.1).to_dtype(stored).unwrap();
                let weight = Weight::dense(&w, &Device::Cpu).unwrap();
                for m in [1, 2, 3, 4, 9] {
                    let x = Random(4).tensor(m, k, 1.0).to_dtype(dtype).unwrap();
                    let expected = reference(&x, &weight).unwrap();
                    for isa in Isa::available() {
                        let y = matmul_on(&cx, &x, &weight, *isa).unwrap();
                        assert_eq!(bits_of(&y), bits_of(&expected), "{n} {k} {m} {isa:?}");
                    }
                    let error = nmse(&expected, &exact(&x, &w));
                    assert!(error <= bound(dtype), "{n} {k} {m} {dtype:?}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_its_own_bits_whatever_its_neighbours_hold() {
    let cx = Context::default();
    let plain = Random(8)
        .tensor(300, 256, 0.1)
        .to_dtype(DType::BF16)
        .unwrap();
    let weights = [
        Parts::new(1, 300, 256, 4, 64, DType::BF16).weight(),
        Parts::new(2, 300, 256, 5, 32, DType::F16).weight(),
        Weight::dense(&plain, &Device::Cpu).unwrap(),
    ];
    for dtype in DTYPES {
        let x = Random(5).tensor(40, 256, 1.0);
        let mut values = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values[3 * 256 + 17] = f32::NAN;
        values[6 * 256] = f32::INFINITY;
        values[9 * 256 + 255] = f32::NEG_INFINITY;
        values[11 * 256..12 * 256].fill(0.0);
        let x = Tensor::from_vec(values, (40, 256), &Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        for weight in &weights {
            let row = |r| bits_of(&matmul(&cx, &x.narrow(0, r, 1).unwrap(), weight).unwrap());
            let alone: Vec<_> = (0..40).map(row).collect();
            for m in (1..=16).chain([40]) {
                for first in [0, 3] {
                    let m = m.min(40 - first);
                    let y = matmul(&cx, &x.narrow(0, first, m).unwrap(), weight).unwrap();
                    for r in 0..m {
                        assert_eq!(
                            bits_of(&y.narrow(0, r, 1).unwrap()),
                            alone[first + r],
                            "{m} rows"
                        );
                    }
                }
            }
            assert!(alone[3].iter().all(|b| f32::from_bits(*b).is_nan()));
            assert!(alone[6].iter().all(|b| !f32::from_bits(*b).is_finite()));
            assert!(alone[11].iter().all(|b| f32::from_bits(*b) == 0.0));
        }
    }
    assert!(cx.routes().fell_back());
}

#[test]
fn thread_counts_and_layouts_do_not_matter() {
    let cx = Context::default();
    let weight = Parts::new(1, 200, 512, 6, 64, DType::BF16).weight();
    let x = Random(5).tensor(9, 512, 1.0);
    let expected = bits_of(&matmul(&cx, &x, &weight).unwrap());
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let y = pool.install(|| matmul(&cx, &x, &weight)).unwrap();
        assert_eq!(bits_of(&y), expected);
    }
    let strided = x.t().unwrap().contiguous().unwrap().t().unwrap();
    assert_eq!(bits_of(&matmul(&cx, &strided, &weight).unwrap()), expected);
    let padded = Tensor::cat(&[&x, &x], D::Minus1)
        .unwrap()
        .narrow(1, 512, 512)
        .unwrap();
    assert_eq!(bits_of(&matmul(&cx, &padded, &weight).unwrap()), expected);
}

#[test]
fn fusions_give_the_unfused_bits() {
    let cx = Context::default();
    let a = Parts::new(1, 48, 256, 4, 64, DType::BF16).weight();
    let b = Parts::new(2, 48, 256, 6, 32, DType::BF16).weight();
    let c = Weight::dense(&Random(3).tensor(20, 256, 0.1), &Device::Cpu).unwrap();
    for dtype in DTYPES {
        let x = Random(4).tensor(5, 256, 1.0).to_dtype(dtype).unwrap();
        let fused = matmul_grouped(&cx, &x, &[&a, &b, &c, &a]).unwrap();
        for (y, w) in fused.iter().zip([&a, &b, &c, &a]) {
            assert_eq!(bits_of(y), bits_of(&matmul(&cx, &x, w).unwrap()));
        }
        let [g, u] = [&a, &b].map(|w| matmul(&cx, &x, w).unwrap());
        let unfused = silu_gate(&cx, &u, &g).unwrap();
        assert_eq!(
            bits_of(&gate_up_silu(&cx, &x, &a, &b).unwrap()),
            bits_of(&unfused)
        );
    }
}

#[test]
fn extreme_activations_stay_finite_and_right() {
    let cx = Context::default();
    let parts = Parts::new(1, 32, 128, 4, 64, DType::F32);
    let weight = parts.weight();
    for scale in [1e-42f32, 1e-37, 1e-20, 1e30] {
        let x = Random(2).tensor(2, 128, scale);
        let expected = reference(&x, &weight).unwrap();
        for isa in Isa::available() {
            let y = matmul_on(&cx, &x, &weight, *isa).unwrap();
            assert_eq!(bits_of(&y), bits_of(&expected), "{scale:e}");
        }
        if scale > 1e-30 {
            assert!(
                nmse(&expected, &exact(&x, &parts.dense())) < 1e-12,
                "{scale:e}"
            );
        }
    }
}

#[test]
fn embeddings_are_the_dequantized_rows() {
    for bits in BITS {
        let parts = Parts::new(1, 21, 128, bits, 32, DType::BF16);
        let y = parts.weight().embed(&[20, 0, 7], DType::F32).unwrap();
        let ids = Tensor::new(&[20u32, 0, 7], &Device::Cpu).unwrap();
        let expected = parts.dense().index_select(&ids, 0).unwrap();
        assert_eq!(bits_of(&y), bits_of(&expected));
    }
    let weight = Parts::new(1, 21, 128, 4, 32, DType::BF16).weight();
    assert!(matches!(
        weight.embed(&[21], DType::F32),
        Err(Error::Prompt(_))
    ));
    assert!(weight.size_bytes() <= 2 * (21 * 128 / 2 + 21 * 4 * 4));
}

#[test]
fn malformed_input_is_refused() {
    let cx = Context::default();
    let parts = Parts::new(1, 16, 128, 4, 32, DType::BF16);
    let weight = parts.weight();
    let wrong = Random(1).tensor(2, 64, 1.0);
    assert!(matches!(
        matmul(&cx, &wrong, &weight),
        Err(Error::Shape { .. })
    ));
    let ids = Tensor::zeros((2, 128), DType::U32, &Device::Cpu).unwrap();
    assert!(matches!(
        matmul(&cx, &ids, &weight),
        Err(Error::DType { .. })
    ));
    let none = Tensor::zeros((0, 128), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(matmul(&cx, &none, &weight).unwrap().dims(), [0, 16]);
    let codes = parts.codes.narrow(1, 0, 8).unwrap();
    let cpu = &Device::Cpu;
    assert!(Weight::affine(&codes, &parts.scales, &parts.biases, parts.format, cpu).is_err());
    let format = AffineFormat {
        bits: 7,
        group_size: 32,
    };
    assert!(Weight::affine(&parts.codes, &parts.scales, &parts.biases, format, cpu).is_err());
}

fn golden(name: &str) -> HashMap<String, Tensor> {
    let path = format!(
        "{}/tests/golden/qmm/{name}.safetensors",
        env!("CARGO_MANIFEST_DIR")
    );
    safetensors::load(path, &Device::Cpu).unwrap()
}

#[test]
fn mlx_goldens() {
    let cx = Context::default();
    for bits in BITS {
        let tensors = golden(&format!("qmm_b{bits}"));
        let mut seen = 0;
        for key in tensors.keys().filter_map(|k| k.strip_suffix(".wq")) {
            let name = key.strip_suffix(".f16").unwrap_or(key);
            let group = name
                .split("_g")
                .nth(1)
                .and_then(|s| s.split('_').next())
                .unwrap();
            let format = AffineFormat::new(bits, group.parse().unwrap()).unwrap();
            let get = |suffix: &str| &tensors[&format!("{key}.{suffix}")];
            let (codes, scales, biases) = (get("wq"), get("scales"), get("biases"));
            let weight = Weight::affine(codes, scales, biases, format, &Device::Cpu).unwrap();
            let x = tensors[&format!("{name}.x")].to_dtype(DType::F32).unwrap();
            let y = matmul(&cx, &x, &weight).unwrap();
            let expected = get("y_f32").to_dtype(DType::F64).unwrap();
            let error = nmse(&y, &expected);
            assert!(error < 2e-12, "{key}: {error:e}");
            seen += 1;
        }
        assert!(seen >= 3, "{seen} goldens of {bits} bits");
    }
}

#[test]
fn gathered_experts_equal_mlx_and_single_calls() {
    let cx = Context::default();
    let t = golden("gather_qmm");
    let format = AffineFormat::new(4, 64).unwrap();
    let part = |name: &str, e: usize| t[name].get(e).unwrap();
    let weight = |e| {
        let (codes, scales, biases) = (part("wq", e), part("scales", e), part("biases", e));
        Weight::affine(&codes, &scales, &biases, format, &Device::Cpu).unwrap()
    };
    let experts: Vec<Weight> = (0..4).map(weight).collect();
    let experts: Vec<&Weight> = experts.iter().collect();
    let choices = t["inds"].flatten_all().unwrap().to_vec1::<u32>().unwrap();
    let x = t["x"]
        .reshape((5, 128))
        .unwrap()
        .to_dtype(DType::BF16)
        .unwrap();
    let y = matmul_gathered(&cx, &x, &experts, &choices).unwrap();
    assert_eq!(y.dims(), [5, 2, 32]);
    for (at, expert) in choices.iter().enumerate() {
        let alone = matmul(
            &cx,
            &x.narrow(0, at / 2, 1).unwrap(),
            experts[*expert as usize],
        )
        .unwrap();
        assert_eq!(
            bits_of(&y.get(at / 2).unwrap().get(at % 2).unwrap()),
            bits_of(&alone)
        );
    }
    // MLX's CPU kernel accumulates in bf16, so its own error is the larger one.
    let theirs = t["y"]
        .reshape((5, 2, 32))
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap();
    assert!(nmse(&y, &theirs) < 1e-3);
    assert!(matmul_gathered(&cx, &x, &experts, &choices[1..]).is_err());
    assert!(matmul_gathered(&cx, &x, &experts, &[4; 5]).is_err());
}

#[test]
fn every_call_has_a_kernel() {
    let formats = BITS
        .iter()
        .flat_map(|b| GROUPS.map(|g| AffineFormat::new(*b, g).ok()));
    for format in formats.chain([None]) {
        for dtype in DTYPES {
            for (m, n, k) in [(0, 0, 0), (1, 1, 32), (16, 4096, 4096), (usize::MAX, 2, 2)] {
                for isa in [Isa::Portable, Isa::Avx2] {
                    let call = |cpu| Call {
                        cpu,
                        m,
                        n,
                        k,
                        format,
                        dtype,
                    };
                    let kernel = choose(call(true), isa);
                    assert_eq!(kernel.fallback, None);
                    assert_eq!(kernel.limbs == 0, format.is_none());
                    assert!(choose(call(false), isa).fallback.is_some());
                }
            }
        }
    }
}
