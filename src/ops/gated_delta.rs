//! Gated delta net: causal depthwise convolution, SiLU, normalised keys and queries, and the gated delta rule
//! (Yang et al., arXiv 2412.06464).

use candle_core::{Device, Tensor};

use rayon::prelude::*;

use super::cpu::{exp, for_element, to_f32, Element};
use super::{check, Context};
use crate::error::{Error, Result};

const OP: &str = "gated_delta";

/// The sizes of a gated delta net layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedDeltaDims {
    /// Heads of keys and queries.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`: value head `i` uses key head `i / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Size of a key.
    pub key_dim: usize,
    /// Size of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
}

impl GatedDeltaDims {
    /// Columns of the input: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// A layer's own weights, f32.
#[derive(Clone, Debug)]
pub struct GatedDeltaParams {
    /// Sizes.
    pub dims: GatedDeltaDims,
    /// `[channels, taps]`, the last tap meets the newest row.
    pub conv: Tensor,
    /// `[value_heads]`: `A_log`.
    pub a_log: Tensor,
    /// `[value_heads]`: `dt_bias`.
    pub dt_bias: Tensor,
}

/// Whether a pass's rows may be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The rows are committed at once (prefill, plain decoding).
    Commit,
    /// The rows stay pending until `accept(n)` keeps the first `n`.
    Pending,
}

/// A row as the recurrence takes it.
#[derive(Clone, Debug, Default)]
struct Step {
    /// `[key_heads, key_dim]`, normalised and scaled.
    queries: Vec<f32>,
    /// `[key_heads, key_dim]`, normalised.
    keys: Vec<f32>,
    /// `[value_heads, value_dim]`.
    values: Vec<f32>,
    /// Per value head: the factor that the state decays by, and the writing strength.
    gates: Vec<(f32, f32)>,
}

/// One sequence's state in one layer: a checkpoint, and a tape of the last pass's rows that are not in it yet.
///
/// `accept(n)` moves a cursor on the tape; the next pass replays the accepted rows before its own, with the same
/// operations in the same order, so the bits are those of one row after the other.
#[derive(Clone, Debug)]
pub struct GatedDeltaState {
    dims: GatedDeltaDims,
    /// `[value_heads, key_dim, value_dim]`.
    state: Vec<f32>,
    /// The last `taps - 1` committed input rows, then the pending ones: `[taps - 1 + pending, channels]`.
    inputs: Vec<f32>,
    tape: Vec<Step>,
    /// Rows at the start of the tape that are committed.
    accepted: usize,
}

impl GatedDeltaState {
    /// The empty state.
    pub fn new(dims: GatedDeltaDims, device: &Device) -> Result<Self> {
        if !matches!(device, Device::Cpu) {
            let what = format!("device {device:?} is not supported by this build: use the CPU");
            return Err(Error::argument(OP, what));
        }
        let GatedDeltaDims {
            key_heads,
            value_heads,
            taps,
            ..
        } = dims;
        if key_heads == 0 || value_heads % key_heads != 0 || taps == 0 {
            let what = format!("{value_heads} value heads, {key_heads} key heads, {taps} taps");
            return Err(Error::argument(OP, what));
        }
        Ok(Self {
            dims,
            state: vec![0.0; value_heads * dims.key_dim * dims.value_dim],
            inputs: vec![0.0; dims.channels() * (taps - 1)],
            tape: vec![],
            accepted: 0,
        })
    }

    /// Rows of the last pass that are neither accepted nor forgotten.
    pub fn pending(&self) -> usize {
        self.tape.len() - self.accepted
    }

    /// Commits the first `n` pending rows and forgets the rest.
    pub fn accept(&mut self, n: usize) -> Result<()> {
        if n > self.pending() {
            let what = format!("{n} rows accepted, {} are pending", self.pending());
            return Err(Error::Cache(what));
        }
        let c = self.dims.channels();
        self.accepted += n;
        self.tape.truncate(self.accepted);
        self.inputs.truncate((self.dims.taps - 1 + n) * c);
        self.inputs.drain(..n * c);
        Ok(())
    }

    /// The committed recurrent state `[value_heads, key_dim, value_dim]` f32.
    pub fn recurrent(&self) -> Result<Tensor> {
        let d = self.dims;
        let mut state = self.state.clone();
        for (h, state) in state.chunks_exact_mut(d.key_dim * d.value_dim).enumerate() {
            self.tape[..self.accepted]
                .iter()
                .for_each(|step| advance(d, h, step, state, None));
        }
        let shape = (d.value_heads, d.key_dim, d.value_dim);
        Ok(Tensor::from_vec(state, shape, &Device::Cpu)?)
    }

    /// The committed last `taps - 1` input rows, `[taps - 1, channels]`, f32.
    pub fn conv_inputs(&self) -> Result<Tensor> {
        let shape = (self.dims.taps - 1, self.dims.channels());
        let inputs = &self.inputs[..shape.0 * shape.1];
        Ok(Tensor::from_slice(inputs, shape, &Device::Cpu)?)
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        let step = |s: &Step| s.queries.len() + s.keys.len() + s.values.len() + 2 * s.gates.len();
        let tape: usize = self.tape.iter().map(step).sum();
        (self.state.len() + self.inputs.len() + tape) * 4
    }
}

/// Runs one sequence's rows: `qkv` is `[rows, channels]` (queries, keys, values, heads contiguous), `a` and `b` are
/// `[rows, value_heads]`, all of one dtype (f32, bf16 or f16); the result `[rows, value_heads, value_dim]` has it too.
/// Everything inside is f32: the recurrence runs row by row at every width, so no split of the rows changes a bit.
/// `state` must have no undecided rows (call `accept` first).
pub fn gated_delta(
    cx: &Context,
    qkv: &Tensor,
    a: &Tensor,
    b: &Tensor,
    params: &GatedDeltaParams,
    state: &mut GatedDeltaState,
    keep: Keep,
) -> Result<Tensor> {
    let d = params.dims;
    let dtype = check::activation(OP, "qkv", qkv)?;
    check::dtype(OP, "a", a, dtype)?;
    check::dtype(OP, "b", b, dtype)?;
    check::shape(OP, "qkv", qkv, &[None, Some(d.channels())])?;
    let rows = qkv.dim(0)?;
    check::shape(OP, "a", a, &[Some(rows), Some(d.value_heads)])?;
    check::shape(OP, "b", b, &[Some(rows), Some(d.value_heads)])?;
    check::shape(
        OP,
        "conv",
        &params.conv,
        &[Some(d.channels()), Some(d.taps)],
    )?;
    check::shape(OP, "a_log", &params.a_log, &[Some(d.value_heads)])?;
    check::shape(OP, "dt_bias", &params.dt_bias, &[Some(d.value_heads)])?;
    if state.dims != d {
        return Err(Error::Cache(
            "the state belongs to a layer of other sizes".into(),
        ));
    }
    if state.pending() > 0 {
        let what = format!(
            "{} rows are pending: accept some or none of them first",
            state.pending()
        );
        return Err(Error::Cache(what));
    }
    cx.routes().count(OP, "cpu", dtype);
    for_element!(dtype, run(qkv, a, b, params, state, keep))
}

fn run<T: Element>(
    qkv: &Tensor,
    a: &Tensor,
    b: &Tensor,
    params: &GatedDeltaParams,
    state: &mut GatedDeltaState,
    keep: Keep,
) -> Result<Tensor> {
    let d = params.dims;
    let c = d.channels();
    let (qkv, a, b) = (
        to_f32::<T>(OP, qkv)?,
        to_f32::<T>(OP, a)?,
        to_f32::<T>(OP, b)?,
    );
    let (a_log, dt_bias) = (
        to_f32::<f32>(OP, &params.a_log)?,
        to_f32::<f32>(OP, &params.dt_bias)?,
    );
    // Taps first: `[taps, channels]`, so that channels are lanes.
    let taps = to_f32::<f32>(OP, &params.conv.t()?)?;
    let rows = qkv.len() / c;
    state.inputs.extend_from_slice(&qkv);
    let inputs = &state.inputs;
    let step = |r: usize| {
        let window = &inputs[r * c..][..d.taps * c];
        let gate = |h: usize| {
            let at = r * d.value_heads + h;
            let softplus = softplus(a[at] + dt_bias[h]);
            (
                (-a_log[h].exp() * softplus).exp(),
                1.0 / (1.0 + (-b[at]).exp()),
            )
        };
        let gates = (0..d.value_heads).map(gate).collect();
        prepare_dispatch(d, window, &taps, gates)
    };
    let serial = rows * c < 1 << 14;
    let steps: Vec<Step> = match serial {
        true => (0..rows).map(step).collect(),
        false => (0..rows).into_par_iter().map(step).collect(),
    };
    let (replay, tape) = (state.accepted, std::mem::take(&mut state.tape));
    let width = d.value_heads * d.value_dim;
    let size = d.key_dim * d.value_dim;
    let head = |(h, checkpoint): (usize, &mut [f32])| {
        tape[..replay]
            .iter()
            .for_each(|s| advance_dispatch(d, h, s, checkpoint, None));
        let mut out = vec![0f32; rows * d.value_dim];
        let mut scratch = vec![];
        let current: &mut [f32] = match keep {
            Keep::Commit => checkpoint,
            Keep::Pending => {
                scratch.extend_from_slice(checkpoint);
                &mut scratch
            }
        };
        for (s, out) in steps.iter().zip(out.chunks_exact_mut(d.value_dim)) {
            advance_dispatch(d, h, s, current, Some(out));
        }
        out
    };
    let heads: Vec<Vec<f32>> = match (rows + replay) * d.value_heads * size < 1 << 16 {
        true => state
            .state
            .chunks_exact_mut(size)
            .enumerate()
            .map(head)
            .collect(),
        false => state
            .state
            .par_chunks_exact_mut(size)
            .enumerate()
            .map(head)
            .collect(),
    };
    let mut out = vec![T::round(0.0); rows * width];
    for (h, head) in heads.iter().enumerate() {
        for (r, values) in head.chunks_exact(d.value_dim).enumerate() {
            let out = &mut out[r * width + h * d.value_dim..][..d.value_dim];
            out.iter_mut()
                .zip(values)
                .for_each(|(o, v)| *o = T::round(*v));
        }
    }
    state.accepted = 0;
    match keep {
        Keep::Commit => {
            state.inputs.drain(..rows * c);
        }
        Keep::Pending => state.tape = steps,
    }
    let shape = (rows, d.value_heads, d.value_dim);
    Ok(Tensor::from_vec(out, shape, &Device::Cpu)?)
}

fn softplus(t: f32) -> f32 {
    match t > 20.0 {
        true => t,
        false => t.exp().ln_1p(),
    }
}

fn prepare_dispatch(
    d: GatedDeltaDims,
    window: &[f32],
    taps: &[f32],
    gates: Vec<(f32, f32)>,
) -> Step {
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { prepare_avx2(d, window, taps, gates) };
    }
    prepare(d, window, taps, gates)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn prepare_avx2(
    d: GatedDeltaDims,
    window: &[f32],
    taps: &[f32],
    gates: Vec<(f32, f32)>,
) -> Step {
    prepare(d, window, taps, gates)
}

/// Convolution over `window` (`[taps, channels]`, oldest row first), SiLU, split, normalisation.
#[inline(always)]
fn prepare(d: GatedDeltaDims, window: &[f32], taps: &[f32], gates: Vec<(f32, f32)>) -> Step {
    let c = d.channels();
    let mut act = vec![0f32; c];
    for (row, taps) in window.chunks_exact(c).zip(taps.chunks_exact(c)) {
        for ((act, x), w) in act.iter_mut().zip(row).zip(taps) {
            *act = x.mul_add(*w, *act);
        }
    }
    act.iter_mut().for_each(|v| *v /= 1.0 + exp(-*v));
    let split = d.key_heads * d.key_dim;
    let values = act.split_off(2 * split);
    let mut keys = act.split_off(split);
    let mut queries = act;
    let normalise = |heads: &mut [f32], scale: f32| {
        for head in heads.chunks_exact_mut(d.key_dim) {
            let mut sums = [0f32; 8];
            for chunk in head.chunks(8) {
                sums.iter_mut()
                    .zip(chunk)
                    .for_each(|(s, v)| *s = v.mul_add(*v, *s));
            }
            let inverse = scale / (sums.iter().sum::<f32>() + 1e-6).sqrt();
            head.iter_mut().for_each(|v| *v *= inverse);
        }
    };
    normalise(&mut queries, (d.key_dim as f32).powf(-0.5));
    normalise(&mut keys, 1.0);
    Step {
        queries,
        keys,
        values,
        gates,
    }
}

fn advance_dispatch(
    d: GatedDeltaDims,
    h: usize,
    step: &Step,
    state: &mut [f32],
    out: Option<&mut [f32]>,
) {
    #[cfg(target_arch = "x86_64")]
    if super::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { advance_avx2(d, h, step, state, out) };
    }
    advance(d, h, step, state, out)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn advance_avx2(
    d: GatedDeltaDims,
    h: usize,
    step: &Step,
    state: &mut [f32],
    out: Option<&mut [f32]>,
) {
    advance(d, h, step, state, out)
}

/// One row of one value head: `S = decay * S`, `delta = (v - k·S) * beta`, `S += k ⊗ delta`, `out = q·S`. Values are lanes,
/// keys are summed in order.
#[inline(always)]
fn advance(d: GatedDeltaDims, h: usize, step: &Step, state: &mut [f32], out: Option<&mut [f32]>) {
    let kh = h / (d.value_heads / d.key_heads) * d.key_dim;
    let keys = &step.keys[kh..][..d.key_dim];
    let queries = &step.queries[kh..][..d.key_dim];
    let values = &step.values[h * d.value_dim..][..d.value_dim];
    let (decay, beta) = step.gates[h];
    let mut delta = vec![0f32; d.value_dim];
    for (k, row) in keys.iter().zip(state.chunks_exact_mut(d.value_dim)) {
        for (m, s) in delta.iter_mut().zip(row) {
            *s *= decay;
            *m = k.mul_add(*s, *m);
        }
    }
    delta
        .iter_mut()
        .zip(values)
        .for_each(|(m, v)| *m = (v - *m) * beta);
    let rows = state
        .chunks_exact_mut(d.value_dim)
        .zip(keys.iter().zip(queries));
    match out {
        None => rows.for_each(|(row, (k, _))| {
            row.iter_mut()
                .zip(&delta)
                .for_each(|(s, m)| *s = k.mul_add(*m, *s));
        }),
        Some(out) => rows.for_each(|(row, (k, q))| {
            for ((s, m), o) in row.iter_mut().zip(&delta).zip(out.iter_mut()) {
                *s = k.mul_add(*m, *s);
                *o = q.mul_add(*s, *o);
            }
        }),
    }
}
