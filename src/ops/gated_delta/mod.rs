//! Gated delta net: causal depthwise convolution, SiLU, normalised keys and queries, and the gated delta rule
//! (Yang et al., arXiv 2412.06464).

mod device;
mod kernel;
mod metal;
mod reference;
mod state;

use candle_core::{DType, Device, Tensor};

use super::cpu::{for_element, to_f32, Element};
use super::{check, launch, Context};
use crate::error::{Error, Result};

pub use reference::reference;
pub use state::GatedDeltaState;

const OP: &str = "gated_delta";

/// Rows that are prepared at once while a long prompt is committed: bounds the buffers, changes no bit.
const CHUNK: usize = 128;

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

    fn check(&self) -> Result<()> {
        let sizes = [
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            self.taps,
        ];
        if sizes.contains(&0) || !self.value_heads.is_multiple_of(self.key_heads) {
            return Err(Error::argument(
                OP,
                format!("{self:?}: sizes must be positive and value_heads a multiple of key_heads"),
            ));
        }
        Ok(())
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
    /// The same as the CPU kernel reads them.
    prepared: kernel::Weights,
}

impl GatedDeltaParams {
    /// Checks the shapes (see the fields) and prepares the weights for the kernels.
    pub fn new(dims: GatedDeltaDims, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> Result<Self> {
        dims.check()?;
        let shape = [Some(dims.channels()), Some(dims.taps)];
        check::shape(OP, "conv", &conv, &shape)?;
        for (name, t) in [("conv", &conv), ("a_log", &a_log), ("dt_bias", &dt_bias)] {
            check::dtype(OP, name, t, DType::F32)?;
        }
        for (name, t) in [("a_log", &a_log), ("dt_bias", &dt_bias)] {
            check::shape(OP, name, t, &[Some(dims.value_heads)])?;
        }
        let values = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
        let prepared = kernel::Weights {
            dims,
            // Taps first, so that channels are lanes.
            conv: values(&conv.t()?)?,
            a_log: values(&a_log)?,
            dt_bias: values(&dt_bias)?,
        };
        Ok(Self {
            dims,
            conv: conv.contiguous()?,
            a_log: a_log.contiguous()?,
            dt_bias: dt_bias.contiguous()?,
            prepared,
        })
    }
}

/// Whether a pass's rows may be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The rows are committed at once (prefill, plain decoding).
    Commit,
    /// The rows stay pending until `accept(n)` keeps the first `n`.
    Pending,
}

/// Runs one sequence's rows: `qkv` is `[rows, channels]` (queries, keys, values, heads contiguous), `a` and `b` are
/// `[rows, value_heads]`, all of one dtype (f32, bf16 or f16); the result `[rows, value_heads, value_dim]` has it too.
/// Everything inside is f32. `state` must have no pending rows left undecided (call `accept` first). Any split of the
/// rows into calls gives the same bits. An error leaves `state` as it was.
pub fn gated_delta(
    cx: &Context,
    qkv: &Tensor,
    a: &Tensor,
    b: &Tensor,
    params: &GatedDeltaParams,
    state: &mut GatedDeltaState,
    keep: Keep,
) -> Result<Tensor> {
    let dtype = checked(qkv, a, b, params, state)?;
    if launch::wanted(cx, qkv) {
        cx.routes().count(OP, "metal", dtype);
        return state.advance_on_device(cx, params, [qkv, a, b], keep);
    }
    cx.routes().count(OP, "serial", dtype);
    let rows = qkv.dim(0)?;
    for_element!(dtype, run(rows, qkv, a, b, params, state, keep))
}

fn run<T: Element>(
    rows: usize,
    qkv: &Tensor,
    a: &Tensor,
    b: &Tensor,
    params: &GatedDeltaParams,
    state: &mut GatedDeltaState,
    keep: Keep,
) -> Result<Tensor> {
    let d = params.dims;
    let (a, b) = (to_f32::<T>(OP, a)?, to_f32::<T>(OP, b)?);
    let x = to_f32::<T>(OP, qkv)?;
    let mut out = vec![0f32; rows * d.value_heads * d.value_dim];
    let chunk = match keep {
        Keep::Commit => CHUNK,
        Keep::Pending => rows.max(1),
    };
    for first in (0..rows).step_by(chunk) {
        let n = chunk.min(rows - first);
        let part = |width: usize| first * width..(first + n) * width;
        let input = kernel::Input {
            rows: n,
            x: &x[part(d.channels())],
            a: &a[part(d.value_heads)],
            b: &b[part(d.value_heads)],
        };
        let out =
            &mut out[first * d.value_heads * d.value_dim..][..n * d.value_heads * d.value_dim];
        state.advance(&params.prepared, &input, keep, out)?;
    }
    let out: Vec<T> = out.iter().map(|v| T::round(*v)).collect();
    let shape = (rows, d.value_heads, d.value_dim);
    Ok(Tensor::from_vec(out, shape, &Device::Cpu)?)
}

fn checked(
    qkv: &Tensor,
    a: &Tensor,
    b: &Tensor,
    params: &GatedDeltaParams,
    state: &GatedDeltaState,
) -> Result<DType> {
    let d = params.dims;
    let dtype = check::activation(OP, "qkv", qkv)?;
    check::dtype(OP, "a", a, dtype)?;
    check::dtype(OP, "b", b, dtype)?;
    check::shape(OP, "qkv", qkv, &[None, Some(d.channels())])?;
    let rows = qkv.dim(0)?;
    check::shape(OP, "a", a, &[Some(rows), Some(d.value_heads)])?;
    check::shape(OP, "b", b, &[Some(rows), Some(d.value_heads)])?;
    if state.dims() != d {
        return Err(Error::argument(
            OP,
            format!("a state of {:?} in a layer of {d:?}", state.dims()),
        ));
    }
    if state.pending() > 0 {
        return Err(Error::Cache(format!(
            "{} rows are pending: accept some or none of them first",
            state.pending()
        )));
    }
    Ok(dtype)
}
