//! What the GPU is told; `metal/affine_matmul.metal`.

use candle_core::{DType, Tensor};

use super::device::OnDevice;
use super::policy::metal::Form;
use super::{Weight, OP};
use crate::error::{Error, Result};
use crate::ops::launch::{self, suffix, Constant, Launch, Operand, Params, Place, Plan, Source};
use crate::ops::Context;
use crate::ops::DECODE_ROWS;

static LANES: Source = Source::new(
    "affine_matmul.metal",
    include_str!("../../../metal/affine_matmul.metal"),
);
static MATRIX: Source = Source::new(
    "affine_matrix.metal",
    include_str!("../../../metal/affine_matrix.metal"),
);
static DENSE: Source = Source::new(
    "dense_matmul.metal",
    include_str!("../../../metal/dense_matmul.metal"),
);
static PREFILL: Source = Source::new(
    "matmul_prefill.metal",
    include_str!("../../../metal/matmul_prefill.metal"),
);

/// Simdgroups of a threadgroup; `SIMDGROUPS` in the kernel.
const SIMDGROUPS: usize = 4;
/// Rows of a tile at most, and columns of a simdgroup; the instances of the kernels' files. Tiles of the same columns are neighbours in
/// the grid, so that they share the weights in the cache.
const ROWS: usize = 4;
const COLUMNS: usize = 4;

/// The kernels' number for a dtype.
fn number(dtype: DType) -> Constant {
    Constant::U16(match dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        _ => 0,
    })
}

/// Rows and columns of a prefill threadgroup; `TILE` in the kernel.
const TILE: usize = 32;

/// A weight's operands, as many as it has.
struct Operands {
    /// Codes, scales and biases, or the plain weight.
    tensors: Vec<Operand>,
    /// Bits and group size; 0 and 1 for a plain weight.
    format: (usize, usize),
}

/// Columns of a matrix threadgroup.
const MATRIX_COLUMNS: usize = 16;

/// One call: `x` `[rows, k]` times weights of `n` columns.
struct Product<'a> {
    x: &'a Operand,
    weight: &'a Operands,
    /// The second weight of `silu(x · Wᵀ) * (x · Uᵀ)`.
    up: Option<&'a Operands>,
    /// Experts `[rows, top]` (u32); the weights are theirs, stacked.
    choices: Option<&'a Operand>,
    n: usize,
    form: Form,
}

/// Operands: `x`, the weight's tensors, those of the second weight, and the choices.
fn plan(call: &Product) -> Result<Plan> {
    let [rows, k] = call.x.dims[..] else {
        return Err(Error::argument(OP, "x has not two dimensions"));
    };
    let second = call.up.map_or(&[][..], |u| &u.tensors);
    let mut operands = [call.x]
        .into_iter()
        .chain(&call.weight.tensors)
        .chain(second);
    if !operands.all(|o| o.is_contiguous() && o.aligned(16)) {
        let what = "the Metal kernels need contiguous operands at multiples of 16 bytes";
        return Err(Error::argument(OP, what));
    }
    let n = call.n;
    let top = call.choices.map_or(1, |c| c.dims[1]);
    let mut plan = Plan::default();
    let y = match call.choices {
        Some(_) => plan.output(&[rows, top, n], call.x.dtype),
        None => plan.output(&[rows, n], call.x.dtype),
    };
    let (bits, group_size) = call.weight.format;
    let affine = bits > 0;
    let single = call.up.is_none() && call.choices.is_none();
    if rows > DECODE_ROWS && single {
        let mut launch = Launch::new(&PREFILL, format!("matmul_prefill_{}", suffix(call.x.dtype)))
            .constant(4, Constant::U16(bits as u16));
        launch = common(launch, call, y, 1, [rows, n, k, top]);
        let grid = [n.div_ceil(TILE), rows.div_ceil(TILE), 1];
        plan.launch(launch.threadgroups(grid, [32 * SIMDGROUPS, 1, 1]));
        return Ok(plan);
    }
    let split = match call.form {
        Form::Lanes { split } => split,
        Form::Matrix if single => {
            let (tiles, height) = if rows <= 8 {
                (8, rows.div_ceil(8))
            } else {
                (16, 1)
            };
            let name = format!("affine_matrix_b{bits}_r{tiles}_{}", suffix(call.x.dtype));
            let launch = common(Launch::new(&MATRIX, name), call, y, 1, [rows, n, k, top]);
            let launch = launch.define("ONLY_BITS", bits);
            let launch = launch.constant(2, Constant::U16(group_size as u16));
            let grid = [n.div_ceil(MATRIX_COLUMNS), height, 1];
            plan.launch(launch.threadgroups(grid, [32 * SIMDGROUPS, 1, 1]));
            return Ok(plan);
        }
        Form::Matrix => 1,
    };
    let (tile, tiles) = match call.choices {
        Some(_) => (1, rows * top),
        None => {
            let tile = rows.div_ceil(rows.div_ceil(ROWS).max(1));
            (tile, if tile == 0 { 0 } else { rows.div_ceil(tile) })
        }
    };
    let mut launch = match affine {
        true => Launch::new(&LANES, format!("affine_lanes_b{bits}_m{tile}")),
        false => Launch::new(&DENSE, format!("dense_lanes_m{tile}")),
    };
    launch = common(launch, call, y, split, [rows, n, k, top]);
    if affine {
        launch = launch
            .define("ONLY_BITS", bits)
            .constant(2, Constant::U16(group_size as u16))
            .constant(4, Constant::Bool(call.up.is_some()))
            .constant(5, Constant::Bool(call.choices.is_some()));
        let (at, up) = match call.up {
            Some(up) => (4, up),
            None => (1, call.weight),
        };
        for (i, u) in up.tensors.iter().enumerate() {
            launch = launch.input(6 + i, at + i, u);
        }
        let (at, choices) = match call.choices {
            Some(choices) => (1 + call.weight.tensors.len() + second.len(), choices),
            None => (1, &call.weight.tensors[0]),
        };
        launch = launch.input(9, at, choices);
    }
    let across = n.div_ceil(COLUMNS * SIMDGROUPS / split);
    plan.launch(launch.threadgroups([tiles, across, 1], [32 * SIMDGROUPS, 1, 1]));
    Ok(plan)
}

/// What `matmul.h` declares.
fn common(launch: Launch, call: &Product, y: Place, split: usize, sizes: [usize; 4]) -> Launch {
    let weight = call.weight;
    let halves = weight.tensors.get(1).unwrap_or(&weight.tensors[0]);
    let params = sizes.into_iter().fold(Params::default(), Params::u32);
    let mut launch = launch
        .constant(0, number(call.x.dtype))
        .constant(1, number(halves.dtype))
        .input(3, 0, call.x)
        .write(4, y)
        .params(5, params);
    let prefill = launch.source == &PREFILL;
    if prefill {
        launch = launch.constant(2, Constant::U16(weight.format.1 as u16));
    } else if launch.source != &MATRIX {
        launch = launch.constant(3, Constant::U16(split as u16));
    }
    // The prefill kernel binds three tensors always; a plain weight is all of them.
    for i in 0..if prefill { 3 } else { weight.tensors.len() } {
        let at = i.min(weight.tensors.len() - 1);
        launch = launch.input(i, 1 + at, &weight.tensors[at]);
    }
    launch
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
    form: Form,
) -> Result<Tensor> {
    let x = readable(x)?;
    let choices = choices.map(|c| c.contiguous()).transpose()?;
    let of = |t: &Tensor| Operand::of(OP, t);
    let operands = |w: &OnDevice| -> Result<Operands> {
        Ok(Operands {
            tensors: w.tensors().into_iter().map(of).collect::<Result<_>>()?,
            format: w.format().map_or((0, 1), |f| (f.bits, f.group_size)),
        })
    };
    let plan = plan(&Product {
        x: &of(&x)?,
        weight: &operands(weight)?,
        up: up.map(operands).transpose()?.as_ref(),
        choices: choices.as_ref().map(of).transpose()?.as_ref(),
        n,
        form,
    })?;
    let tensors = [Some(weight), up]
        .into_iter()
        .flatten()
        .flat_map(|w| w.tensors());
    let operands: Vec<&Tensor> = [&x].into_iter().chain(tensors).chain(&choices).collect();
    launch::run_one(cx, &plan, &operands)
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
