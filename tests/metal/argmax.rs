//! `metal/argmax.metal`.

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::argmax::{argmax, reference, NAN, NOTHING};
use candle_specprefill::ops::Context;
use metal_emulator::Mode;

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

fn numbers(t: &Tensor) -> Vec<u32> {
    t.to_vec1().unwrap()
}

/// Rows of a wider tensor, between whose columns larger values lie.
fn logits(rows: usize, columns: usize, seed: u64, dtype: DType) -> Tensor {
    let all = noise(&[rows + 1, columns], seed, 30.0, dtype);
    let high = Tensor::full(1000f32, (rows + 1, 3), &Device::Cpu).unwrap();
    let high = high.to_dtype(dtype).unwrap();
    let all = Tensor::cat(&[&high, &all, &high], 1).unwrap();
    let all = all.narrow(0, 1, rows).unwrap();
    all.narrow(1, 3, columns).unwrap()
}

fn same(cx: &Context, x: &Tensor) -> Vec<u32> {
    let got = argmax(cx, x).unwrap();
    assert_eq!((got.dtype(), got.dims()), (DType::U32, &x.dims()[..1]));
    let got = numbers(&got);
    assert_eq!(got, numbers(&reference(x).unwrap()));
    assert_eq!(got, numbers(&argmax(&Context::default(), x).unwrap()));
    got
}

#[test]
fn the_best_column_is_the_cpus() {
    needs_clang!();
    for mode in MODES {
        for dtype in DTYPES {
            let cx = emulated(mode);
            // One part, its edges, and more parts than a simdgroup has lanes.
            for (rows, columns) in [(5, 1), (17, 300), (2, 8192), (3, 8193), (1, 300_000)] {
                same(&cx, &logits(rows, columns, 5, dtype));
            }
            assert_all_emulated(&cx);
        }
    }
}

#[test]
fn a_vocabulary_row_by_row() {
    needs_clang!();
    for dtype in DTYPES {
        let x = logits(4, 248_320, 7, dtype);
        let together = same(&emulated(Mode::Fast), &x);
        // 16-bit values repeat: the first of them counts, wherever its part is.
        for (row, best) in together.iter().enumerate() {
            let row = x.narrow(0, row, 1).unwrap();
            assert_eq!(same(&emulated(Mode::Fast), &row), [*best]);
        }
        same(&emulated(Mode::Checked), &x.narrow(0, 2, 1).unwrap());
    }
}

#[test]
fn equal_values_nan_and_infinities() {
    needs_clang!();
    let (nan, inf, tiny) = (f32::NAN, f32::INFINITY, f32::from_bits(1));
    let columns = 20_000;
    let row = |fill: f32, set: &[(usize, f32)]| {
        let mut row = vec![fill; columns];
        set.iter().for_each(|(i, v)| row[*i] = *v);
        row
    };
    let rows = [
        row(1.0, &[]),
        row(0.0, &[(9000, 7.0), (9001, 7.0), (19_999, 7.0)]),
        row(-0.0, &[(3, 0.0)]),
        row(-inf, &[(18_000, -3e4)]),
        row(-inf, &[]),
        row(nan, &[]),
        row(inf, &[(17_000, nan), (17_001, -nan)]),
        row(0.0, &[(17_000, -nan), (12_345, -nan)]),
        row(0.0, &[(40, inf), (41, inf)]),
        row(-tiny, &[(50, 0.0), (77, tiny)]),
        row(-3.0, &[(8191, -2.0), (8192, -2.0)]),
    ];
    let want = [
        0,
        9000,
        0,
        18_000,
        NOTHING,
        NAN,
        NAN | 17_000,
        NAN | 12_345,
        40,
        77,
        8191,
    ];
    let all = Tensor::new(rows.to_vec(), &Device::Cpu).unwrap();
    for mode in MODES {
        for dtype in DTYPES {
            let got = same(&emulated(mode), &all.to_dtype(dtype).unwrap());
            // The smallest f32 is 0 in 16-bit dtypes.
            let skip = |i: &usize| dtype == DType::F32 || *i != 9;
            for i in (0..rows.len()).filter(skip) {
                assert_eq!(got[i], want[i], "row {i} {dtype:?}");
            }
        }
    }
}

#[test]
fn no_rows_strided_columns_and_wrong_calls() {
    needs_clang!();
    let cx = emulated(Mode::Checked);
    let x = logits(6, 40, 3, DType::BF16);
    assert!(same(&cx, &x.narrow(0, 0, 0).unwrap()).is_empty());
    same(&cx, &x.t().unwrap());
    assert!(argmax(&cx, &x.narrow(1, 0, 0).unwrap()).is_err());
    assert!(argmax(&cx, &x.narrow(0, 0, 1).unwrap().squeeze(0).unwrap()).is_err());
    assert!(argmax(&cx, &x.to_dtype(DType::U32).unwrap()).is_err());
}
