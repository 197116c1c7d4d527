//! Rows of a weight as embeddings; `metal/embed.metal`.

use candle_core::{DType, Device, Tensor};

use super::device::OnDevice;
use super::{Storage, Weight};
use crate::error::{Error, Result};
use crate::ops::launch::{self, suffix, Constant, Launch, Operand, Params, Plan, Source};
use crate::ops::Context;

static SOURCE: Source = Source::new("embed.metal", include_str!("../../../metal/embed.metal"));

const OP: &str = "embed";
/// Threads of a threadgroup.
const THREADS: usize = 256;

/// Rows `ids` of a weight `[n, k]` as embeddings `[ids.len(), k]` of `dtype` (f32, bf16 or f16): `scale * code + bias` in f32, rounded
/// once, where the weight is. An id past the last row is an error.
pub fn embed(cx: &Context, weight: &Weight, ids: &[u32], dtype: DType) -> Result<Tensor> {
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        return Err(Error::argument(OP, format!("no embeddings in {dtype:?}")));
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= weight.n) {
        return Err(Error::Prompt(format!(
            "token {id} is outside the vocabulary of {}",
            weight.n
        )));
    }
    if ids.is_empty() {
        // candle uploads nothing of no elements.
        return Ok(Tensor::zeros((0, weight.k), dtype, weight.device())?);
    }
    if cx.launcher().is_some() || matches!(weight.storage, Storage::Device(_)) {
        cx.routes().count(OP, "metal", dtype);
        return on_metal(cx, weight.on_device()?, ids, weight.k, dtype);
    }
    cx.routes().count(OP, "cpu", dtype);
    let mut values = Vec::with_capacity(ids.len() * weight.k);
    for id in ids.iter().map(|id| *id as usize) {
        match &weight.storage {
            Storage::Affine(w) => values.extend(w.row(id)),
            Storage::Dense(w) => values.extend(w.row(id)),
            Storage::Device(_) => {}
        }
    }
    Ok(Tensor::from_vec(values, (ids.len(), weight.k), &Device::Cpu)?.to_dtype(dtype)?)
}

impl Weight {
    /// [`embed`] without a context.
    pub fn embed(&self, ids: &[u32], dtype: DType) -> Result<Tensor> {
        embed(&Context::default(), self, ids, dtype)
    }
}

fn on_metal(
    cx: &Context,
    weight: &OnDevice,
    ids: &[u32],
    k: usize,
    dtype: DType,
) -> Result<Tensor> {
    let ids = Tensor::new(ids, weight.device())?;
    let mut tensors = vec![&ids];
    tensors.extend(weight.tensors());
    let operands = tensors.iter().map(|t| Operand::of(OP, t));
    let operands = operands.collect::<Result<Vec<_>>>()?;
    let format = weight.format().map_or((0, 1), |f| (f.bits, f.group_size));
    let plan = plan(&operands, format, k, dtype)?;
    launch::run_one(cx, &plan, &tensors)
}

/// Operands: ids, then codes, scales and biases, or a plain weight.
fn plan(
    operands: &[Operand],
    (bits, group_size): (usize, usize),
    k: usize,
    dtype: DType,
) -> Result<Plan> {
    if !operands.iter().all(Operand::is_contiguous) {
        let what = "the Metal kernel needs operands without gaps";
        return Err(Error::argument(OP, what));
    }
    let last = operands.len() - 1;
    let rows = operands[0].dims[0];
    let stored = Constant::U16(match operands[last].dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        _ => 0,
    });
    let mut plan = Plan::default();
    let y = plan.output(&[rows, k], dtype);
    let mut launch = Launch::new(&SOURCE, format!("embed_{}", suffix(dtype)))
        .constant(1, stored)
        .constant(2, Constant::U16(group_size as u16))
        .constant(4, Constant::U16(bits as u16))
        .write(4, y)
        .params(5, Params::default().u32(k))
        .threads([k, rows, 1], [k.clamp(1, THREADS), 1, 1]);
    // A plain weight has no scales: it stands for them.
    for (index, n) in [0, 1, 2, 3].into_iter().map(|i| (i, i.min(last))) {
        launch = launch.input(index, n, &operands[n]);
    }
    plan.launch(launch);
    Ok(plan)
}
