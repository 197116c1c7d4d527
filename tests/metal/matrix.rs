//! `metal/affine_matrix.metal`: the form for wide verify passes.

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::{gate_up_silu, matmul, silu_gate, Context};

use crate::matmul::{assert_exact, parts};
use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

fn wide(mode: Mode) -> Context {
    emulated(mode).with_verify_rows(16)
}

/// M = 1…16: f64's values, and every row as it is alone.
fn widths(mode: Mode, width: usize) {
    for (j, group) in [64, 128].into_iter().enumerate() {
        for (d, dtype) in [DType::BF16, DType::F16].into_iter().enumerate() {
            let (n, k) = ([21, 33][d], group * [5, 3][j]);
            let halves = DTYPES[(d + j + width) % 3];
            let p = parts((width * 9 + j * 3 + d) as u64, n, k, width, group, halves);
            let x = noise(&[16, k], 5, 1.5, dtype);
            let cx = wide(mode);
            let alone: Vec<_> = (0..16)
                .map(|r| bits(&matmul(&cx, &x.narrow(0, r, 1).unwrap(), &p.weight).unwrap()))
                .collect();
            for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16] {
                let x = x.narrow(0, 0, m).unwrap();
                let y = matmul(&cx, &x, &p.weight).unwrap();
                let what =
                    format!("{width} bits, groups of {group}, {m} rows, {dtype:?}, {mode:?}");
                assert_eq!(bits(&y), alone[..m].concat(), "{what}");
                assert_exact(&y, &x, &p.exact, &what);
            }
            assert_all_emulated(&cx);
            let routes = cx.routes().snapshot();
            assert!(routes.keys().all(|r| r.contains("matrix")), "{routes:?}");
        }
    }
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
widths!(matrix_2_bits 2, matrix_3_bits 3, matrix_4_bits 4, matrix_5_bits 5, matrix_6_bits 6);

/// A row of zeros and one of large values do not disturb their neighbours, and scales of both signs work.
#[test]
fn matrix_rows_do_not_mix() {
    needs_clang!();
    let p = parts(5, 16, 256, 4, 64, DType::BF16);
    let x = noise(&[3, 256], 7, 1.0, DType::BF16);
    let loud = Tensor::full(1e30f32, (1, 256), &Device::Cpu).unwrap();
    let loud = loud.to_dtype(DType::BF16).unwrap();
    let zeros = loud.zeros_like().unwrap();
    let cx = wide(Mode::Checked);
    let y = matmul(
        &cx,
        &Tensor::cat(&[&x, &loud, &zeros], 0).unwrap(),
        &p.weight,
    )
    .unwrap();
    let alone = matmul(&cx, &x, &p.weight).unwrap();
    assert_eq!(bits(&y.narrow(0, 0, 3).unwrap()), bits(&alone));
    assert!(floats(&y.narrow(0, 4, 1).unwrap())
        .iter()
        .all(|v| *v == 0.0));
}

/// The gated pair keeps the form of its two products.
#[test]
fn matrix_gate_up_equals_its_parts() {
    needs_clang!();
    let weight = |seed| parts(seed, 24, 128, 4, 64, DType::F16).weight;
    let (gate, up) = (weight(1), weight(2));
    let x = noise(&[6, 128], 3, 1.0, DType::F16);
    let cx = wide(Mode::Fast);
    let y = gate_up_silu(&cx, &x, &gate, &up).unwrap();
    let (g, u) = (
        matmul(&cx, &x, &gate).unwrap(),
        matmul(&cx, &x, &up).unwrap(),
    );
    assert_eq!(bits(&y), bits(&silu_gate(&cx, &u, &g).unwrap()));
    assert_all_emulated(&cx);
}
