//! What the GPU is told; `metal/sigmoid_gate.metal`.

use super::Gate;
use crate::error::{Error, Result};
use crate::ops::launch::{suffix, Constant, Launch, Operand, Params, Plan, Source};

static SOURCE: Source = Source::new(
    "sigmoid_gate.metal",
    include_str!("../../../metal/sigmoid_gate.metal"),
);

/// Operands: `x` and `gate`. Both were checked.
pub(super) fn plan(kind: Gate, x: &Operand, gate: &Operand) -> Result<Plan> {
    let Some((a, b)) = Operand::common_rows(x, gate) else {
        let what = "strides that the Metal kernel cannot follow; call contiguous()";
        return Err(Error::argument(kind.op(), what));
    };
    let params = Params::default()
        .u32(a.inner)
        .u32(a.width)
        .u32(a.outer_stride)
        .u32(a.inner_stride)
        .u32(b.outer_stride)
        .u32(b.inner_stride);
    let mut plan = Plan::default();
    let y = plan.output(&x.dims, x.dtype);
    let launch = Launch::new(&SOURCE, format!("gate_{}", suffix(x.dtype)))
        .constant(0, Constant::Bool(matches!(kind, Gate::Silu)))
        .input(0, 0, x)
        .input(1, 1, gate)
        .write(2, y)
        .params(3, params)
        .threads([a.width, a.inner, a.outer], [a.width.clamp(1, 256), 1, 1]);
    plan.launch(launch);
    Ok(plan)
}
