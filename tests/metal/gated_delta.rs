//! `metal/gated_delta.metal`.

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::gated_delta::{
    gated_delta, GatedDeltaDims, GatedDeltaParams, GatedDeltaState, Keep,
};
use candle_specprefill::ops::Context;

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

struct Case {
    params: GatedDeltaParams,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
}

/// Inputs are columns of one tensor, as a grouped projection leaves them.
fn case([heads, group, key, value, taps]: [usize; 5], rows: usize, dtype: DType) -> Case {
    let dims = GatedDeltaDims {
        key_heads: heads,
        value_heads: heads * group,
        key_dim: key,
        value_dim: value,
        taps,
    };
    let (c, h) = (dims.channels(), dims.value_heads);
    let all = noise(&[rows, c + 2 * h], 4, 2.0, dtype);
    let weight = |shape: &[usize], seed, spread| noise(shape, seed, spread, DType::F32);
    let params = GatedDeltaParams::new(
        dims,
        weight(&[c, taps], 1, 0.7),
        weight(&[h], 2, 1.5),
        weight(&[h], 3, 1.0),
    );
    Case {
        params: params.unwrap(),
        qkv: all.narrow(1, h, c).unwrap(),
        a: all.narrow(1, 0, h).unwrap(),
        b: all.narrow(1, h + c, h).unwrap(),
    }
}

impl Case {
    fn state(&self) -> GatedDeltaState {
        GatedDeltaState::new(self.params.dims, &Device::Cpu).unwrap()
    }

    fn run(
        &self,
        cx: &Context,
        state: &mut GatedDeltaState,
        from: usize,
        n: usize,
        keep: Keep,
    ) -> Tensor {
        let part = |t: &Tensor| t.narrow(0, from, n).unwrap();
        let (x, a, b) = (part(&self.qkv), part(&self.a), part(&self.b));
        let y = gated_delta(cx, &x, &a, &b, &self.params, state, keep).unwrap();
        assert_eq!((y.dtype(), y.dims()[0]), (self.qkv.dtype(), n));
        y
    }

    /// Outputs, state and window against the CPU op, and against f64.
    fn agrees(&self, mode: Mode) {
        let rows = self.qkv.dims()[0];
        let cx = emulated(mode);
        let (mut got, mut want) = (self.state(), self.state());
        let y = self.run(&cx, &mut got, 0, rows, Keep::Commit);
        assert_all_emulated(&cx);
        let cpu = self.run(&Context::default(), &mut want, 0, rows, Keep::Commit);
        assert_close(&y, &cpu, tolerance(y.dtype()) / 2.0);
        let (recurrent, want_recurrent) = (got.recurrent().unwrap(), want.recurrent().unwrap());
        assert_close(&recurrent, &want_recurrent, 2e-6);
        assert_eq!(
            bits(&got.conv_inputs().unwrap()),
            bits(&want.conv_inputs().unwrap())
        );
        let (exact, exact_state) = self.in_f64();
        for (g, f) in floats(&y).iter().zip(exact) {
            let bound = tolerance(y.dtype()) as f64 / 2.0 * (1.0 + f.abs());
            assert!((*g as f64 - f).abs() <= bound, "{g} for {f}");
        }
        for (g, f) in floats(&recurrent).iter().zip(exact_state) {
            assert!(
                (*g as f64 - f).abs() <= 1e-6 * (1.0 + f.abs()),
                "{g} for {f}"
            );
        }
    }

    /// The paper's recurrence from an empty state: outputs, and the state `[value_heads, key_dim, value_dim]`.
    fn in_f64(&self) -> (Vec<f64>, Vec<f64>) {
        let d = self.params.dims;
        let wide = |t: &Tensor| floats(t).into_iter().map(f64::from).collect::<Vec<_>>();
        let (x, a, b) = (wide(&self.qkv), wide(&self.a), wide(&self.b));
        let (conv, a_log) = (wide(&self.params.conv), wide(&self.params.a_log));
        let dt_bias = wide(&self.params.dt_bias);
        let (c, keys) = (d.channels(), d.key_heads * d.key_dim);
        let mut state = vec![0f64; d.value_heads * d.key_dim * d.value_dim];
        let mut out = vec![];
        for r in 0..self.qkv.dims()[0] {
            let input = |i: usize, ch: usize| match (r + i).checked_sub(d.taps - 1) {
                Some(row) => x[row * c + ch],
                None => 0.0,
            };
            let mut act: Vec<f64> = (0..c)
                .map(|ch| {
                    (0..d.taps)
                        .map(|i| conv[ch * d.taps + i] * input(i, ch))
                        .sum()
                })
                .map(|v: f64| v / (1.0 + (-v).exp()))
                .collect();
            for (i, head) in act[..2 * keys].chunks_mut(d.key_dim).enumerate() {
                let norm = (head.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                let scale = if i < d.key_heads {
                    (d.key_dim as f64).sqrt()
                } else {
                    1.0
                };
                head.iter_mut().for_each(|v| *v /= norm * scale);
            }
            for h in 0..d.value_heads {
                let at = h / (d.value_heads / d.key_heads) * d.key_dim;
                let (q, k) = (&act[at..][..d.key_dim], &act[keys + at..][..d.key_dim]);
                let gate = r * d.value_heads + h;
                let beta = 1.0 / (1.0 + (-b[gate]).exp());
                let decay = (-a_log[h].exp() * (a[gate] + dt_bias[h]).exp().ln_1p()).exp();
                let s = &mut state[h * d.key_dim * d.value_dim..][..d.key_dim * d.value_dim];
                for j in 0..d.value_dim {
                    let memory: f64 = (0..d.key_dim)
                        .map(|i| decay * s[i * d.value_dim + j] * k[i])
                        .sum();
                    let delta = (act[2 * keys + h * d.value_dim + j] - memory) * beta;
                    let mut o = 0.0;
                    for i in 0..d.key_dim {
                        let s = &mut s[i * d.value_dim + j];
                        *s = *s * decay + k[i] * delta;
                        o += q[i] * *s;
                    }
                    out.push(o);
                }
            }
        }
        (out, state)
    }
}

#[test]
fn gated_delta_agrees_with_the_cpu_op_and_f64() {
    needs_clang!();
    for dtype in DTYPES {
        case([2, 2, 128, 128, 4], 7, dtype).agrees(Mode::Fast);
        case([4, 2, 64, 64, 4], 19, dtype).agrees(Mode::Fast);
        case([1, 3, 32, 32, 4], 5, dtype).agrees(Mode::Checked);
    }
    case([1, 2, 200, 30, 2], 6, DType::F32).agrees(Mode::Fast);
    for dims in [
        [2, 1, 64, 20, 3],
        [1, 1, 128, 16, 4],
        [1, 1, 40, 9, 6],
        [1, 2, 200, 7, 2],
    ] {
        case(dims, 4, DType::BF16).agrees(Mode::Checked);
    }
}

/// What a state shows, bit for bit.
fn contents(state: &GatedDeltaState) -> (Vec<u32>, Vec<u32>) {
    let conv = state.conv_inputs().unwrap();
    (bits(&state.recurrent().unwrap()), bits(&conv))
}

#[test]
fn any_split_and_any_accepted_count_is_the_serial_result() {
    needs_clang!();
    const ROWS: usize = 20;
    let c = case([2, 2, 32, 20, 4], ROWS, DType::BF16);
    let width = c.params.dims.value_heads * c.params.dims.value_dim;
    let cx = emulated(Mode::Fast);
    let mut serial = c.state();
    let (mut want, mut states) = (vec![], vec![]);
    for r in 0..ROWS {
        want.extend(bits(&c.run(&cx, &mut serial, r, 1, Keep::Commit)));
        states.push(contents(&serial));
    }
    for (first, m) in (1..=16).map(|m| (1 + m % 3, m)) {
        let mut before = c.state();
        c.run(&cx, &mut before, 0, first, Keep::Commit);
        let shown = contents(&before);
        assert_eq!(shown, states[first - 1]);
        let y = c.run(&cx, &mut before, first, m, Keep::Pending);
        assert_eq!(bits(&y), want[first * width..(first + m) * width]);
        assert_eq!((before.pending(), contents(&before)), (m, shown));
        for accepted in [0, 1, m / 2, m - 1, m] {
            let mut state = before.clone();
            state.accept(accepted).unwrap();
            let done = first + accepted;
            assert_eq!(contents(&state), states[done - 1]);
            let rest = (ROWS - done).min(3);
            let mut fork = state.clone();
            for (state, keep) in [(&mut state, Keep::Commit), (&mut fork, Keep::Pending)] {
                let y = bits(&c.run(&cx, state, done, rest, keep));
                assert_eq!(y, want[done * width..(done + rest) * width]);
            }
            fork.accept(rest).unwrap();
            if rest > 0 {
                assert_eq!(contents(&state), states[done + rest - 1]);
                assert_eq!(contents(&fork), states[done + rest - 1]);
            }
        }
    }
}

#[test]
fn tape_replay_is_clean_in_checked_mode() {
    needs_clang!();
    let c = case([1, 2, 64, 6, 4], 9, DType::F16);
    let cx = emulated(Mode::Checked);
    let (mut guessed, mut serial) = (c.state(), c.state());
    for (from, n, accepted) in [(0, 2, 2), (2, 5, 3), (5, 4, 1)] {
        c.run(&cx, &mut guessed, from, n, Keep::Pending);
        guessed.accept(accepted).unwrap();
        c.run(&cx, &mut serial, from, accepted, Keep::Commit);
        assert_eq!(contents(&guessed), contents(&serial));
    }
}

#[test]
fn a_long_prompt_in_chunks_is_its_parts() {
    needs_clang!();
    // More rows than a launch takes, and a tape before them.
    let rows = 1100;
    let c = case([1, 1, 32, 4, 4], rows, DType::F32);
    let cx = emulated(Mode::Fast);
    let (mut whole, mut parts) = (c.state(), c.state());
    c.run(&cx, &mut whole, 0, 3, Keep::Pending);
    whole.accept(2).unwrap();
    let y = bits(&c.run(&cx, &mut whole, 2, rows - 2, Keep::Commit));
    let mut got = vec![];
    c.run(&cx, &mut parts, 0, 2, Keep::Commit);
    for (from, n) in [(2, 511), (513, 2), (515, 585)] {
        got.extend(bits(&c.run(&cx, &mut parts, from, n, Keep::Commit)));
    }
    assert_eq!(got, y);
    assert_eq!(contents(&parts), contents(&whole));
}

#[test]
fn a_state_moves_between_cpu_and_launches() {
    needs_clang!();
    let c = case([2, 1, 32, 40, 4], 12, DType::F32);
    let (cpu, gpu) = (Context::default(), emulated(Mode::Fast));
    let (mut moved, mut stays) = (c.state(), c.state());
    for (i, keep) in [Keep::Commit, Keep::Pending, Keep::Commit]
        .into_iter()
        .enumerate()
    {
        let cx = if i % 2 == 0 { &cpu } else { &gpu };
        let got = c.run(cx, &mut moved, 4 * i, 4, keep);
        assert_close(&got, &c.run(&cpu, &mut stays, 4 * i, 4, keep), 1e-5);
        moved.accept(4 * (keep == Keep::Pending) as usize).unwrap();
        stays.accept(4 * (keep == Keep::Pending) as usize).unwrap();
    }
    assert_close(
        &moved.recurrent().unwrap(),
        &stays.recurrent().unwrap(),
        1e-5,
    );
    assert_eq!(contents(&moved).1, contents(&stays).1);
}

#[test]
fn gated_delta_of_nothing_strided_columns_and_wrong_calls() {
    needs_clang!();
    let c = case([1, 2, 32, 8, 4], 3, DType::F32);
    let cx = emulated(Mode::Checked);
    let mut state = c.state();
    c.run(&cx, &mut state, 0, 0, Keep::Commit);
    assert_eq!(contents(&state), contents(&c.state()));
    let want = bits(&c.run(&cx, &mut state, 0, 3, Keep::Commit));
    let (x, a, b) = (strided(&c.qkv), strided(&c.a), strided(&c.b));
    let y = gated_delta(&cx, &x, &a, &b, &c.params, &mut c.state(), Keep::Pending).unwrap();
    assert_eq!(bits(&y), want);
    let odd = case([1, 1, 300, 4, 4], 1, DType::F32);
    let mut state = odd.state();
    let part = (&odd.qkv, &odd.a, &odd.b);
    let error = gated_delta(
        &cx,
        part.0,
        part.1,
        part.2,
        &odd.params,
        &mut state,
        Keep::Commit,
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("256") && error.contains("CPU"), "{error}");
    assert_eq!(contents(&state), contents(&odd.state()));
}
