//! RoPE against its oracle, MLX's and Hugging Face's values, and row by row against itself.

mod support_ops;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::rope::{reference, Rope, RopeLayout};
use candle_specprefill::ops::{rope, Context};
use candle_specprefill::Error;
use proptest::prelude::*;
use support_ops::*;

fn positions(p: &[u32]) -> Tensor {
    Tensor::new(p, &Device::Cpu).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(80) })]

    #[test]
    fn agrees_with_the_oracle(
        p in prop::collection::vec(0u32..1_048_577, 0..6), heads in 1usize..4, pairs in 0usize..20, rest in 0usize..9,
        missing in 0usize..4, dtype in 0usize..3, interleaved: bool, axes: bool, scale in 0.1f32..2.0, pre in 0.5f32..2.0,
    ) {
        let (dtype, rows) = (DTYPES[dtype], p.len());
        let layout = if interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
        let table: Vec<f32> = (0..pairs.saturating_sub(missing)).map(|i| 0.7f32.powi(i as i32)).collect();
        let mut op = Rope::from_frequencies(table, 2 * pairs).unwrap().with_layout(layout);
        op = op.with_position_scale(scale).with_pre_scale(pre);
        let mut at = positions(&p);
        if axes {
            op = op.with_sections([pairs - pairs / 3 * 2, pairs / 3, pairs / 3]).unwrap();
            let other: Vec<u32> = p.iter().map(|p| p / 2 + 3).collect();
            at = Tensor::stack(&[&at, &positions(&other), &at], 0).unwrap().to_dtype(DType::I64).unwrap();
        }
        let x = noise(&[rows, heads, 2 * pairs + rest + 1], 1, 3.0, dtype);
        let got = rope(&Context::default(), &x, &at, &op).unwrap();
        if rows > 0 && pairs > 0 {
            assert_close(&got, &reference(&x, &at, &op).unwrap(), tolerance(dtype));
        }
        let tail = |t: &Tensor| bits(&t.narrow(2, 2 * pairs, rest + 1).unwrap());
        if rows > 0 {
            prop_assert_eq!(tail(&got), tail(&x));
        }
        for r in 0..rows {
            let alone = rope(
                &Context::default(), &x.narrow(0, r, 1).unwrap(), &at.narrow(at.rank() - 1, r, 1).unwrap(), &op,
            );
            prop_assert_eq!(bits(&alone.unwrap()), bits(&got.narrow(0, r, 1).unwrap()));
        }
        if rows > 0 {
            prop_assert_eq!(bits(&rope(&Context::default(), &strided(&x), &at, &op).unwrap()), bits(&got));
        }
    }
}

fn golden() -> HashMap<String, Tensor> {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/golden/rope/rope.safetensors"
    );
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

/// Whether `a` and `b`, of a 16-bit dtype, are within a unit in the last place and `slack`.
fn within_an_ulp(a: &Tensor, b: &Tensor, slack: f32) -> bool {
    let mantissa = if a.dtype() == DType::BF16 { 7 } else { 10 };
    let step = |v: f32| 2f32.powi(v.max(2f32.powi(-10)).log2().floor() as i32 - mantissa);
    let mut pairs = floats(a).into_iter().zip(floats(b));
    pairs.all(|(a, b)| (a - b).abs() <= step(a.abs().max(b.abs())) + slack)
}

/// Keys are `{dtype}.d{dims}.{half|trad}.off{offset}.{base{base}|freqs}.s{scale}[.once]`.
#[test]
fn equals_mlx() {
    let golden = golden();
    // [1, heads, rows, dim] to rows first, and back.
    let rows_first = |t: &Tensor| t.squeeze(0).unwrap().transpose(0, 1).unwrap();
    let mut seen = 0;
    for (key, want) in golden
        .iter()
        .filter(|(k, _)| k.contains(".off") && !k.contains("batch"))
    {
        let (scale_at, parts) = (key.find(".s").unwrap(), key.split('.').collect::<Vec<_>>());
        let number = |i: usize, prefix: &str| parts[i].strip_prefix(prefix).unwrap().parse::<f64>();
        let (dims, offset) = (
            number(1, "d").unwrap() as usize,
            number(3, "off").unwrap() as u32,
        );
        let once = key.ends_with(".once");
        let scale: f32 = key[scale_at + 2..]
            .trim_end_matches(".once")
            .parse()
            .unwrap();
        let mut op = match parts[4] {
            "freqs" => {
                let table: Vec<f32> = floats(&golden["freqs_periods"]);
                Rope::from_frequencies(table.iter().map(|p| 1.0 / p).collect::<Vec<_>>(), dims)
                    .unwrap()
            }
            _ => Rope::new(number(4, "base").unwrap(), dims).unwrap(),
        };
        if parts[2] == "trad" {
            op = op.with_layout(RopeLayout::Interleaved);
        }
        let x = rows_first(&golden["x"]).to_dtype(want.dtype()).unwrap();
        let at: Vec<u32> = (0..9).map(|t| offset + t).collect();
        let op = op.with_position_scale(scale);
        let got = rope(&Context::default(), &x, &positions(&at), &op).unwrap();
        let want = rows_first(want);
        match want.dtype() {
            // Frequencies differ in their last bits (exp against pow), and a position multiplies that: by
            // at most 4.6e-9 at 16 dims and 8.4e-8 at 64 (whose frequencies fall more slowly).
            DType::F32 => {
                let per_position = if dims == 16 { 1e-8 } else { 1.2e-7 };
                let worst = floats(&got)
                    .into_iter()
                    .zip(floats(&want))
                    .map(|(g, w)| (g - w).abs());
                let worst = worst.fold(0f32, f32::max);
                assert!(
                    worst <= 1.5e-6 + per_position * offset as f32,
                    "{key}: {worst}"
                );
            }
            // The angles' difference, as above, shows in values near zero.
            _ if once => assert!(within_an_ulp(&got, &want, 1e-8 * offset as f32), "{key}"),
            // MLX rounds cosines, sines and products here, so this only guards against a wrong angle.
            dtype => assert_close(&got, &want, 4.0 * tolerance(dtype)),
        }
        seen += 1;
    }
    assert!(seen > 80, "{seen}");
}

#[test]
fn every_row_has_its_own_position() {
    let golden = golden();
    let x = golden["xb"]
        .squeeze(2)
        .unwrap()
        .to_dtype(DType::BF16)
        .unwrap();
    let want = golden["bf16.d16.half.batch_offsets"].squeeze(2).unwrap();
    let op = Rope::new(1e7, 16).unwrap();
    let got = rope(&Context::default(), &x, &positions(&[0, 5, 4097]), &op).unwrap();
    assert_close(&got, &want, 4.0 * tolerance(DType::BF16));
}

#[test]
fn wrong_calls_are_errors() {
    let cx = Context::default();
    let x = noise(&[2, 1, 8], 1, 1.0, DType::F32);
    let op = Rope::new(1e4, 8).unwrap();
    let floats = Tensor::new(&[0f32, 1.0], &Device::Cpu).unwrap();
    assert!(matches!(
        rope(&cx, &x, &floats, &op),
        Err(Error::DType { .. })
    ));
    assert!(rope(&cx, &x, &positions(&[0]), &op).is_err());
    assert!(rope(&cx, &x, &positions(&[0, 1]), &Rope::new(1e4, 10).unwrap()).is_err());
    assert!(Rope::new(1e4, 7).is_err());
    assert!(Rope::new(f64::NAN, 8).is_err());
}
