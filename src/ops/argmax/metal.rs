//! What the GPU is told; `metal/argmax.metal`.

use candle_core::DType;

use super::OP;
use crate::error::{Error, Result};
use crate::ops::launch::{suffix, Launch, Operand, Params, Plan, Source};

static SOURCE: Source = Source::new("argmax.metal", include_str!("../../../metal/argmax.metal"));

/// Threads of a threadgroup, and the columns that it takes.
const THREADS: usize = 256;
const PART: usize = 8192;

/// Operand: `logits`, a row's columns side by side. Output: a column per row, or what stands for none.
pub(super) fn plan(logits: &Operand) -> Result<Plan> {
    let [rows, columns] = logits.dims[..] else {
        return Err(Error::argument(OP, "logits have not two dimensions"));
    };
    if logits.strides[1] != 1 && columns > 1 {
        let what = "the Metal kernel needs a row's logits side by side; call contiguous()";
        return Err(Error::argument(OP, what));
    }
    let parts = columns.div_ceil(PART);
    let mut plan = Plan::default();
    let best = plan.output(&[rows], DType::U32);
    let ranks = plan.scratch(4 * rows * parts);
    let places = plan.scratch(4 * rows * parts);
    let params = || {
        Params::default()
            .u32(rows)
            .u32(columns)
            .u32(logits.strides[0])
            .u32(PART)
            .u32(parts)
    };
    let find = Launch::new(&SOURCE, format!("argmax_parts_{}", suffix(logits.dtype)))
        .input(0, 0, logits)
        .write(1, ranks)
        .write(2, places)
        .params(3, params())
        .threadgroups([parts, rows, 1], [THREADS, 1, 1]);
    let merge = Launch::new(&SOURCE, "argmax_merge")
        .read(0, ranks)
        .read(1, places)
        .write(2, best)
        .params(3, params())
        .threadgroups([rows.div_ceil(4), 1, 1], [128, 1, 1]);
    plan.launch(find);
    plan.launch(merge);
    Ok(plan)
}
