//! What the GPU is told; `metal/gated_delta.metal`.

use candle_core::DType;

use super::{GatedDeltaDims, Keep, OP};
use crate::error::{Error, Result};
use crate::ops::launch::{suffix, Launch, Operand, Params, Place, Plan, Source};

static SOURCE: Source = Source::new(
    "gated_delta.metal",
    include_str!("../../../metal/gated_delta.metal"),
);

/// Rows that a launch takes at most while a long prompt is committed: bounds the scratch (4 bytes a channel), changes no bit.
pub(super) const CHUNK: usize = 512;
/// Value lanes of a simdgroup; `VALUES` in the kernel.
const VALUES: usize = 4;
/// Simdgroups of a threadgroup.
const SIMDS: usize = 4;
const THREADS: [usize; 3] = [32 * SIMDS, 1, 1];

/// Operands by number. The tape's three come last and may be missing.
const X: usize = 0;
const STATE: usize = 6;
const WINDOW: usize = 7;
const TAPE: usize = 8;

/// Whether the kernels take a layer of these sizes.
pub(super) fn check(d: GatedDeltaDims) -> Result<()> {
    if d.key_dim > 256 || d.taps < 2 {
        return Err(Error::argument(
            OP,
            format!(
                "{d:?}: the Metal kernels take key sizes up to 256 and two taps or more; run this model on the CPU"
            ),
        ));
    }
    Ok(())
}

fn kernel(d: GatedDeltaDims, dtype: DType) -> String {
    let lanes = d.key_dim.div_ceil(32).next_power_of_two();
    format!("gated_delta_{lanes}_{}", suffix(dtype))
}

struct Chunk {
    rows: usize,
    first: usize,
    count: usize,
    accepted: usize,
    /// The row of `x` before which the new window ends.
    end: usize,
}

fn params(d: GatedDeltaDims, c: &Chunk, row_strides: [usize; 4]) -> Params {
    let [x, a, b, tape] = row_strides;
    Params::default()
        .u32(c.rows)
        .u32(c.first)
        .u32(c.count)
        .u32(x)
        .u32(a)
        .u32(b)
        .u32(tape)
        .u32(c.accepted)
        .u32(d.taps)
        .u32(c.end)
        .u32(d.key_heads)
        .u32(d.value_heads)
        .u32(d.key_dim)
        .u32(d.value_dim)
}

fn recurrence_grid(d: GatedDeltaDims) -> [usize; 3] {
    [d.value_dim.div_ceil(VALUES * SIMDS), d.value_heads, 1]
}

/// Operands: `x`, `a`, `b` (a row's columns side by side), `conv`, `a_log`, `dt_bias`, state `[value_heads, value_dim, key_dim]` and
/// window, and the tape's `x`, rows and gates if `accepted > 0`. Outputs: `y`, state, window, and with pending rows the rows
/// and gates of a new tape. At least one row; all were checked but for strides.
pub(super) fn plan(
    d: GatedDeltaDims,
    accepted: usize,
    keep: Keep,
    operands: &[Operand],
    chunk: usize,
) -> Result<Plan> {
    let with_columns = |i: usize| i <= 2 || i == TAPE;
    let wrong = operands.iter().enumerate().any(|(i, x)| {
        let columns = x.strides.last().is_none_or(|s| *s == 1);
        !(x.is_contiguous() || columns && with_columns(i))
    });
    if wrong || operands.len() < if accepted > 0 { TAPE + 3 } else { TAPE } {
        return Err(Error::argument(
            OP,
            "the Metal kernels need a row's columns side by side, and weights without gaps; call contiguous()",
        ));
    }
    let (rows, dtype) = (operands[X].dims[0], operands[X].dtype);
    let stride = |i: usize| operands[i].strides[0];
    let tape_x = if accepted > 0 { TAPE } else { X };
    let strides = [stride(X), stride(1), stride(2), stride(tape_x)];
    let channels = d.channels();
    let mut plan = Plan::default();
    let y = plan.output(&[rows, d.value_heads, d.value_dim], dtype);
    let state = plan.output(&[d.value_heads, d.value_dim, d.key_dim], DType::F32);
    let window = plan.output(&[d.taps - 1, channels], DType::F32);
    let (chunk, end, qkv, gates) = match keep {
        Keep::Pending => (
            rows,
            0,
            plan.output(&[rows, channels], DType::F32),
            plan.output(&[rows, 2, d.value_heads], DType::F32),
        ),
        Keep::Commit => {
            let chunk = chunk.clamp(1, rows);
            let (qkv, gates) = (
                plan.scratch(4 * chunk * channels),
                plan.scratch(8 * chunk * d.value_heads),
            );
            (chunk, rows, qkv, gates)
        }
    };
    let units =
        2 * d.key_heads + (d.value_heads * d.value_dim).div_ceil(128) + d.value_heads.div_ceil(32);
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let mut part = Chunk {
            rows,
            first,
            count,
            accepted,
            end,
        };
        let mut prepare = Launch::new(&SOURCE, format!("gated_delta_prepare_{}", suffix(dtype)));
        for (i, operand) in operands.iter().enumerate().take(STATE) {
            prepare = prepare.input(i, i, operand);
        }
        let prepare = prepare
            .input(6, WINDOW, &operands[WINDOW])
            .input(7, tape_x, &operands[tape_x])
            .write(8, qkv)
            .write(9, gates)
            .write(10, window)
            .params(11, params(d, &part, strides))
            .threadgroups([units.div_ceil(SIMDS), count + d.taps - 1, 1], THREADS);
        plan.launch(prepare);
        // The tape is replayed once.
        part.accepted = if first == 0 { accepted } else { 0 };
        let recurrence = Launch::new(&SOURCE, kernel(d, dtype));
        let recurrence = match first {
            0 => recurrence.input(0, STATE, &operands[STATE]),
            _ => recurrence.read(0, state),
        };
        let recurrence = recurrence.write(1, state);
        let recurrence = match part.accepted {
            0 => recurrence.read(2, qkv).read(3, gates),
            _ => recurrence.input(2, TAPE + 1, &operands[TAPE + 1]).input(
                3,
                TAPE + 2,
                &operands[TAPE + 2],
            ),
        };
        let recurrence = recurrence
            .read(4, qkv)
            .read(5, gates)
            .write(6, y)
            .params(7, params(d, &part, strides))
            .params(8, Params::default().u32((keep == Keep::Commit) as usize))
            .threadgroups(recurrence_grid(d), THREADS);
        plan.launch(recurrence);
    }
    Ok(plan)
}

/// The state after the tape's accepted rows. Operands: the state, the tape's rows and gates.
pub(super) fn replay(d: GatedDeltaDims, accepted: usize, operands: &[Operand; 3]) -> Plan {
    let mut plan = Plan::default();
    let state = plan.output(&[d.value_heads, d.value_dim, d.key_dim], DType::F32);
    let part = Chunk {
        rows: 0,
        first: 0,
        count: 0,
        accepted,
        end: 0,
    };
    let [old, rows, gates] = operands;
    let launch = Launch::new(&SOURCE, kernel(d, DType::F32))
        .input(0, 0, old)
        .write(1, state)
        .input(2, 1, rows)
        .input(3, 2, gates)
        // No rows and no outputs: bound, never touched.
        .read(4, Place::Input(1))
        .read(5, Place::Input(2))
        .write(6, state)
        .params(7, params(d, &part, [0; 4]))
        .params(8, Params::default().u32(1))
        .threadgroups(recurrence_grid(d), THREADS);
    plan.launch(launch);
    plan
}
