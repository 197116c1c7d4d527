//! What the GPU is told; `metal/rope.metal`.

use candle_core::DType;

use super::{Rope, RopeLayout, OP};
use crate::error::{Error, Result};
use crate::ops::launch::{suffix, Constant, Launch, Operand, Params, Plan, Source};

static SOURCE: Source = Source::new("rope.metal", include_str!("../../../metal/rope.metal"));

/// Heads that a thread turns; `HEADS` in the kernel.
const HEADS: usize = 4;

/// Operands: `x` (its lanes side by side) and `positions`. Both were checked.
pub(super) fn plan(rope: &Rope, x: &Operand, positions: &Operand) -> Result<Plan> {
    let [rows, heads, dim] = x.dims[..] else {
        return Err(Error::argument(OP, "x has not three dimensions"));
    };
    if x.strides[2] != 1 && dim > 1 {
        return Err(Error::argument(
            OP,
            "the Metal kernel needs a head's lanes side by side; call contiguous()",
        ));
    }
    let (position_axis, position_row) = match positions.strides[..] {
        [row] => (0, row),
        [axis, row] => (axis, row),
        _ => {
            return Err(Error::argument(
                OP,
                "positions have not one or two dimensions",
            ))
        }
    };
    if rope.frequencies.len() > 1024 {
        return Err(Error::argument(
            OP,
            format!(
                "{} frequencies; the Metal kernel takes 1024",
                rope.frequencies.len()
            ),
        ));
    }
    let pairs = rope.dims / 2;
    let [_, height, width] = rope.sections.unwrap_or_default();
    let params = Params::default()
        .u32(heads)
        .u32(dim)
        .u32(pairs)
        .u32(rope.frequencies.len())
        .u32(x.strides[0])
        .u32(x.strides[1])
        .u32(position_axis)
        .u32(position_row)
        .u32(3 * height)
        .u32(3 * width)
        .f32(rope.position_scale)
        .f32(rope.pre_scale);
    // An empty table is still bound.
    let table = rope.frequencies.iter().copied().chain([0.0]);
    let table = table.take(rope.frequencies.len().max(1));
    let position = match positions.dtype {
        DType::U32 => "u32",
        _ => "i64",
    };
    let mut plan = Plan::default();
    let y = plan.output(&x.dims, x.dtype);
    let launch = Launch::new(&SOURCE, format!("rope_{position}_{}", suffix(x.dtype)))
        .constant(0, Constant::Bool(rope.layout == RopeLayout::Interleaved))
        .input(0, 0, x)
        .input(1, 1, positions)
        .write(2, y)
        .params(3, params)
        .params(4, Params::default().f32s(table))
        .threads(
            [dim - pairs, heads.div_ceil(HEADS), rows],
            [(dim - pairs).clamp(1, 64), 1, 1],
        );
    plan.launch(launch);
    Ok(plan)
}
