//! RMSNorm and the sigmoid gate against their oracles, and row by row against themselves.

mod support_ops;

use candle_core::{DType, Tensor};
use candle_specprefill::ops::{gates as gate, rms_norm::reference, rms_norm::reference_gated};
use candle_specprefill::ops::{rms_norm, rms_norm_gated, sigmoid_gate, silu_gate, Context};
use proptest::prelude::*;
use support_ops::*;

const EPS: f64 = 1e-6;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn agree_with_the_oracles(rows in 0usize..6, width in 1usize..300, dtype in 0usize..3) {
        let (dtype, cx) = (DTYPES[dtype], Context::default());
        let [x, z] = [1, 2].map(|seed| noise(&[rows, width], seed, 5.0, dtype));
        let w = noise(&[width], 3, 2.0, DType::F32);
        let t = tolerance(dtype);
        assert_close(&rms_norm(&cx, &x, &w, EPS).unwrap(), &reference(&x, &w, EPS).unwrap(), t);
        let got = rms_norm_gated(&cx, &x, &z, &w, EPS).unwrap();
        assert_close(&got, &reference_gated(&x, &z, &w, EPS).unwrap(), t);
        assert_close(&sigmoid_gate(&cx, &x, &z).unwrap(), &gate::reference(&x, &z).unwrap(), t);
        assert_close(&silu_gate(&cx, &x, &z).unwrap(), &gate::silu_reference(&x, &z).unwrap(), t);
    }
}

#[test]
fn a_row_is_the_same_in_any_company() {
    let cx = Context::default();
    for (dtype, width) in DTYPES.into_iter().flat_map(|d| [(d, 24), (d, 8200)]) {
        let [x, z] = [1, 2].map(|seed| noise(&[16, width], seed, 5.0, dtype));
        let w = noise(&[width], 3, 2.0, DType::F32);
        let row = |t: &Tensor, r, n| t.narrow(0, r, n).unwrap();
        for m in 1..=16 {
            let (x, z) = (strided(&row(&x, 0, m)), strided(&row(&z, 0, m)));
            let plain = rms_norm(&cx, &x, &w, EPS).unwrap();
            let gated = rms_norm_gated(&cx, &x, &z, &w, EPS).unwrap();
            let gate = sigmoid_gate(&cx, &x, &z).unwrap();
            let silu = silu_gate(&cx, &x, &z).unwrap();
            for r in 0..m {
                let (x, z) = (row(&x, r, 1), row(&z, r, 1));
                assert_eq!(
                    bits(&row(&plain, r, 1)),
                    bits(&rms_norm(&cx, &x, &w, EPS).unwrap())
                );
                let alone = rms_norm_gated(&cx, &x, &z, &w, EPS).unwrap();
                assert_eq!(bits(&row(&gated, r, 1)), bits(&alone));
                assert_eq!(
                    bits(&row(&gate, r, 1)),
                    bits(&sigmoid_gate(&cx, &x, &z).unwrap())
                );
                assert_eq!(
                    bits(&row(&silu, r, 1)),
                    bits(&silu_gate(&cx, &x, &z).unwrap())
                );
            }
        }
    }
}

#[test]
fn nan_stays_in_its_row() {
    let cx = Context::default();
    let good = noise(&[1, 40], 1, 1.0, DType::F32);
    let bad = (&good * f64::NAN).unwrap();
    let x = Tensor::cat(&[&good, &bad, &good], 0).unwrap();
    let w = noise(&[40], 3, 2.0, DType::F32);
    for out in [
        rms_norm(&cx, &x, &w, EPS).unwrap(),
        sigmoid_gate(&cx, &x, &x).unwrap(),
    ] {
        let nan: Vec<bool> = floats(&out).iter().map(|v| v.is_nan()).collect();
        assert_eq!(
            nan,
            [vec![false; 40], vec![true; 40], vec![false; 40]].concat()
        );
    }
}

#[test]
fn mixed_dtypes_are_errors_that_name_both() {
    let cx = Context::default();
    let x = noise(&[2, 8], 1, 1.0, DType::BF16);
    let z = noise(&[2, 8], 1, 1.0, DType::F16);
    let w = noise(&[8], 1, 1.0, DType::F32);
    for error in [
        rms_norm_gated(&cx, &x, &z, &w, EPS).unwrap_err(),
        sigmoid_gate(&cx, &x, &z).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.contains("F16") && text.contains("bf16"), "{text}");
    }
    assert!(rms_norm(&cx, &x, &z, EPS).is_err());
}
