//! What every op does with the tensors that it is given: views count as their copies, other dtypes are errors that name both, and what
//! kernels cannot count is refused before memory is asked for.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::affine::AffineFormat;
use candle_specprefill::ops::affine_matmul::{embed, matmul_experts, Weight};
use candle_specprefill::ops::argmax::argmax;
use candle_specprefill::ops::attention::{attention, attention_probabilities};
use candle_specprefill::ops::gated_delta::{
    gated_delta, GatedDeltaDims, GatedDeltaParams, GatedDeltaState, Keep,
};
use candle_specprefill::ops::launch::{Launcher, Plan};
use candle_specprefill::ops::rope::Rope;
use candle_specprefill::ops::{
    gate_up_silu, matmul, moe, rms_norm, rms_norm_gated, rope, sigmoid_gate, silu_gate, Context,
};
use candle_specprefill::Result;
use metal_emulator::Mode;

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

type Run = fn(&Context, &[Tensor]) -> Result<Vec<Tensor>>;

/// An op, its inputs, and which of them may have another float dtype than the others.
struct Op {
    name: &'static str,
    inputs: Vec<Tensor>,
    any_float: &'static [usize],
    run: Run,
}

const ACTIVATION: DType = DType::BF16;
const FORMAT: (usize, usize) = (4, 32);
const DIMS: GatedDeltaDims = GatedDeltaDims {
    key_heads: 1,
    value_heads: 2,
    key_dim: 32,
    value_dim: 4,
    taps: 3,
};

fn weight(t: &[Tensor]) -> Result<Weight> {
    let format = AffineFormat::new(FORMAT.0, FORMAT.1)?;
    Weight::affine(&t[0], &t[1], &t[2], format, &Device::Cpu)
}

fn ops() -> Vec<Op> {
    let mut seed = 0;
    let mut float = |shape: &[usize], dtype| {
        seed += 1;
        noise(shape, seed, 1.0, dtype)
    };
    let numbers = |v: &[u32], shape: &[usize]| Tensor::from_slice(v, shape, &Device::Cpu).unwrap();
    let codes = |n: u32, k: u32| {
        let words: Vec<u32> = (0..n * k / 8).map(|i| i.wrapping_mul(2654435761)).collect();
        numbers(&words, &[n as usize, k as usize / 8])
    };
    let mut ops = vec![];
    let mut op = |name, inputs, any_float, run| {
        ops.push(Op {
            name,
            inputs,
            any_float,
            run,
        })
    };
    let (a, f) = (ACTIVATION, DType::F32);
    let x = float(&[3, 40], a);
    op("rms_norm", vec![x, float(&[40], f)], &[0], |cx, t| {
        Ok(vec![rms_norm(cx, &t[0], &t[1], 1e-6)?])
    });
    let (x, z) = (float(&[3, 2, 40], a), float(&[3, 2, 40], a));
    let norm = vec![x.clone(), z.clone(), float(&[40], f)];
    op("rms_norm_gated", norm, &[], |cx, t| {
        Ok(vec![rms_norm_gated(cx, &t[0], &t[1], &t[2], 1e-6)?])
    });
    op("sigmoid_gate", vec![x.clone(), z.clone()], &[], |cx, t| {
        Ok(vec![sigmoid_gate(cx, &t[0], &t[1])?])
    });
    op("silu_gate", vec![x.clone(), z], &[], |cx, t| {
        Ok(vec![silu_gate(cx, &t[0], &t[1])?])
    });
    let at = numbers(&[7, 1, 900], &[3]);
    op("rope", vec![x.clone(), at], &[0], |cx, t| {
        Ok(vec![rope(cx, &t[0], &t[1], &Rope::new(1e4, 24)?)?])
    });
    let at = numbers(&[7, 1, 900, 2, 2, 3, 0, 5, 6], &[3, 3]);
    let at = at.to_dtype(DType::I64).unwrap();
    op("rope with three axes", vec![x, at], &[0], |cx, t| {
        let op = Rope::new(1e4, 24)?.with_sections([4, 4, 4])?;
        Ok(vec![rope(cx, &t[0], &t[1], &op)?])
    });
    for (name, rows) in [("attention", 5), ("attention, prefill", 17)] {
        let kv = || noise(&[2, 20, 32], rows as u64, 1.0, a);
        let inputs = vec![float(&[rows, 4, 32], a), kv(), kv()];
        op(name, inputs, &[], |cx, t| {
            Ok(vec![attention(cx, &t[0], &t[1], &t[2], 18, 0.2)?])
        });
    }
    let inputs = vec![float(&[3, 4, 32], a), float(&[2, 20, 32], a)];
    op("attention_probabilities", inputs, &[], |cx, t| {
        Ok(vec![attention_probabilities(cx, &t[0], &t[1], 18, 0.2)?])
    });
    let (c, h) = (DIMS.channels(), DIMS.value_heads);
    let inputs = vec![
        float(&[4, c], a),
        float(&[4, h], a),
        float(&[4, h], a),
        float(&[c, DIMS.taps], f),
        float(&[h], f),
        float(&[h], f),
    ];
    // A guess of which two rows are kept, and the rows after it: the tape is read too.
    op("gated_delta", inputs, &[], |cx, t| {
        let [conv, a_log, dt_bias] = [3, 4, 5].map(|i: usize| t[i].clone());
        let params = GatedDeltaParams::new(DIMS, conv, a_log, dt_bias)?;
        let mut state = GatedDeltaState::new(DIMS, &Device::Cpu)?;
        let mut out = vec![];
        for keep in [Keep::Pending, Keep::Commit] {
            let y = gated_delta(cx, &t[0], &t[1], &t[2], &params, &mut state, keep)?;
            out.push(y);
            if keep == Keep::Pending {
                state.accept(2)?;
            }
        }
        out.extend([state.recurrent()?, state.conv_inputs()?]);
        Ok(out)
    });
    op("moe::route", vec![float(&[3, 9], a)], &[0], |cx, t| {
        let (experts, shares) = moe::route(cx, &t[0], 2)?;
        Ok(vec![experts, shares])
    });
    let inputs = vec![
        float(&[3, 2, 40], a),
        float(&[3, 2], f),
        float(&[3, 40], a),
        float(&[3, 1], a),
    ];
    op("moe::combine", inputs, &[], |cx, t| {
        Ok(vec![moe::combine(cx, &t[0], &t[1], &t[2], &t[3])?])
    });
    op("argmax", vec![float(&[3, 50], a)], &[0], |cx, t| {
        Ok(vec![argmax(cx, &t[0])?])
    });
    for (name, rows) in [("matmul", 3), ("matmul, prefill", 17)] {
        let mut inputs = vec![codes(6, 64)];
        inputs.extend([&[6, 2], &[6, 2], &[rows, 64]].map(|s| float(s, a)));
        op(name, inputs, &[1, 2, 3], |cx, t| {
            Ok(vec![matmul(cx, &t[3], &weight(t)?)?])
        });
        let inputs = vec![float(&[6, 40], a), float(&[rows, 40], a)];
        op(name, inputs, &[0, 1], |cx, t| {
            let weight = Weight::dense(&t[0], &Device::Cpu)?;
            Ok(vec![matmul(cx, &t[1], &weight)?])
        });
    }
    let mut gated = vec![codes(6, 64), float(&[6, 2], a), float(&[6, 2], a)];
    gated.extend([codes(6, 64), float(&[6, 2], a), float(&[6, 2], a)]);
    gated.push(float(&[3, 64], a));
    op("gate_up_silu", gated, &[1, 2, 4, 5, 6], |cx, t| {
        let (gate, up) = (weight(t)?, weight(&t[3..])?);
        Ok(vec![gate_up_silu(cx, &t[6], &gate, &up)?])
    });
    let mut experts = vec![codes(12, 64), float(&[12, 2], a), float(&[12, 2], a)];
    experts.extend([float(&[3, 64], a), numbers(&[0, 2, 1, 1, 2, 0], &[3, 2])]);
    op("matmul_experts", experts, &[1, 2, 3], |cx, t| {
        Ok(vec![matmul_experts(cx, &t[3], &weight(t)?, &t[4], 4)?])
    });
    let table = vec![codes(6, 64), float(&[6, 2], a), float(&[6, 2], a)];
    op("embed", table, &[1, 2], |cx, t| {
        Ok(vec![embed(cx, &weight(t)?, &[5, 0, 3], ACTIVATION)?])
    });
    ops
}

/// Views of other memory with `t`'s shape: values may differ, so each is compared with its own copy.
fn views(t: &Tensor) -> Vec<(&'static str, Tensor)> {
    let (last, count) = (t.rank() - 1, t.elem_count());
    let flat = t.flatten_all().unwrap();
    let odd = Tensor::cat(&[&flat, &flat], 0).unwrap();
    let odd = odd.narrow(0, 1, count).unwrap();
    let gaps = Tensor::cat(&[t, t, t], last).unwrap();
    let first = t.narrow(0, 0, 1).unwrap();
    vec![
        ("at an odd element", odd.reshape(t.shape()).unwrap()),
        ("with gaps", gaps.narrow(last, 1, t.dims()[last]).unwrap()),
        ("transposed", strided(t)),
        ("broadcast", first.broadcast_as(t.shape()).unwrap()),
    ]
}

#[test]
fn views_count_as_their_copies() {
    needs_clang!();
    for op in ops() {
        for verify_rows in [4, 8] {
            let cx = emulated(Mode::Checked).with_verify_rows(verify_rows);
            let run = |inputs: &[Tensor]| -> Vec<Vec<u32>> {
                let out = (op.run)(&cx, inputs).unwrap_or_else(|e| panic!("{}: {e}", op.name));
                out.iter().map(bits).collect()
            };
            let mut all = vec![op.inputs.clone(); 4];
            for (i, input) in op.inputs.iter().enumerate() {
                for (v, (kind, view)) in views(input).into_iter().enumerate() {
                    let mut inputs = op.inputs.clone();
                    inputs[i] = view.force_contiguous().unwrap();
                    let want = run(&inputs);
                    inputs[i] = view.clone();
                    assert_eq!(run(&inputs), want, "{}: input {i} {kind}", op.name);
                    all[v][i] = view;
                }
            }
            for inputs in all {
                let copies = inputs.iter().map(|t| t.force_contiguous().unwrap());
                let copies: Vec<Tensor> = copies.collect();
                assert_eq!(run(&inputs), run(&copies), "{}: all inputs", op.name);
            }
            assert_all_emulated(&cx);
        }
    }
}

/// A launcher that nothing must reach.
#[derive(Debug)]
struct Unreachable;

impl Launcher for Unreachable {
    fn run(&self, plan: &Plan, _: &[&Tensor]) -> Result<Vec<Tensor>> {
        panic!("launched: {plan:?}")
    }
}

fn refusing() -> Context {
    Context::with_launcher(Arc::new(Unreachable))
}

#[test]
fn other_dtypes_are_errors_that_name_both() {
    let floats = [DType::F32, DType::BF16, DType::F16];
    let others = [DType::F64, DType::I64, DType::U32, DType::U8];
    for op in ops() {
        for (i, input) in op.inputs.iter().enumerate() {
            for dtype in floats.into_iter().chain(others) {
                let allowed = floats.contains(&dtype) && op.any_float.contains(&i);
                let index = |d| matches!(d, DType::U32 | DType::I64);
                let position = op.name.starts_with("rope") && i == 1 && index(dtype);
                if dtype == input.dtype() || allowed || position {
                    continue;
                }
                let mut inputs = op.inputs.clone();
                inputs[i] = input.to_dtype(dtype).unwrap();
                for cx in [Context::default(), refusing()] {
                    let what = format!("{}: input {i} in {dtype:?}", op.name);
                    let error = (op.run)(&cx, &inputs).expect_err(&what);
                    let text = error.to_string().to_lowercase();
                    for name in [dtype.as_str(), input.dtype().as_str()] {
                        assert!(text.contains(name), "{what}: {text}");
                    }
                }
            }
        }
    }
}

/// Kernels count in 32 bits. Broadcast inputs are small, what they ask for is not.
#[test]
fn results_past_32_bits_are_refused() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let many = 1 << 17;
    let x = zeros(&[1, 64], DType::BF16);
    let x = x.broadcast_as((many, 64)).unwrap();
    let wide = zeros(&[1, 1, 64], DType::BF16);
    let wide = wide.broadcast_as((many, 512, 64)).unwrap();
    let weight = zeros(&[1 << 15, 64], DType::BF16);
    let weight = Weight::dense(&weight, &Device::Cpu).unwrap();
    let one = zeros(&[64], DType::F32);
    let at = zeros(&[many], DType::U32);
    let turn = Rope::new(1e4, 8).unwrap();
    let cx = refusing();
    for (what, result) in [
        ("matmul", matmul(&cx, &x, &weight)),
        ("rms_norm", rms_norm(&cx, &wide, &one, 1e-6)),
        ("silu_gate", silu_gate(&cx, &wide, &wide)),
        ("rope", rope(&cx, &wide, &at, &turn)),
    ] {
        let text = result.expect_err(what).to_string();
        assert!(text.contains("2^32"), "{what}: {text}");
    }
    let cache = zeros(&[1, many, 64], DType::BF16);
    for result in [
        attention_probabilities(&cx, &wide, &cache, many, 1.0),
        attention(&cx, &wide, &cache, &cache, many, 1.0),
    ] {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("2^32"), "{text}");
    }
}

#[test]
fn a_product_of_no_rows_has_none() {
    let cx = emulated(Mode::Fast);
    let t = |shape: &[usize]| Tensor::zeros(shape, DType::BF16, &Device::Cpu).unwrap();
    // The kernels', and candle's for a K that they do not take.
    for k in [64, 12] {
        let weight = Weight::dense(&t(&[6, k]), &Device::Cpu).unwrap();
        let y = matmul(&cx, &t(&[0, k]), &weight).unwrap();
        assert_eq!(y.dims(), [0, 6]);
    }
}
