//! `metal/attention.metal`.

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::attention::{attention_probabilities, reference};
use candle_specprefill::ops::{attention, Context};

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

struct Case {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    len: usize,
    scale: f32,
}

/// Views: queries with a gap behind each head, caches with an offset and room to spare, whose free slots hold NaN.
fn case(rows: usize, kv_heads: usize, group: usize, dim: usize, len: usize, dtype: DType) -> Case {
    let q = noise(&[rows, kv_heads * group, 2 * dim], 1, 2.0, dtype);
    let cache = |seed| {
        let used = noise(&[kv_heads + 1, len, dim], seed, 2.0, dtype);
        let free = Tensor::full(f32::NAN, (kv_heads + 1, 7, dim), &Device::Cpu).unwrap();
        let all = Tensor::cat(&[&used, &free.to_dtype(dtype).unwrap()], 1).unwrap();
        all.narrow(0, 1, kv_heads).unwrap()
    };
    Case {
        q: q.narrow(2, dim, dim).unwrap(),
        k: cache(2),
        v: cache(3),
        len,
        scale: (dim as f32).powf(-0.5),
    }
}

impl Case {
    /// Rows `from .. from + n`, when the cache has been filled up to them.
    fn part(&self, mode: Mode, from: usize, n: usize) -> Tensor {
        let cx = emulated(mode);
        let q = self.q.narrow(0, from, n).unwrap();
        let len = self.len - self.q.dims()[0] + from + n;
        let y = attention(&cx, &q, &self.k, &self.v, len, self.scale).unwrap();
        assert_all_emulated(&cx);
        y
    }

    fn agrees(&self, mode: Mode) {
        let rows = self.q.dims()[0];
        let got = self.part(mode, 0, rows);
        let cx = Context::default();
        let want = attention(&cx, &self.q, &self.k, &self.v, self.len, self.scale).unwrap();
        let tolerance = tolerance(self.q.dtype());
        assert_close(&got, &want, tolerance);
        // The oracle in f64 of the very same inputs.
        let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        let cache = |t: &Tensor| wide(&t.narrow(1, 0, self.len).unwrap());
        let (q, k, v) = (wide(&self.q), cache(&self.k), cache(&self.v));
        let want = reference(&q, &k, &v, self.len, self.scale).unwrap();
        let f64s = in_f64(&q, &k, &v, self.scale as f64);
        for (w, f) in floats(&want).iter().zip(&f64s) {
            assert!((*w as f64 - f).abs() < 1e-5 * (1.0 + f.abs()));
        }
        for (g, f) in floats(&got).iter().zip(&f64s) {
            let bound = tolerance as f64 / 2.0 * (1.0 + f.abs());
            assert!((*g as f64 - f).abs() <= bound, "{g} for {f}");
        }
    }
}

fn in_f64(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Vec<f64> {
    let (rows, heads, dim) = q.dims3().unwrap();
    let (kv_heads, len, _) = k.dims3().unwrap();
    let (q, k, v) = (floats(q), floats(k), floats(v));
    let mut out = vec![];
    for r in 0..rows {
        for h in 0..heads {
            let q = &q[(r * heads + h) * dim..][..dim];
            let slot = |s: usize| (h / (heads / kv_heads) * len + s) * dim;
            let seen = len - rows + r + 1;
            let dot = |s| {
                (0..dim)
                    .map(|d| q[d] as f64 * k[slot(s) + d] as f64)
                    .sum::<f64>()
            };
            let scores: Vec<f64> = (0..seen).map(|s| dot(s) * scale).collect();
            let top = scores.iter().cloned().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..dim).map(|d| {
                let values = (0..seen).map(|s| weights[s] * v[slot(s) + d] as f64);
                values.sum::<f64>() / sum
            }));
        }
    }
    out
}

#[test]
fn decode_and_verify_rows_agree_with_the_cpu_op_and_f64() {
    needs_clang!();
    for dtype in DTYPES {
        case(1, 2, 3, 64, 129, dtype).agrees(Mode::Fast);
        case(5, 1, 4, 128, 260, dtype).agrees(Mode::Fast);
        case(3, 2, 6, 256, 140, dtype).agrees(Mode::Fast);
        case(3, 2, 2, 64, 130, dtype).agrees(Mode::Checked);
        case(2, 1, 3, 128, 17, dtype).agrees(Mode::Checked);
        case(2, 1, 5, 256, 9, dtype).agrees(Mode::Checked);
    }
    case(1, 1, 1, 64, 1, DType::BF16).agrees(Mode::Checked);
    case(4, 2, 2, 32, 131, DType::F16).agrees(Mode::Checked);
}

#[test]
fn prefill_agrees_with_the_cpu_op_and_f64() {
    needs_clang!();
    for dtype in DTYPES {
        case(40, 2, 3, 64, 70, dtype).agrees(Mode::Fast);
        case(17, 1, 2, 128, 17, dtype).agrees(Mode::Fast);
        case(33, 1, 2, 256, 50, dtype).agrees(Mode::Fast);
        case(17, 2, 3, 64, 37, dtype).agrees(Mode::Checked);
        case(18, 1, 1, 128, 35, dtype).agrees(Mode::Checked);
        case(17, 1, 1, 256, 19, dtype).agrees(Mode::Checked);
        case(17, 1, 2, 32, 40, dtype).agrees(Mode::Checked);
    }
}

#[test]
fn a_row_is_the_same_in_any_company() {
    needs_clang!();
    for (dtype, dim) in [(DType::BF16, 256), (DType::F16, 64), (DType::F32, 128)] {
        // Rows on both sides of a split's edge.
        let c = case(24, 2, 3, dim, 128 + 12, dtype);
        let alone: Vec<Vec<u32>> = (0..24).map(|r| bits(&c.part(Mode::Fast, r, 1))).collect();
        for m in 2..=16 {
            for from in [0, 5, 24 - m] {
                if from + m <= 24 {
                    let got = bits(&c.part(Mode::Fast, from, m));
                    assert_eq!(got, alone[from..from + m].concat(), "{m} rows from {from}");
                }
            }
        }
    }
}

#[test]
fn probabilities_agree_with_the_cpu_op() {
    needs_clang!();
    for (mode, dtype, rows, kv_heads, group, dim, len) in [
        (Mode::Fast, DType::BF16, 5, 2, 3, 64, 700),
        (Mode::Fast, DType::F32, 2, 1, 4, 256, 129),
        (Mode::Fast, DType::F16, 1, 2, 1, 128, 3),
        (Mode::Checked, DType::F32, 3, 2, 3, 64, 150),
        (Mode::Checked, DType::BF16, 2, 1, 2, 256, 40),
        (Mode::Checked, DType::F16, 9, 1, 1, 128, 9),
    ] {
        let c = case(rows, kv_heads, group, dim, len, dtype);
        let cx = emulated(mode);
        let got = attention_probabilities(&cx, &c.q, &c.k, len, c.scale).unwrap();
        assert_all_emulated(&cx);
        let cpu = Context::default();
        let want = attention_probabilities(&cpu, &c.q, &c.k, len, c.scale).unwrap();
        assert_eq!((got.dtype(), got.dims()), (DType::F32, want.dims()));
        for (g, w) in floats(&got).iter().zip(floats(&want)) {
            assert!((g - w).abs() <= 1e-8 + 2e-6 * w, "{g} for {w}");
        }
    }
    let c = case(3, 1, 2, 64, 5, DType::F16);
    let none = c.q.narrow(0, 0, 0).unwrap();
    let p = attention_probabilities(&emulated(Mode::Fast), &none, &c.k, 5, 1.0).unwrap();
    assert_eq!(p.dims(), [2, 0, 5]);
}

#[test]
fn nan_stays_in_the_rows_that_see_it() {
    needs_clang!();
    let c = case(6, 1, 2, 64, 140, DType::F32);
    let clean = bits(&c.part(Mode::Fast, 0, 6));
    // The fourth row's own slot.
    let poison = Tensor::full(f32::NAN, (1, 1, 64), &Device::Cpu).unwrap();
    let poisoned = |t: &Tensor| {
        let part = |from, n| t.narrow(1, from, n).unwrap();
        Tensor::cat(&[&part(0, 137), &poison, &part(138, 9)], 1).unwrap()
    };
    let c = Case {
        k: poisoned(&c.k),
        v: poisoned(&c.v),
        ..c
    };
    let got = bits(&c.part(Mode::Fast, 0, 6));
    assert_eq!(got[..3 * 128], clean[..3 * 128]);
    assert!(got[3 * 128..].iter().all(|b| f32::from_bits(*b).is_nan()));
}

/// Prefill: NaN in one row's query and infinity or NaN in one late slot's value leave the other rows of the tile as they are.
#[test]
fn a_bad_row_of_a_prefill_tile_stays_alone() {
    needs_clang!();
    for (mode, dtype) in [
        (Mode::Fast, DType::F32),
        (Mode::Fast, DType::BF16),
        (Mode::Checked, DType::F16),
    ] {
        for bad in [f32::NAN, f32::INFINITY] {
            let (rows, row) = (24, 13);
            let c = case(rows, 1, 2, 64, 40, dtype);
            let clean = bits(&c.part(mode, 0, rows));
            let poison = |shape: &[usize]| {
                let t = Tensor::full(bad, shape, &Device::Cpu).unwrap();
                t.to_dtype(dtype).unwrap()
            };
            let part = |t: &Tensor, dim, from, n| t.narrow(dim, from, n).unwrap();
            let spoiled = |t: &Tensor, dim: usize, at: usize| {
                let mut shape = t.dims().to_vec();
                shape[dim] = 1;
                let after = t.dims()[dim] - at - 1;
                let parts = [
                    part(t, dim, 0, at),
                    poison(&shape),
                    part(t, dim, at + 1, after),
                ];
                Tensor::cat(&parts, dim).unwrap()
            };
            let one_query = Case {
                q: spoiled(&c.q, 0, row),
                k: c.k.clone(),
                v: c.v.clone(),
                ..c
            };
            let got = bits(&one_query.part(mode, 0, rows));
            let own = row * 128..(row + 1) * 128;
            assert_eq!(got[..own.start], clean[..own.start]);
            assert_eq!(got[own.end..], clean[own.end..]);
            assert!(floats(&one_query.part(mode, row, 1))
                .iter()
                .all(|v| v.is_nan()));
            // Slot `40 - rows + row` belongs to that row: rows before it do not see it.
            let one_value = Case {
                v: spoiled(&c.v, 1, 40 - rows + row),
                ..c
            };
            let y = one_value.part(mode, 0, rows);
            assert_eq!(bits(&y)[..own.start], clean[..own.start]);
            assert!(floats(&part(&y, 0, row, rows - row))
                .iter()
                .all(|v| !v.is_finite()));
        }
    }
}

#[test]
fn attention_of_nothing_strided_lanes_and_other_head_dims() {
    needs_clang!();
    let c = case(4, 1, 2, 64, 20, DType::F16);
    let cx = emulated(Mode::Checked);
    let none = c.q.narrow(0, 0, 0).unwrap();
    let none = attention(&cx, &none, &c.k, &c.v, 20, c.scale).unwrap();
    assert_eq!(none.dims(), [0, 2, 64]);
    let (q, k, v) = (strided(&c.q), strided(&c.k), strided(&c.v));
    let got = attention(&cx, &q, &k, &v, 20, c.scale).unwrap();
    assert_eq!(bits(&got), bits(&c.part(Mode::Checked, 0, 4)));
    let odd = case(1, 1, 1, 48, 3, DType::F32);
    let error = attention(&cx, &odd.q, &odd.k, &odd.v, 3, 1.0).unwrap_err();
    assert!(error.to_string().contains("32, 64, 128 and 256"), "{error}");
}
