//! What the GPU is told; `metal/affine_matmul.metal`.

use candle_core::{DType, Tensor};

use super::device::OnDevice;
use super::policy::metal::{choose, Form};
use super::{Weight, OP};
use crate::error::{Error, Result};
use crate::ops::launch::{self, Constant, Launch, Operand, Params, Plan, Source};
use crate::ops::Context;

static SOURCE: Source = Source::new(
    "affine_matmul.metal",
    include_str!("../../../metal/affine_matmul.metal"),
);

/// Simdgroups of a threadgroup; `SIMDGROUPS` in the kernel.
const SIMDGROUPS: usize = 4;
/// Rows of `x` that one pass over the weights takes.
const ROWS: usize = 8;

/// The kernels' number for a dtype.
fn number(dtype: DType) -> Constant {
    Constant::U16(match dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        _ => 0,
    })
}

/// One call: `x` `[rows, k]` times weights of `n` columns.
pub(super) struct Product<'a> {
    pub(super) x: &'a Operand,
    pub(super) weight: [&'a Operand; 3],
    /// The second weight of `silu(x · Wᵀ) * (x · Uᵀ)`.
    pub(super) up: Option<[&'a Operand; 3]>,
    /// Experts `[rows, top]` (u32); the weights are theirs, stacked.
    pub(super) choices: Option<&'a Operand>,
    pub(super) n: usize,
    pub(super) bits: usize,
    pub(super) group_size: usize,
}

/// Operands: `x`, codes, scales and biases, those of the second weight, and the choices.
pub(super) fn plan(call: &Product) -> Result<Plan> {
    let [rows, k] = call.x.dims[..] else {
        return Err(Error::argument(OP, "x has not two dimensions"));
    };
    let operands = [call.x]
        .into_iter()
        .chain(call.weight)
        .chain(call.up.into_iter().flatten());
    if !operands.clone().all(|o| o.is_contiguous() && o.aligned(16)) {
        let what =
            "the Metal kernels need contiguous operands at multiples of 16 bytes; copy() them";
        return Err(Error::argument(OP, what));
    }
    let n = call.n;
    let top = call.choices.map_or(1, |c| c.dims[1]);
    let mut plan = Plan::default();
    let y = match call.choices {
        Some(_) => plan.output(&[rows, top, n], call.x.dtype),
        None => plan.output(&[rows, n], call.x.dtype),
    };
    let Form::Lanes { split } = choose(n, k);
    let (tile, tiles) = match call.choices {
        Some(_) => (1, rows * top),
        None => {
            let tile = rows.div_ceil(rows.div_ceil(ROWS).max(1));
            (
                tile,
                rows.checked_div(tile).map_or(0, |_| rows.div_ceil(tile)),
            )
        }
    };
    let columns = if tile <= 4 { 4 } else { 2 };
    let up = call.up.unwrap_or(call.weight);
    let (second, choices) = match call.up {
        Some(_) => (4, 7),
        None => (1, 4),
    };
    let mut launch = Launch::new(&SOURCE, format!("affine_lanes_b{}_m{tile}", call.bits))
        .constant(0, number(call.x.dtype))
        .constant(1, number(call.weight[1].dtype))
        .constant(2, Constant::U16(call.group_size as u16))
        .constant(3, Constant::U16(split as u16))
        .constant(4, Constant::Bool(call.up.is_some()))
        .constant(5, Constant::Bool(call.choices.is_some()))
        .input(3, 0, call.x)
        .write(4, y)
        .params(5, Params::default().u32(rows).u32(n).u32(k).u32(top));
    for (i, (w, u)) in call.weight.into_iter().zip(up).enumerate() {
        launch = launch.input(i, 1 + i, w).input(6 + i, second + i, u);
    }
    launch = match call.choices {
        Some(c) => launch.input(9, choices, c),
        None => launch.input(9, 1, call.weight[0]),
    };
    let across = n.div_ceil(columns * SIMDGROUPS / split);
    plan.launch(launch.threadgroups([across, tiles, 1], [32 * SIMDGROUPS, 1, 1]));
    Ok(plan)
}

/// `x` as the kernels can read it.
fn readable(x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let aligned = (x.layout().start_offset() * x.dtype().size_in_bytes()).is_multiple_of(16);
    Ok(if aligned { x } else { x.force_contiguous()? })
}

/// `x · Wᵀ`; with `up` the gated pair, with `choices` (`[rows, top]`, u32) the stacked experts of `n` columns each.
pub(super) fn run(
    cx: &Context,
    x: &Tensor,
    weight: &OnDevice,
    up: Option<&OnDevice>,
    choices: Option<&Tensor>,
    n: usize,
) -> Result<Tensor> {
    let x = readable(x)?;
    let (first, format) = affine(weight)?;
    let second = up.map(affine).transpose()?.map(|(t, _)| t);
    let choices = choices.map(|c| c.contiguous()).transpose()?;
    let of = |t: &Tensor| Operand::of(OP, t);
    let all = |t: [&Tensor; 3]| -> Result<[Operand; 3]> { Ok([of(t[0])?, of(t[1])?, of(t[2])?]) };
    let (w, u) = (all(first)?, second.map(all).transpose()?);
    let c = choices.as_ref().map(of).transpose()?;
    let plan = plan(&Product {
        x: &of(&x)?,
        weight: w.each_ref(),
        up: u.as_ref().map(|u| u.each_ref()),
        choices: c.as_ref(),
        n,
        bits: format.bits,
        group_size: format.group_size,
    })?;
    let mut operands = vec![&x];
    operands.extend(first);
    operands.extend(second.into_iter().flatten());
    operands.extend(&choices);
    launch::run_one(cx, &plan, &operands)
}

fn affine(w: &OnDevice) -> Result<([&Tensor; 3], crate::affine::AffineFormat)> {
    match w {
        OnDevice::Affine {
            codes,
            scales,
            biases,
            format,
        } => Ok(([codes, scales, biases], *format)),
        OnDevice::Dense(_) => Err(Error::argument(
            OP,
            "a plain weight where an affine one belongs",
        )),
    }
}

/// Whether two weights fit one gated launch.
pub(super) fn fusable(gate: &Weight, up: &Weight) -> bool {
    let scales = |w: &Weight| match w.on_device() {
        Ok(OnDevice::Affine { scales, .. }) => Some(scales.dtype()),
        _ => None,
    };
    gate.format.is_some()
        && gate.format == up.format
        && (gate.n, gate.k) == (up.n, up.k)
        && scales(gate) == scales(up)
}
