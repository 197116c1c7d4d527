//! What the GPU is told; `metal/rms_norm.metal`.

use super::OP;
use crate::error::{Error, Result};
use crate::ops::launch::{suffix, Constant, Launch, Operand, Params, Plan, Source};

static SOURCE: Source = Source::new(
    "rms_norm.metal",
    include_str!("../../../metal/rms_norm.metal"),
);

/// Columns that a simdgroup takes before a row gets another one.
const COLUMNS: usize = 512;
/// Rows of one simdgroup each that share a threadgroup.
const ROWS: usize = 4;
/// Threadgroups along x; more rows go along y.
const ACROSS: usize = 1 << 15;

/// Operands: `x`, `weight` and, for the gated form, `z`. All were checked.
pub(super) fn plan(x: &Operand, weight: &Operand, z: Option<&Operand>, eps: f32) -> Result<Plan> {
    let refused = || {
        Error::argument(
            OP,
            "strides that the Metal kernel cannot follow; call contiguous()",
        )
    };
    let gate = z.unwrap_or(x);
    let (rows_of_x, rows_of_z) = Operand::common_rows(x, gate).ok_or_else(refused)?;
    if !weight.is_contiguous() {
        return Err(refused());
    }
    let (rows, width) = (rows_of_x.count(), rows_of_x.width);
    let simdgroups = width.div_ceil(COLUMNS).clamp(1, 32);
    let per_group = if simdgroups == 1 { ROWS } else { 1 };
    let groups = rows.div_ceil(per_group);
    let params = Params::default()
        .u32(rows)
        .u32(width)
        .u32(rows_of_x.inner)
        .u32(rows_of_x.outer_stride)
        .u32(rows_of_x.inner_stride)
        .u32(rows_of_z.outer_stride)
        .u32(rows_of_z.inner_stride)
        .f32(eps);
    let mut plan = Plan::default();
    let y = plan.output(&x.dims, x.dtype);
    let launch = Launch::new(&SOURCE, format!("rms_norm_{}", suffix(x.dtype)))
        .constant(0, Constant::U16(simdgroups as u16))
        .constant(1, Constant::Bool(z.is_some()))
        .input(0, 0, x)
        .input(1, 1, weight)
        .write(2, y)
        .params(3, params)
        .input(4, if z.is_some() { 2 } else { 0 }, gate)
        .threadgroups(
            [groups.min(ACROSS), groups.div_ceil(ACROSS), 1],
            [32 * simdgroups * per_group, 1, 1],
        );
    if width > 0 {
        plan.launch(launch);
    }
    Ok(plan)
}
