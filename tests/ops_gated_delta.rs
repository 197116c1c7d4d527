//! Gated delta net against its oracle, and bit for bit against itself under every split, rollback and replay.

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::gated_delta::{
    gated_delta, reference, GatedDeltaDims, GatedDeltaParams, GatedDeltaState, Keep,
};
use candle_specprefill::ops::Context;
use candle_specprefill::Error;
use proptest::prelude::*;

const DEVICE: &Device = &Device::Cpu;

fn dims(
    key_heads: usize,
    group: usize,
    key_dim: usize,
    value_dim: usize,
    taps: usize,
) -> GatedDeltaDims {
    GatedDeltaDims {
        key_heads,
        value_heads: key_heads * group,
        key_dim,
        value_dim,
        taps,
    }
}

fn noise(n: usize, seed: u64, spread: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * spread
        })
        .collect()
}

fn tensor(shape: &[usize], seed: u64, spread: f32) -> Tensor {
    Tensor::from_vec(noise(shape.iter().product(), seed, spread), shape, DEVICE).unwrap()
}

struct Case {
    params: GatedDeltaParams,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
}

fn case(d: GatedDeltaDims, rows: usize, dtype: DType) -> Case {
    let cast = |t: Tensor| t.to_dtype(dtype).unwrap();
    Case {
        params: GatedDeltaParams::new(
            d,
            tensor(&[d.channels(), d.taps], 1, 0.7),
            tensor(&[d.value_heads], 2, 1.5),
            tensor(&[d.value_heads], 3, 1.0),
        )
        .unwrap(),
        qkv: cast(tensor(&[rows, d.channels()], 4, 3.0)),
        a: cast(tensor(&[rows, d.value_heads], 5, 2.0)),
        b: cast(tensor(&[rows, d.value_heads], 6, 2.0)),
    }
}

impl Case {
    fn state(&self) -> GatedDeltaState {
        GatedDeltaState::new(self.params.dims, DEVICE).unwrap()
    }

    fn run(&self, state: &mut GatedDeltaState, from: usize, n: usize, keep: Keep) -> Vec<u32> {
        let part = |t: &Tensor| t.narrow(0, from, n).unwrap();
        let (x, a, b) = (part(&self.qkv), part(&self.a), part(&self.b));
        let out = gated_delta(&Context::default(), &x, &a, &b, &self.params, state, keep).unwrap();
        assert_eq!(out.dtype(), self.qkv.dtype());
        bits(&out)
    }
}

fn floats(t: &Tensor) -> Vec<f32> {
    let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    t.to_vec1().unwrap()
}

fn bits(t: &Tensor) -> Vec<u32> {
    floats(t).iter().map(|x| x.to_bits()).collect()
}

fn contents(state: &GatedDeltaState) -> (Vec<u32>, Vec<u32>) {
    let conv = state.conv_inputs().unwrap();
    (bits(&state.recurrent().unwrap()), bits(&conv))
}

fn assert_close(got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), want.dims());
    for (g, w) in floats(got).iter().zip(floats(want)) {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "{g} for {w}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn agrees_with_the_oracle(
        key_heads in 1usize..4, group in 1usize..4, key_dim in 1usize..40, value_dim in 1usize..70,
        taps in 1usize..6, rows in 0usize..20, dtype in 0usize..3,
    ) {
        let dtype = [DType::F32, DType::BF16, DType::F16][dtype];
        let c = case(dims(key_heads, group, key_dim, value_dim, taps), rows, dtype);
        let mut state = c.state();
        let (want, recurrent, conv) = reference(&c.qkv, &c.a, &c.b, &c.params, &state).unwrap();
        let cx = Context::default();
        let got = gated_delta(&cx, &c.qkv, &c.a, &c.b, &c.params, &mut state, Keep::Commit).unwrap();
        let tolerance = [1e-5, 1e-2, 2e-3][[DType::F32, DType::BF16, DType::F16].iter().position(|d| *d == dtype).unwrap()];
        assert_close(&got, &want, tolerance);
        assert_close(&state.recurrent().unwrap(), &recurrent, 1e-5);
        prop_assert_eq!(bits(&state.conv_inputs().unwrap()), bits(&conv));
    }
}

#[test]
fn a_long_pass_is_its_rows_one_by_one() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let c = case(dims(2, 2, 64, 64, 4), 300, dtype);
        let (mut whole, mut single) = (c.state(), c.state());
        let want = c.run(&mut whole, 0, 300, Keep::Commit);
        let got: Vec<u32> = (0..300)
            .flat_map(|r| c.run(&mut single, r, 1, Keep::Commit))
            .collect();
        assert_eq!(got, want);
        assert_eq!(contents(&single), contents(&whole));
    }
}

#[test]
fn any_split_and_any_accepted_count_is_the_serial_result() {
    const ROWS: usize = 20;
    let c = case(dims(2, 2, 16, 40, 4), ROWS, DType::BF16);
    let width = c.params.dims.value_heads * c.params.dims.value_dim;
    let mut serial = c.state();
    let mut want = vec![];
    let mut states = vec![contents(&serial)];
    for r in 0..ROWS {
        want.extend(c.run(&mut serial, r, 1, Keep::Commit));
        states.push(contents(&serial));
    }
    for first in [0, 1, 3] {
        for m in 1..=16 {
            for accepted in 0..=m {
                let mut state = c.state();
                c.run(&mut state, 0, first, Keep::Commit);
                let out = c.run(&mut state, first, m, Keep::Pending);
                assert_eq!(out, want[first * width..(first + m) * width]);
                assert_eq!(
                    (state.pending(), contents(&state)),
                    (m, states[first].clone())
                );
                state.accept(accepted).unwrap();
                let done = first + accepted;
                assert_eq!(
                    (state.pending(), contents(&state)),
                    (0, states[done].clone())
                );
                // Showing the state replays on a copy: it changes nothing, and neither does a second look or a fork.
                let mut fork = state.clone();
                let rest = (ROWS - done).min(3);
                for (state, keep) in [(&mut state, Keep::Commit), (&mut fork, Keep::Pending)] {
                    let out = c.run(state, done, rest, keep);
                    assert_eq!(out, want[done * width..(done + rest) * width]);
                }
                assert_eq!(contents(&state), states[done + rest]);
                assert_eq!(contents(&fork), states[done]);
                fork.accept(rest).unwrap();
                assert_eq!(contents(&fork), states[done + rest]);
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let c = case(dims(4, 2, 64, 96, 4), 40, DType::F32);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| c.run(&mut c.state(), 0, 40, Keep::Commit))
    };
    let want = run(1);
    for threads in [2, 3, 7] {
        assert_eq!(run(threads), want);
    }
}

#[test]
fn strided_and_offset_inputs_are_honoured() {
    let c = case(dims(2, 1, 8, 8, 4), 6, DType::F32);
    let want = c.run(&mut c.state(), 0, 6, Keep::Commit);
    let wide = Tensor::cat(&[&c.a, &c.qkv, &c.b], 1).unwrap();
    let heads = c.params.dims.value_heads;
    let part = |from, n| wide.narrow(1, from, n).unwrap();
    let channels = c.params.dims.channels();
    let (a, qkv, b) = (
        part(0, heads),
        part(heads, channels),
        part(heads + channels, heads),
    );
    let cx = Context::default();
    let out = gated_delta(&cx, &qkv, &a, &b, &c.params, &mut c.state(), Keep::Commit).unwrap();
    assert_eq!(bits(&out), want);
}

#[test]
fn wrong_calls_are_errors_and_change_nothing() {
    let c = case(dims(1, 1, 4, 4, 4), 2, DType::F32);
    let cx = Context::default();
    let mut state = c.state();
    let half = c.a.to_dtype(DType::F16).unwrap();
    let error = gated_delta(
        &cx,
        &c.qkv,
        &half,
        &c.b,
        &c.params,
        &mut state,
        Keep::Commit,
    )
    .unwrap_err();
    assert!(matches!(error, Error::DType { .. }));
    assert!(
        error.to_string().contains("F16") && error.to_string().contains("f32"),
        "{error}"
    );
    c.run(&mut state, 0, 2, Keep::Pending);
    let before = contents(&state);
    assert!(gated_delta(&cx, &c.qkv, &c.a, &c.b, &c.params, &mut state, Keep::Commit).is_err());
    assert!(state.accept(3).is_err());
    assert_eq!((state.pending(), contents(&state)), (2, before));
    assert!(GatedDeltaState::new(dims(0, 1, 4, 4, 4), DEVICE).is_err());
    assert!(GatedDeltaState::new(dims(1, 1, 4, 4, 0), DEVICE).is_err());
}

#[test]
#[ignore = "prints speed"]
fn speed() {
    let c = case(dims(16, 1, 128, 128, 4), 512, DType::F32);
    for (rows, times) in [(512, 3), (1, 100), (8, 50)] {
        let mut state = c.state();
        let start = std::time::Instant::now();
        for _ in 0..times {
            c.run(&mut state, 0, rows, Keep::Commit);
        }
        println!(
            "{rows} rows: {:?} a row",
            start.elapsed() / (times * rows as u32)
        );
    }
}
