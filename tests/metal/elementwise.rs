//! `metal/rms_norm.metal` and `metal/sigmoid_gate.metal`.

use candle_core::{DType, Tensor};
use candle_specprefill::ops::{rms_norm, rms_norm_gated, sigmoid_gate, silu_gate, Context};

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

fn in_f64(x: &Tensor, z: Option<&Tensor>, weight: &Tensor, eps: f64) -> Vec<f64> {
    let width = weight.elem_count();
    let (x, w) = (floats(x), floats(weight));
    let z = z.map(floats);
    let mut out = vec![];
    for (r, row) in x.chunks(width).enumerate() {
        let mean = row.iter().map(|v| (*v as f64).powi(2)).sum::<f64>() / width as f64;
        for (i, v) in row.iter().enumerate() {
            let y = *v as f64 / (mean + eps).sqrt() * w[i] as f64;
            let gate = z.as_ref().map_or(1.0, |z| {
                let g = z[r * width + i] as f64;
                g / (1.0 + (-g).exp())
            });
            out.push(y * gate);
        }
    }
    out
}

/// A unit in the last place of 16-bit results, and a few of f32.
fn assert_near(got: &Tensor, want: &[f64]) {
    let unit = match got.dtype() {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 6e-7,
    };
    for (g, w) in floats(got).iter().zip(want) {
        let error = (*g as f64 - w).abs();
        assert!(error <= unit * 1.01 * w.abs() + 1e-7, "{g} for {w}");
    }
}

#[test]
fn rms_norm_agrees_with_f64_and_row_by_row() {
    needs_clang!();
    for mode in MODES {
        for dtype in DTYPES {
            for (rows, width) in [(7, 40), (5, 512), (3, 513), (2, 2051)] {
                let x = noise(&[rows, width], 1, 3.0, dtype);
                let weight = noise(&[width], 2, 1.5, DType::F32);
                let cx = emulated(mode);
                let got = rms_norm(&cx, &x, &weight, 1e-6).unwrap();
                assert_all_emulated(&cx);
                assert_near(&got, &in_f64(&x, None, &weight, 1e-6));
                let cpu = rms_norm(&Context::default(), &x, &weight, 1e-6).unwrap();
                assert_close(&got, &cpu, tolerance(dtype) / 10.0);
                for r in 0..rows {
                    let alone = rms_norm(&cx, &x.narrow(0, r, 1).unwrap(), &weight, 1e-6);
                    assert_eq!(bits(&alone.unwrap()), bits(&got.narrow(0, r, 1).unwrap()));
                }
            }
        }
    }
}

#[test]
fn rms_norm_gated_follows_strides() {
    needs_clang!();
    for mode in MODES {
        for dtype in DTYPES {
            let x = noise(&[5, 6, 72], 3, 2.0, dtype);
            let z = noise(&[5, 9, 72], 4, 6.0, dtype).narrow(1, 2, 6).unwrap();
            let weight = noise(&[72], 5, 1.0, DType::F32);
            let cx = emulated(mode);
            let got = rms_norm_gated(&cx, &x, &z, &weight, 1e-5).unwrap();
            assert_all_emulated(&cx);
            assert_near(&got, &in_f64(&x, Some(&z), &weight, 1e-5));
            let got_strided = rms_norm_gated(&cx, &strided(&x), &strided(&z), &weight, 1e-5);
            assert_eq!(bits(&got_strided.unwrap()), bits(&got));
        }
    }
}

#[test]
fn gates_have_the_bits_of_the_cpu_op() {
    needs_clang!();
    type Op = fn(&Context, &Tensor, &Tensor) -> candle_specprefill::Result<Tensor>;
    for mode in MODES {
        for dtype in DTYPES {
            for op in [sigmoid_gate as Op, silu_gate] {
                // Large gates too: both tails of the exponential.
                let x = noise(&[3, 4, 50], 6, 2.0, dtype);
                let gate = noise(&[3, 4, 100], 7, 100.0, dtype);
                let gate = gate.narrow(2, 50, 50).unwrap();
                let cx = emulated(mode);
                let got = op(&cx, &x, &gate).unwrap();
                assert_all_emulated(&cx);
                let want = op(&Context::default(), &x, &gate).unwrap();
                assert_eq!(bits(&got), bits(&want));
                let other = op(&cx, &strided(&x), &gate).unwrap();
                assert_eq!(bits(&other), bits(&want));
                assert_eq!(
                    op(
                        &cx,
                        &x.narrow(0, 0, 0).unwrap(),
                        &gate.narrow(0, 0, 0).unwrap()
                    )
                    .unwrap()
                    .elem_count(),
                    0
                );
            }
        }
    }
}
