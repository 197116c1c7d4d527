//! `metal/rope.metal`.

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::rope::{Rope, RopeLayout};
use candle_specprefill::ops::{rope, Context};

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

const FAR: [u32; 5] = [0, 1, 4095, 131_071, 1_048_576];

fn case(mode: Mode, dtype: DType, layout: RopeLayout, axes: bool, index: DType) {
    let (pairs, rest, heads) = (12, 7, 5);
    let table: Vec<f32> = (0..pairs - 1).map(|i| 0.7f32.powi(i)).collect();
    let mut op = Rope::from_frequencies(table, 2 * pairs as usize).unwrap();
    op = op
        .with_layout(layout)
        .with_position_scale(0.75)
        .with_pre_scale(1.1);
    let mut at = Tensor::new(&FAR, &Device::Cpu).unwrap();
    if axes {
        op = op.with_sections([4, 4, 4]).unwrap();
        let other = Tensor::new(&[7u32, 3, 9, 2, 50_000], &Device::Cpu).unwrap();
        at = Tensor::stack(&[&at, &other, &at], 0).unwrap();
    }
    // A view: neither positions nor lanes start where their storage does, and rows have gaps.
    let at = Tensor::cat(&[&at, &at], at.rank() - 1).unwrap();
    let at = at.to_dtype(index).unwrap();
    let at = at.narrow(at.rank() - 1, FAR.len(), FAR.len()).unwrap();
    let width = 2 * pairs as usize + rest;
    let x = noise(&[FAR.len(), heads + 2, width], 3, 3.0, dtype);
    let x = x.narrow(1, 2, heads).unwrap();
    let cx = emulated(mode);
    let got = rope(&cx, &x, &at, &op).unwrap();
    assert_all_emulated(&cx);
    let want = rope(&Context::default(), &x, &at, &op).unwrap();
    let tolerance = match dtype {
        DType::F32 => 5e-7,
        other => tolerance(other) / 2.0,
    };
    assert_close(&got, &want, tolerance);
    let tail = |t: &Tensor| bits(&t.narrow(2, 2 * pairs as usize, rest).unwrap());
    assert_eq!(tail(&got), tail(&x));
    for r in 0..FAR.len() {
        let at = at.narrow(at.rank() - 1, r, 1).unwrap();
        let alone = rope(&emulated(mode), &x.narrow(0, r, 1).unwrap(), &at, &op).unwrap();
        assert_eq!(bits(&alone), bits(&got.narrow(0, r, 1).unwrap()), "row {r}");
    }
}

#[test]
fn rope_agrees_with_the_cpu_op() {
    needs_clang!();
    for mode in MODES {
        for dtype in DTYPES {
            case(mode, dtype, RopeLayout::HalfSplit, false, DType::U32);
            case(mode, dtype, RopeLayout::Interleaved, true, DType::I64);
        }
        case(mode, DType::BF16, RopeLayout::HalfSplit, true, DType::U32);
        case(mode, DType::F32, RopeLayout::Interleaved, false, DType::I64);
    }
}

/// Sines and cosines of the f32 angle, against f64, and what the angle's own rounding adds.
#[test]
fn rope_is_accurate_at_far_positions() {
    needs_clang!();
    let op = Rope::new(10_000.0, 64).unwrap();
    let positions: Vec<u32> = (0..400u32).map(|i| i * 2621 + i % 7).chain(FAR).collect();
    let ones = [vec![1f32; 32], vec![0f32; 32]].concat();
    let x = Tensor::new(ones, &Device::Cpu).unwrap();
    let x = x.reshape((1, 1, 64)).unwrap();
    let x = x.broadcast_as((positions.len(), 1, 64)).unwrap();
    let at = Tensor::new(positions.as_slice(), &Device::Cpu).unwrap();
    let got = floats(&rope(&emulated(Mode::Fast), &x, &at, &op).unwrap());
    let (mut worst, mut exact) = (0f64, 0f64);
    for (p, row) in positions.iter().zip(got.chunks(64)) {
        for (i, f) in op.frequencies().iter().enumerate() {
            let angle = (*p as f32 * f) as f64;
            let true_angle = *p as f64 * 10_000f64.powf(-2.0 * i as f64 / 64.0);
            let (c, s) = (row[i] as f64, row[i + 32] as f64);
            worst = worst
                .max((c - angle.cos()).abs())
                .max((s - angle.sin()).abs());
            exact = exact.max((c - true_angle.cos()).abs());
        }
    }
    println!("sin and cos of the f32 angle: {worst:.2e}; against an f64 angle: {exact:.2e}");
    assert!(worst < 1.2e-7);
    // An f32 angle near 2^20 has steps of 1/8: the price of f32 angles, which every published implementation pays.
    assert!(exact < 0.1);
}

#[test]
fn rope_of_nothing_and_of_strided_lanes() {
    needs_clang!();
    let op = Rope::new(1e4, 8).unwrap();
    let x = noise(&[3, 2, 10], 5, 1.0, DType::F16);
    let at = Tensor::new(&[5u32, 2, 900], &Device::Cpu).unwrap();
    let none = rope(
        &emulated(Mode::Checked),
        &x.narrow(0, 0, 0).unwrap(),
        &at.narrow(0, 0, 0).unwrap(),
        &op,
    );
    assert_eq!(none.unwrap().dims(), [0, 2, 10]);
    let whole = rope(&emulated(Mode::Checked), &x, &at, &op).unwrap();
    let got = rope(&emulated(Mode::Checked), &strided(&x), &at, &op).unwrap();
    assert_eq!(bits(&got), bits(&whole));
}
