//! What the GPU is told; `metal/moe.metal`.

use candle_core::DType;

use super::OP;
use crate::error::{Error, Result};
use crate::ops::launch::{suffix, Launch, Operand, Params, Plan, Source};

static SOURCE: Source = Source::new("moe.metal", include_str!("../../../metal/moe.metal"));

/// Operand: `logits`, a row's columns side by side. Outputs: experts and shares.
pub(super) fn route(logits: &Operand, top: usize) -> Result<Plan> {
    let [rows, experts] = logits.dims[..] else {
        return Err(Error::argument(OP, "logits have not two dimensions"));
    };
    if logits.strides[1] != 1 && experts > 1 {
        return Err(Error::argument(
            OP,
            "the Metal kernel needs a row's logits side by side; call contiguous()",
        ));
    }
    let mut plan = Plan::default();
    let chosen = plan.output(&[rows, top], DType::U32);
    let shares = plan.output(&[rows, top], DType::F32);
    let params = Params::default()
        .u32(rows)
        .u32(experts)
        .u32(top)
        .u32(0)
        .u32(logits.strides[0])
        .u32(0);
    let launch = Launch::new(&SOURCE, format!("moe_route_{}", suffix(logits.dtype)))
        .input(0, 0, logits)
        .write(1, chosen)
        .write(2, shares)
        .params(3, params)
        .threadgroups([rows.div_ceil(4), 1, 1], [128, 1, 1]);
    plan.launch(launch);
    Ok(plan)
}

/// Operands: outputs, shares, the shared expert's outputs (contiguous) and gates.
pub(super) fn combine(operands: [&Operand; 4]) -> Result<Plan> {
    let [outs, shares, shared, gates] = operands;
    let [rows, top, hidden] = outs.dims[..] else {
        return Err(Error::argument(OP, "outs have not three dimensions"));
    };
    if ![outs, shares, shared].iter().all(|o| o.is_contiguous()) {
        return Err(Error::argument(
            OP,
            "the Metal kernel needs operands without gaps; call contiguous()",
        ));
    }
    let mut plan = Plan::default();
    let y = plan.output(&[rows, hidden], outs.dtype);
    let params = Params::default()
        .u32(rows)
        .u32(0)
        .u32(top)
        .u32(hidden)
        .u32(0)
        .u32(gates.strides[0]);
    let launch = Launch::new(&SOURCE, format!("moe_combine_{}", suffix(outs.dtype)))
        .input(0, 0, outs)
        .input(1, 1, shares)
        .input(2, 2, shared)
        .input(3, 3, gates)
        .write(4, y)
        .params(5, params)
        .threads([hidden, rows, 1], [hidden.clamp(1, 256), 1, 1]);
    plan.launch(launch);
    Ok(plan)
}
