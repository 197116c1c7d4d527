//! `metal/affine_matmul.metal`.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::affine::{dequantize, AffineFormat};
use candle_specprefill::ops::affine_matmul::{matmul_experts, Weight};
use candle_specprefill::ops::{gate_up_silu, matmul, silu_gate, Context};

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

pub struct Parts {
    pub weight: Weight,
    /// Dequantized, in f64.
    pub exact: Tensor,
}

pub fn parts(seed: u64, n: usize, k: usize, bits: usize, group: usize, dtype: DType) -> Parts {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(seed | 1);
        (state >> 32) as u32
    };
    let words: Vec<u32> = (0..n * k * bits / 32).map(|_| word()).collect();
    let top = ((1 << bits) - 1) as f32;
    let codes = Tensor::from_vec(words, (n, k * bits / 32), &Device::Cpu).unwrap();
    let scales = noise(&[n, k / group], seed + 1, 0.2 / top, dtype);
    let biases = noise(&[n, k / group], seed + 2, 0.1, dtype);
    let format = AffineFormat::new(bits, group).unwrap();
    let weight = Weight::affine(&codes, &scales, &biases, format, &Device::Cpu).unwrap();
    let exact = dequantize(&codes, &scales, &biases, format).unwrap();
    let exact = exact.to_dtype(DType::F64).unwrap();
    Parts { weight, exact }
}

/// Squared error over power, against f64: the CPU op's bounds.
pub fn assert_exact(y: &Tensor, x: &Tensor, w: &Tensor, what: &str) {
    let exact = x
        .to_dtype(DType::F64)
        .unwrap()
        .matmul(&w.t().unwrap())
        .unwrap();
    let error = (y.to_dtype(DType::F64).unwrap() - &exact).unwrap();
    let power = |t: &Tensor| {
        t.sqr()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f64>()
            .unwrap()
    };
    let error = power(&error) / power(&exact);
    let bound = match y.dtype() {
        DType::F32 => 1e-12,
        DType::F16 => 1e-6,
        _ => 5e-5,
    };
    assert!(error <= bound, "{what}: {error:e}");
}

/// Every bit width, group size and dtype, M = 1…16: f64's values, and every row as it is alone.
fn widths(mode: Mode, bits: usize) {
    for (j, group) in [32, 64, 128].into_iter().enumerate() {
        for (d, dtype) in DTYPES.into_iter().enumerate() {
            let (n, k) = ([13, 8, 11][d], group * [3, 2, 5][j]);
            let p = parts(
                (bits * 9 + j * 3 + d) as u64,
                n,
                k,
                bits,
                group,
                DTYPES[(d + j) % 3],
            );
            let x = noise(&[16, k], 5, 1.5, dtype);
            let cx = emulated(mode);
            let alone: Vec<_> = (0..16)
                .map(|r| bits_of(&matmul(&cx, &x.narrow(0, r, 1).unwrap(), &p.weight).unwrap()))
                .collect();
            for m in 1..=16 {
                let x = x.narrow(0, 0, m).unwrap();
                let y = matmul(&cx, &x, &p.weight).unwrap();
                let what = format!("{bits} bits, groups of {group}, {m} rows, {dtype:?}, {mode:?}");
                assert_eq!(bits_of(&y), alone[..m].concat(), "{what}");
                assert_exact(&y, &x, &p.exact, &what);
            }
            assert_all_emulated(&cx);
        }
    }
}

pub fn bits_of(t: &Tensor) -> Vec<u32> {
    bits(t)
}

macro_rules! widths {
    ($($name:ident $bits:literal),*) => { $(
        #[test]
        fn $name() {
            needs_clang!();
            for mode in MODES { widths(mode, $bits); }
        }
    )* };
}
widths!(lanes_2_bits 2, lanes_3_bits 3, lanes_4_bits 4, lanes_5_bits 5, lanes_6_bits 6, lanes_8_bits 8);

/// Long K: several blocks per simdgroup, and columns that simdgroups share.
#[test]
fn lanes_split_k() {
    needs_clang!();
    for mode in MODES {
        for (bits_, n, k) in [(4, 9, 4416), (8, 5, 2080), (3, 6, 2112)] {
            let group = if k % 64 == 0 { 64 } else { 32 };
            let p = parts(77, n, k, bits_, group, DType::BF16);
            for dtype in [DType::F32, DType::BF16] {
                let x = noise(&[7, k], 9, 1.0, dtype);
                let cx = emulated(mode);
                let y = matmul(&cx, &x, &p.weight).unwrap();
                assert_exact(&y, &x, &p.exact, &format!("{bits_} bits, K = {k}"));
                for m in [1, 2, 4, 6] {
                    let less = matmul(&cx, &x.narrow(0, 0, m).unwrap(), &p.weight).unwrap();
                    assert_eq!(bits(&less), bits(&y.narrow(0, 0, m).unwrap()));
                }
            }
        }
    }
}

/// A view of x that starts at an odd element, and one with gaps between its rows.
#[test]
fn views_of_x() {
    needs_clang!();
    let p = parts(3, 12, 128, 4, 64, DType::BF16);
    let wide = noise(&[5, 131], 9, 1.0, DType::BF16);
    let gaps = wide.narrow(1, 3, 128).unwrap();
    let flat = wide.flatten_all().unwrap().narrow(0, 5, 256).unwrap();
    let odd = flat.reshape((2, 128)).unwrap();
    for x in [gaps, odd] {
        let cx = emulated(Mode::Checked);
        let y = matmul(&cx, &x, &p.weight).unwrap();
        let copy = matmul(&cx, &x.force_contiguous().unwrap(), &p.weight).unwrap();
        assert_eq!(bits(&y), bits(&copy));
        assert_exact(&y, &x, &p.exact, "a view");
    }
}

/// One launch for silu(gate) * up has the bits of the three steps.
#[test]
fn gate_up_equals_its_parts() {
    needs_clang!();
    for mode in MODES {
        for dtype in DTYPES {
            for (bits_, n, k) in [(4, 10, 256), (6, 7, 2112)] {
                let gate = parts(21, n, k, bits_, 32, DType::F16).weight;
                let up = parts(22, n, k, bits_, 32, DType::F16).weight;
                for m in [1, 3, 6] {
                    let x = noise(&[m, k], 4, 0.7, dtype);
                    let cx = emulated(mode);
                    let y = gate_up_silu(&cx, &x, &gate, &up).unwrap();
                    assert_all_emulated(&cx);
                    let (g, u) = (
                        matmul(&cx, &x, &gate).unwrap(),
                        matmul(&cx, &x, &up).unwrap(),
                    );
                    assert_eq!(bits(&y), bits(&silu_gate(&cx, &u, &g).unwrap()));
                    let cpu = gate_up_silu(&Context::default(), &x, &gate, &up).unwrap();
                    assert_close(&y, &cpu, 2.0 * tolerance(dtype));
                }
            }
        }
    }
}

/// The gathered form has the bits of the expert's own weight.
#[test]
fn experts_equal_their_own_weights() {
    needs_clang!();
    let (experts, n, k, top) = (5, 6, 192, 3);
    for mode in MODES {
        for (dtype, bits_) in DTYPES.into_iter().zip([4, 8, 5]) {
            let p = parts(31, experts * n, k, bits_, 64, DType::BF16);
            let x = noise(&[4, k], 4, 1.0, dtype);
            let choices: Vec<u32> = vec![0, 4, 2, 1, 1, 3, 4, 0, 2, 3, 2, 1];
            let chosen = Tensor::new(choices.as_slice(), &Device::Cpu).unwrap();
            let chosen = chosen.reshape((4, top)).unwrap();
            let cx = emulated(mode);
            let y = matmul_experts(&cx, &x, &p.weight, &chosen, n).unwrap();
            assert_all_emulated(&cx);
            assert_eq!(y.dims(), [4, top, n]);
            // The stacked weight as one matmul holds every expert's product.
            let whole = matmul(&cx, &x, &p.weight).unwrap();
            for (slot, expert) in choices.iter().enumerate() {
                let (row, rank) = (slot / top, slot % top);
                let want = whole.narrow(0, row, 1).unwrap();
                let want = want.narrow(1, *expert as usize * n, n).unwrap();
                let got = y.narrow(0, row, 1).unwrap().narrow(1, rank, 1).unwrap();
                assert_eq!(bits(&got), bits(&want), "slot {slot}");
            }
        }
    }
}

#[test]
fn errors_name_the_argument() {
    let cx = emulated(Mode::Fast);
    let p = parts(3, 12, 128, 4, 64, DType::BF16);
    let of = |shape: &[usize], dtype| matmul(&cx, &noise(shape, 1, 1.0, dtype), &p.weight);
    let texts: HashMap<_, _> = [
        ("shape", of(&[2, 64], DType::F32).unwrap_err().to_string()),
        ("dtype", of(&[2, 128], DType::F64).unwrap_err().to_string()),
    ]
    .into();
    assert!(texts["shape"].contains("[2, 64]"), "{texts:?}");
    assert!(texts["dtype"].contains("F64"), "{texts:?}");
    assert_eq!(of(&[0, 128], DType::F32).unwrap().dims(), [0, 12]);
}

/// Plain weights of every dtype, M = 1…16.
#[test]
fn dense_widths() {
    needs_clang!();
    for mode in MODES {
        for (d, dtype) in DTYPES.into_iter().enumerate() {
            let (n, k) = [(9, 40), (6, 2056), (12, 192)][d];
            let w = noise(&[n, k], 8, 0.4, DTYPES[(d + 1) % 3]);
            let weight = Weight::dense(&w, &Device::Cpu).unwrap();
            let exact = w.to_dtype(DType::F64).unwrap();
            let x = noise(&[16, k], 5, 1.5, dtype);
            let cx = emulated(mode);
            let whole = bits(&matmul(&cx, &x, &weight).unwrap());
            for m in 1..16 {
                let x = x.narrow(0, 0, m).unwrap();
                let y = matmul(&cx, &x, &weight).unwrap();
                assert_eq!(bits(&y), whole[..m * n], "{m} rows");
                assert_exact(&y, &x, &exact, &format!("plain, {m} rows, {dtype:?}"));
            }
            assert_all_emulated(&cx);
        }
    }
}

/// More than 16 rows: every bit width, group size and dtype, ragged in M, N and, for plain weights, K.
#[test]
fn prefill() {
    needs_clang!();
    for mode in MODES {
        for (i, bits) in [0, 2, 3, 4, 5, 6, 8].into_iter().enumerate() {
            for (d, dtype) in DTYPES.into_iter().enumerate() {
                let (group, halves) = ([32, 64, 128][(i + d) % 3], DTYPES[(d + i / 3) % 3]);
                let (m, n, k) = ([17, 45, 32][d], [33, 7, 64][(i + d) % 3], group * 2);
                let (weight, exact) = match bits {
                    0 => {
                        let w = noise(&[n, k + 24], 8, 0.4, halves);
                        let weight = Weight::dense(&w, &Device::Cpu).unwrap();
                        (weight, w.to_dtype(DType::F64).unwrap())
                    }
                    _ => {
                        let p = parts(50 + bits as u64, n, k, bits, group, halves);
                        (p.weight, p.exact)
                    }
                };
                let x = noise(&[m, weight.k()], 5, 1.5, dtype);
                let cx = emulated(mode);
                let y = matmul(&cx, &x, &weight).unwrap();
                assert_all_emulated(&cx);
                assert!(cx.routes().snapshot().keys().all(|r| r.contains("prefill")));
                assert_exact(&y, &x, &exact, &format!("{bits} bits, {m} rows, {dtype:?}"));
            }
        }
    }
}

/// Launches of a real layer's size, to be recorded and timed on a GPU: `METAL_LARGEST=99999999 METAL_LAUNCHES=… cargo test --test metal
/// -- --ignored a_layers_size` (tests/metal-gpu).
#[test]
#[ignore = "records launches for a GPU"]
fn a_layers_size() {
    needs_clang!();
    let (n, k) = (4096, 4096);
    let p = parts(1, n, k, 4, 64, DType::BF16);
    for m in [1, 2, 4, 8, 16] {
        let x = noise(&[m, k], 7, 1.0, DType::BF16);
        let y = matmul(&emulated(Mode::Fast), &x, &p.weight).unwrap();
        assert_exact(
            &y,
            &x.to_dtype(DType::F64).unwrap(),
            &p.exact,
            &format!("M={m}"),
        );
    }
}
