//! `metal/moe.metal`.

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::{moe, Context};

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

fn numbers(t: &Tensor) -> Vec<Vec<u32>> {
    t.to_vec2().unwrap()
}

/// Logits as columns of a wider tensor; of 16-bit dtypes, so that many are equal.
fn logits(rows: usize, experts: usize, dtype: DType) -> Tensor {
    let all = noise(&[rows + 1, experts + 3], 9, 3.0, dtype);
    all.narrow(0, 1, rows)
        .unwrap()
        .narrow(1, 2, experts)
        .unwrap()
}

#[test]
fn routing_agrees_with_the_cpu_op_and_f64() {
    needs_clang!();
    for mode in MODES {
        for dtype in DTYPES {
            for (rows, experts, top) in [(6, 256, 8), (5, 7, 7), (1, 33, 1), (3, 1200, 5)] {
                let x = logits(rows, experts, dtype);
                let cx = emulated(mode);
                let (chosen, shares) = moe::route(&cx, &x, top).unwrap();
                assert_all_emulated(&cx);
                let (want, want_shares) = moe::route(&Context::default(), &x, top).unwrap();
                assert_eq!(numbers(&chosen), numbers(&want));
                assert_close(&shares, &want_shares, 1e-6);
                let values = x.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
                let shares = shares.to_vec2::<f32>().unwrap();
                for ((row, chosen), shares) in values.iter().zip(numbers(&chosen)).zip(shares) {
                    let weights = chosen.iter().map(|e| (row[*e as usize] as f64).exp());
                    let sum: f64 = weights.clone().sum();
                    for (share, weight) in shares.iter().zip(weights) {
                        assert!((*share as f64 - weight / sum).abs() < 3e-7);
                    }
                }
            }
        }
    }
}

#[test]
fn a_rows_experts_do_not_depend_on_its_company() {
    needs_clang!();
    let x = logits(16, 64, DType::BF16);
    let cx = emulated(Mode::Fast);
    let one = |r| moe::route(&cx, &x.narrow(0, r, 1).unwrap(), 8).unwrap();
    let alone: Vec<_> = (0..16).map(one).collect();
    for m in 2..=16 {
        let from = 16 - m;
        let (chosen, shares) = moe::route(&cx, &x.narrow(0, from, m).unwrap(), 8).unwrap();
        let of = |t: &Tensor, i: usize| bits(&t.narrow(0, i, 1).unwrap());
        for i in 0..m {
            assert_eq!(of(&chosen, i), bits(&alone[from + i].0));
            assert_eq!(of(&shares, i), bits(&alone[from + i].1));
        }
    }
}

#[test]
fn damaged_logits_choose_as_many_as_on_the_cpu() {
    needs_clang!();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows = [
        [0.0, nan, 1.0, -0.0, nan],
        [nan; 5],
        [inf, -inf, inf, 2.0, nan],
        [-inf, -inf, -1.0, -inf, nan],
        [0.0, -0.0, 0.0, -0.0, -1.0],
    ];
    let x = Tensor::new(&rows, &Device::Cpu).unwrap();
    for mode in MODES {
        let (chosen, shares) = moe::route(&emulated(mode), &x, 4).unwrap();
        let (want, want_shares) = moe::route(&Context::default(), &x, 4).unwrap();
        assert_eq!(numbers(&chosen), numbers(&want));
        for (g, w) in floats(&shares).iter().zip(floats(&want_shares)) {
            assert!(
                (g - w).abs() < 1e-6 || g.is_nan() && w.is_nan(),
                "{g} for {w}"
            );
        }
    }
}

#[test]
fn combining_agrees_with_the_cpu_op_and_row_by_row() {
    needs_clang!();
    for mode in MODES {
        for dtype in DTYPES {
            let (rows, top, hidden) = (16, 3, 70);
            let outs = noise(&[rows, top, hidden], 1, 2.0, dtype);
            let (_, shares) =
                moe::route(&Context::default(), &logits(rows, 9, dtype), top).unwrap();
            let shared = noise(&[rows, hidden], 2, 2.0, dtype);
            let gates = noise(&[rows, 4], 3, 2.0, dtype).narrow(1, 2, 1).unwrap();
            let run = |cx: &Context, from: usize, n: usize| {
                let part = |t: &Tensor| t.narrow(0, from, n).unwrap();
                let parts = [&outs, &shares, &shared, &gates].map(part);
                moe::combine(cx, &parts[0], &parts[1], &parts[2], &parts[3]).unwrap()
            };
            let cx = emulated(mode);
            let got = run(&cx, 0, rows);
            assert_all_emulated(&cx);
            let bound = if dtype == DType::F32 {
                1e-6
            } else {
                tolerance(dtype) / 2.0
            };
            assert_close(&got, &run(&Context::default(), 0, rows), bound);
            for r in 0..rows {
                let row = got.narrow(0, r, 1).unwrap();
                assert_eq!(bits(&run(&emulated(Mode::Fast), r, 1)), bits(&row));
            }
        }
    }
}

#[test]
fn no_rows_and_wrong_calls() {
    needs_clang!();
    let cx = emulated(Mode::Checked);
    let x = logits(2, 5, DType::F16);
    let (chosen, _) = moe::route(&cx, &x.narrow(0, 0, 0).unwrap(), 2).unwrap();
    assert_eq!(chosen.dims(), [0, 2]);
    assert!(moe::route(&cx, &x, 6).is_err() && moe::route(&cx, &x, 0).is_err());
    let (_, shares) = moe::route(&cx, &x, 2).unwrap();
    let outs = noise(&[2, 2, 4], 1, 1.0, DType::F16);
    let (shared, gates) = (
        noise(&[2, 4], 1, 1.0, DType::BF16),
        noise(&[2, 1], 1, 1.0, DType::F16),
    );
    let error = moe::combine(&cx, &outs, &shares, &shared, &gates).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("BF16") && text.contains("f16"), "{text}");
}
