//! What the GPU is told; `metal/attention.metal`.

use candle_core::DType;

use super::{cpu::Dims, OP};
use crate::error::{Error, Result};
use crate::ops::launch::{suffix, Launch, Operand, Params, Plan, Source};
use crate::ops::DECODE_ROWS;

static SOURCE: Source = Source::new(
    "attention.metal",
    include_str!("../../../metal/attention.metal"),
);

/// Slots of a split, and its threads; `SPLIT` in the kernel.
const SPLIT: usize = 128;
/// Queries of a split's threadgroup; `TILE` in the kernel.
const TILE: usize = 8;

/// Which kernels a call of so many rows takes.
pub(super) fn route(rows: usize) -> &'static str {
    match rows <= DECODE_ROWS {
        true => "metal_split",
        false => "metal_prefill",
    }
}

fn check(d: Dims, operands: &[&Operand]) -> Result<()> {
    if ![32, 64, 128, 256].contains(&d.dim) {
        return Err(Error::argument(
            OP,
            format!(
                "head dim {}; the Metal kernels take 32, 64, 128 and 256",
                d.dim
            ),
        ));
    }
    if operands.iter().any(|x| x.strides[2] != 1) {
        return Err(Error::argument(
            OP,
            "the Metal kernels need a head's lanes side by side; call contiguous()",
        ));
    }
    Ok(())
}

fn params(d: Dims, q: &Operand, k: &Operand, v: &Operand) -> Params {
    Params::default()
        .u32(d.rows)
        .u32(d.heads)
        .u32(d.heads / d.kv_heads)
        .u32(d.len)
        .u32(q.strides[0])
        .u32(q.strides[1])
        .u32(k.strides[0])
        .u32(k.strides[1])
        .u32(v.strides[0])
        .u32(v.strides[1])
        .f32(d.scale)
}

/// Softmax over all slots, `[heads, rows, len]` f32. Operands: `q` and `k` as for [`plan`]; at least one slot.
pub(super) fn probabilities(d: Dims, q: &Operand, k: &Operand) -> Result<Plan> {
    check(d, &[q, k])?;
    let mut plan = Plan::default();
    let p = plan.output(&[d.heads, d.rows, d.len], DType::F32);
    let kernel = format!("attention_scores_{}_{}", d.dim, suffix(q.dtype));
    let tiles = (d.rows * d.heads / d.kv_heads).div_ceil(TILE);
    let scores = Launch::new(&SOURCE, kernel)
        .input(0, 0, q)
        .input(1, 1, k)
        .write(2, p)
        .params(3, params(d, q, k, k))
        .threadgroups([tiles, d.len.div_ceil(SPLIT), d.kv_heads], [SPLIT, 1, 1]);
    plan.launch(scores);
    let softmax = Launch::new(&SOURCE, "attention_softmax")
        .write(0, p)
        .params(1, Params::default().u32(d.len))
        .threadgroups([d.heads * d.rows, 1, 1], [256, 1, 1]);
    plan.launch(softmax);
    Ok(plan)
}

/// Operands: `q`, `k` and `v`, each with a head's lanes side by side. They were checked, and `d.len >= d.rows`.
pub(super) fn plan(d: Dims, q: &Operand, k: &Operand, v: &Operand) -> Result<Plan> {
    check(d, &[q, k, v])?;
    let group = d.heads / d.kv_heads;
    let params = || params(d, q, k, v);
    let kernel = |name: &str| format!("attention_{name}_{}_{}", d.dim, suffix(q.dtype));
    let mut plan = Plan::default();
    let y = plan.output(&[d.rows, d.heads, d.dim], q.dtype);
    if d.rows > DECODE_ROWS {
        // As the instances in the kernel's file.
        let simds = if d.dim * q.dtype.size_in_bytes() > 512 {
            2
        } else {
            4
        };
        let launch = Launch::new(&SOURCE, kernel("prefill"))
            .input(0, 0, q)
            .input(1, 1, k)
            .input(2, 2, v)
            .write(3, y)
            .params(4, params())
            .threadgroups(
                [(d.rows * group).div_ceil(8 * simds), d.kv_heads, 1],
                [32 * simds, 1, 1],
            );
        plan.launch(launch);
        return Ok(plan);
    }
    let splits = d.len.div_ceil(SPLIT);
    let queries = splits * d.rows * d.heads;
    let (sums, tops) = (plan.scratch(4 * queries * d.dim), plan.scratch(8 * queries));
    let split = Launch::new(&SOURCE, kernel("split"))
        .input(0, 0, q)
        .input(1, 1, k)
        .input(2, 2, v)
        .write(3, sums)
        .write(4, tops)
        .params(5, params())
        // Tiles of a split run side by side, so that all but the first find its keys in the cache.
        .threadgroups(
            [(d.rows * group).div_ceil(TILE), splits, d.kv_heads],
            [SPLIT, 1, 1],
        );
    plan.launch(split);
    let merge = Launch::new(&SOURCE, format!("attention_merge_{}", suffix(q.dtype)))
        .read(0, sums)
        .read(1, tops)
        .write(2, y)
        .params(3, params())
        .params(4, Params::default().u32(d.dim))
        .threads([d.dim, d.rows * d.heads, 1], [d.dim.min(128), 1, 1]);
    plan.launch(merge);
    Ok(plan)
}
