//! `y = x · Wᵀ` for MLX affine and for plain weights: one pass over the weights for all rows, every row exact.
//!
//! Affine weights are repacked once and never expanded. Activations become fixed point per group, so that the products with
//! the codes are exact integer sums, which have no order: [`reference()`] states the arithmetic, and every instruction set,
//! thread count and number of rows gives its bits.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod device;
mod embed;
mod metal;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
pub mod policy;
mod portable;
mod reference;
mod run;

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Tensor};

use super::{check, launch, Context};
use crate::affine::AffineFormat;
use crate::error::{Error, Result};
use activations::{float_tiles, Fixed};
use device::OnDevice;
use policy::metal::Form;
use policy::{choose, Call, Isa, Kernel};
use run::{Job, Operands, Output};

pub use embed::embed;
pub use reference::reference;

const OP: &str = "affine_matmul";

/// A linear layer's weight `[n, k]`, prepared once for the kernels.
#[derive(Clone, Debug)]
pub struct Weight {
    n: usize,
    k: usize,
    format: Option<AffineFormat>,
    storage: Storage,
    /// A CPU weight's tensors for launches that run on CPU tensors, unpacked when first wanted.
    unpacked: Arc<OnceLock<OnDevice>>,
}

#[derive(Clone, Debug)]
enum Storage {
    Affine(packed::Affine),
    Dense(packed::Dense),
    Device(OnDevice),
}

impl Weight {
    /// From codes `[n, k*bits/32]` (u32), scales and biases `[n, k/group_size]` (f32, bf16 or f16).
    pub fn affine(
        codes: &Tensor,
        scales: &Tensor,
        biases: &Tensor,
        format: AffineFormat,
        device: &Device,
    ) -> Result<Self> {
        let format = AffineFormat::new(format.bits, format.group_size)?;
        check::dtype(OP, "codes", codes, DType::U32)?;
        check::activation(OP, "scales", scales)?;
        check::activation(OP, "biases", biases)?;
        check::shape(OP, "scales", scales, &[None, None])?;
        let (n, groups) = scales.dims2()?;
        let k = groups * format.group_size;
        check::shape(OP, "codes", codes, &[Some(n), Some(k * format.bits / 32)])?;
        check::shape(OP, "biases", biases, &[Some(n), Some(groups)])?;
        let storage = match device {
            Device::Cpu => Storage::Affine(packed::Affine::new(codes, scales, biases, format)?),
            other => Storage::Device(OnDevice::affine(codes, scales, biases, format, other)?),
        };
        Ok(Self {
            n,
            k,
            format: Some(format),
            storage,
            unpacked: Arc::default(),
        })
    }

    /// From a plain weight `[n, k]` (f32, bf16 or f16).
    pub fn dense(weight: &Tensor, device: &Device) -> Result<Self> {
        check::activation(OP, "weight", weight)?;
        check::shape(OP, "weight", weight, &[None, None])?;
        let (n, k) = weight.dims2()?;
        let storage = match device {
            Device::Cpu => Storage::Dense(packed::Dense::new(weight)?),
            other => Storage::Device(OnDevice::dense(weight, other)?),
        };
        Ok(Self {
            n,
            k,
            format: None,
            storage,
            unpacked: Arc::default(),
        })
    }

    /// Columns of the output.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns of the input.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How the weight is quantized; `None` when it is plain.
    pub fn format(&self) -> Option<AffineFormat> {
        self.format
    }

    /// Bytes that the prepared weight holds.
    pub fn size_bytes(&self) -> usize {
        match &self.storage {
            Storage::Affine(w) => w.lines.len() * 64,
            Storage::Dense(w) => w.lines.len() * 64,
            Storage::Device(w) => w.size_bytes(),
        }
    }

    /// The rows `ids` of the weight as a weight `[ids.len(), k]`; its products have the bits that those columns have in the
    /// whole. An id past the last row is an error.
    pub fn select(&self, ids: &[u32]) -> Result<Self> {
        let rows: Vec<usize> = ids.iter().map(|id| *id as usize).collect();
        if let Some(id) = rows.iter().find(|id| **id >= self.n) {
            return Err(Error::argument(
                OP,
                format!("row {id} of a weight with {}", self.n),
            ));
        }
        let storage = match &self.storage {
            Storage::Affine(w) => Storage::Affine(w.select(&rows)),
            Storage::Dense(w) => Storage::Dense(w.select(&rows)),
            Storage::Device(w) => Storage::Device(w.select(ids)?),
        };
        Ok(Self {
            n: ids.len(),
            storage,
            unpacked: Arc::default(),
            ..*self
        })
    }

    /// Affine weights of one shape and format as one, each below the one before, for [`matmul_experts`], and the same weights as
    /// parts of it. `None` if they are others.
    pub(crate) fn stack(parts: &[&Self]) -> Result<Option<(Self, Vec<Self>)>> {
        let stored: Result<Vec<_>> = parts.iter().map(|w| w.on_device()).collect();
        let (Some(first), Some(all)) = (parts.first(), OnDevice::stack(&stored?)?) else {
            return Ok(None);
        };
        let on = |n, weight| Self {
            n,
            k: first.k,
            format: first.format,
            storage: Storage::Device(weight),
            unpacked: Arc::default(),
        };
        let n = first.n;
        let views = (0..parts.len()).map(|i| Ok(on(n, all.narrow(i * n, n)?)));
        let views = views.collect::<Result<Vec<_>>>()?;
        Ok(Some((on(n * parts.len(), all), views)))
    }

    fn device(&self) -> &Device {
        match &self.storage {
            Storage::Device(w) => w.device(),
            _ => &Device::Cpu,
        }
    }

    /// The tensors that launches read.
    fn on_device(&self) -> Result<&OnDevice> {
        if let (Storage::Device(w), _) | (_, Some(w)) = (&self.storage, self.unpacked.get()) {
            return Ok(w);
        }
        let unpacked = match &self.storage {
            Storage::Affine(w) => OnDevice::unpack_affine(w)?,
            Storage::Dense(w) => OnDevice::unpack_dense(w)?,
            Storage::Device(w) => w.clone(),
        };
        Ok(self.unpacked.get_or_init(|| unpacked))
    }

    fn metal_shape(&self, dtype: DType, n: usize) -> policy::metal::Shape {
        policy::metal::Shape {
            n,
            k: self.k,
            format: self.format,
            dtype,
            verify_rows: 1,
        }
    }

    fn metal_form(&self, cx: &Context, dtype: DType, n: usize) -> Form {
        policy::metal::choose(policy::metal::Shape {
            verify_rows: cx.verify_rows(),
            ..self.metal_shape(dtype, n)
        })
    }

    fn kernel(&self, m: usize, dtype: DType, isa: Isa) -> Kernel {
        let call = Call {
            cpu: !matches!(self.storage, Storage::Device(_)),
            m,
            n: self.n,
            k: self.k,
            format: self.format,
            dtype,
        };
        choose(call, isa)
    }
}

/// Several products of one `x`, in one parallel loop; `x` is brought into the kernels' order once.
fn project(cx: &Context, x: &Tensor, weights: &[&Weight], isa: Isa) -> Result<Vec<Tensor>> {
    check::activation(OP, "x", x)?;
    let (rows, dtype) = (x.dim(0)?, x.dtype());
    if launch::wanted(cx, x) {
        return weights.iter().map(|w| on_metal(cx, x, w)).collect();
    }
    let mut kernels = Vec::with_capacity(weights.len());
    for weight in weights {
        check::shape(OP, "x", x, &[None, Some(weight.k)])?;
        let kernel = weight.kernel(rows, dtype, isa);
        match kernel.fallback {
            None => cx.routes().count(OP, kernel.name, dtype),
            Some(why) => cx.routes().count_fallback(OP, kernel.name, dtype, why),
        }
        kernels.push(kernel);
    }
    let values = run::values(x)?;
    let (mut fixed, mut floats): (Vec<Fixed>, _) = (vec![], vec![]);
    for (weight, kernel) in weights.iter().zip(&kernels) {
        match &weight.storage {
            Storage::Affine(w) => {
                let size = w.format.group_size;
                if !fixed.iter().any(|f| f.group_size == size) {
                    fixed.push(Fixed::new(&values, w.k(), size, kernel.limbs));
                }
            }
            Storage::Dense(w) if floats.is_empty() => floats = float_tiles(&values, w.k),
            _ => {}
        }
    }
    if fixed.first().is_some_and(|f| !f.special.is_empty()) {
        let why = "rows with NaN or Inf";
        cx.routes().count_fallback(OP, "exact_rows", dtype, why);
    }
    let mut outs: Vec<Output> = (weights.iter())
        .map(|w| Output::new(dtype, rows * w.n))
        .collect();
    let mut jobs = Vec::with_capacity(weights.len());
    for ((weight, kernel), out) in weights.iter().zip(&kernels).zip(&mut outs) {
        let operands = match &weight.storage {
            Storage::Affine(w) => {
                let size = w.format.group_size;
                let x = fixed.iter().find(|f| f.group_size == size);
                x.map(|x| Operands::Affine(w, x))
            }
            Storage::Dense(w) => Some(Operands::Dense(w, &floats)),
            Storage::Device(_) => {
                return Err(Error::argument(
                    OP,
                    "x and the weight are on different devices",
                ))
            }
        };
        jobs.extend(operands.map(|operands| Job {
            operands,
            threaded: kernel.threaded,
            out,
        }));
    }
    run::run(isa, &values, jobs);
    let outs = outs.into_iter().zip(weights);
    // SAFETY: every weight here is on the CPU and had its job.
    outs.map(|(out, w)| unsafe { out.tensor(rows, w.n) })
        .collect()
}

fn on_metal(cx: &Context, x: &Tensor, weight: &Weight) -> Result<Tensor> {
    check::shape(OP, "x", x, &[None, Some(weight.k)])?;
    let w = weight.on_device()?;
    match w {
        OnDevice::Dense(w) if !w.dim(1)?.is_multiple_of(8) => {
            let why = "K is no multiple of 8";
            cx.routes().count_fallback(OP, "candle", x.dtype(), why);
            device_matmul(x, w)
        }
        _ => {
            let form = weight.metal_form(cx, x.dtype(), weight.n);
            let kernel = match (x.dim(0)? > crate::ops::DECODE_ROWS, weight.format, form) {
                (true, ..) => "metal_prefill",
                (_, Some(_), Form::Matrix) => "metal_matrix",
                (_, Some(_), _) => "metal_lanes",
                (_, None, _) => "metal_dense",
            };
            cx.routes().count(OP, kernel, x.dtype());
            metal::run(cx, x, w, None, None, weight.n, form)
        }
    }
}

fn one(cx: &Context, x: &Tensor, weight: &Weight, isa: Isa) -> Result<Tensor> {
    let mut outs = project(cx, x, &[weight], isa)?;
    outs.pop()
        .ok_or_else(|| Error::argument(OP, "the product is missing"))
}

/// `x · Wᵀ` for `x` of `[rows, k]` (f32, bf16 or f16), in `x`'s dtype.
///
/// Row `r` has the bits that it has alone, whatever the other rows hold. Affine weights: see [`reference()`]. Plain weights:
/// per 64 K the even and the odd products are summed apart with fused multiply-add in f32, added, and added to the result.
pub fn matmul(cx: &Context, x: &Tensor, weight: &Weight) -> Result<Tensor> {
    one(cx, x, weight, Isa::best())
}

/// [`matmul`] on a chosen instruction set, with the same bits; an error where this machine lacks it.
pub fn matmul_on(cx: &Context, x: &Tensor, weight: &Weight, isa: Isa) -> Result<Tensor> {
    if !Isa::available().contains(&isa) {
        return Err(Error::argument(
            OP,
            format!("this machine does not run {isa:?}"),
        ));
    }
    one(cx, x, weight, isa)
}

/// Several projections of one `x`: bitwise what [`matmul`] gives for each; `x` is turned to fixed point once, and the columns
/// of all are split over threads together.
pub fn matmul_grouped(cx: &Context, x: &Tensor, weights: &[&Weight]) -> Result<Vec<Tensor>> {
    project(cx, x, weights, Isa::best())
}

/// Each row of `x` `[rows, k]` times the experts chosen for it: `choices` is `[rows][top]`, flat, the result `[rows, top, n]`,
/// every row bitwise what [`matmul`] gives. An expert's weight is read once for all rows that chose it.
pub fn matmul_gathered(
    cx: &Context,
    x: &Tensor,
    experts: &[&Weight],
    choices: &[u32],
) -> Result<Tensor> {
    check::activation(OP, "x", x)?;
    check::shape(OP, "x", x, &[None, None])?;
    let rows = x.dim(0)?;
    let top = choices.len().checked_div(rows).unwrap_or(0);
    if choices.len() != rows * top || experts.is_empty() {
        return Err(Error::argument(
            OP,
            format!(
                "{} choices of {} experts for {rows} rows",
                choices.len(),
                experts.len()
            ),
        ));
    }
    let n = experts[0].n;
    let mut by_expert = vec![vec![]; experts.len()];
    for (at, expert) in choices.iter().enumerate() {
        match by_expert.get_mut(*expert as usize) {
            Some(places) => places.push(at as u32),
            None => {
                return Err(Error::argument(
                    OP,
                    format!("expert {expert} of {}", experts.len()),
                ))
            }
        }
    }
    let (mut parts, mut place_of) = (vec![], vec![0u32; choices.len()]);
    let mut placed = 0;
    for (expert, places) in experts.iter().zip(&by_expert) {
        if expert.n != n {
            return Err(Error::argument(
                OP,
                format!("experts of {n} and of {} columns", expert.n),
            ));
        }
        if places.is_empty() {
            continue;
        }
        let own: Vec<u32> = places.iter().map(|at| at / top as u32).collect();
        let own = x.index_select(&Tensor::new(own, x.device())?, 0)?;
        parts.push(matmul(cx, &own, expert)?);
        for at in places {
            place_of[*at as usize] = placed;
            placed += 1;
        }
    }
    if parts.is_empty() {
        return Ok(Tensor::zeros((rows, top, n), x.dtype(), x.device())?);
    }
    let order = Tensor::new(place_of, x.device())?;
    let y = Tensor::cat(&parts, 0)?.index_select(&order, 0)?;
    Ok(y.reshape((rows, top, n))?)
}

/// `silu(x · Gᵀ) * (x · Uᵀ)`: bitwise [`silu_gate`](super::silu_gate) of the two products, each rounded to `x`'s dtype.
pub fn gate_up_silu(cx: &Context, x: &Tensor, gate: &Weight, up: &Weight) -> Result<Tensor> {
    let few = x.dim(0)? <= crate::ops::DECODE_ROWS;
    let form = gate.metal_form(cx, x.dtype(), gate.n);
    if few && launch::wanted(cx, x) && form != Form::Matrix && metal::fusable(gate, up) {
        check::activation(OP, "x", x)?;
        check::shape(OP, "x", x, &[None, Some(gate.k)])?;
        cx.routes().count(OP, "gate_up/metal_lanes", x.dtype());
        let (g, u) = (gate.on_device()?, up.on_device()?);
        return metal::run(cx, x, g, Some(u), None, gate.n, form);
    }
    let products = matmul_grouped(cx, x, &[gate, up])?;
    super::silu_gate(cx, &products[1], &products[0])
}

/// Each row of `x` `[rows, k]` times the experts chosen for it, which stand one below the other in `stacked`, `n` rows each. `choices` is
/// `[rows, top]` (u32), the result `[rows, top, n]`: row by row the bits of [`matmul`] with that expert's own weight in its
/// lanes form. An expert past the
/// last is undefined. Only where launches run; elsewhere see [`matmul_gathered`].
pub fn matmul_experts(
    cx: &Context,
    x: &Tensor,
    stacked: &Weight,
    choices: &Tensor,
    n: usize,
) -> Result<Tensor> {
    check::activation(OP, "x", x)?;
    check::shape(OP, "x", x, &[None, Some(stacked.k)])?;
    check::dtype(OP, "choices", choices, DType::U32)?;
    check::shape(OP, "choices", choices, &[Some(x.dim(0)?), None])?;
    let affine = stacked.format.is_some();
    if n == 0 || !stacked.n.is_multiple_of(n) || !launch::wanted(cx, x) || !affine {
        let what = format!(
            "{} stacked rows (affine: {affine}) in experts of {n}, on {:?}; experts must be affine and on the device",
            stacked.n,
            x.device()
        );
        return Err(Error::argument(OP, what));
    }
    cx.routes().count(OP, "experts/metal_lanes", x.dtype());
    // Always lanes: a row meets an expert alone.
    let shape = stacked.metal_shape(x.dtype(), n);
    let form = policy::metal::choose(shape);
    metal::run(cx, x, stacked.on_device()?, None, Some(choices), n, form)
}

/// f32 products, each row alone.
fn device_matmul(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    if x.dim(0)? == 0 {
        return Ok(Tensor::zeros((0, w.dim(0)?), x.dtype(), x.device())?);
    }
    let w = w.to_dtype(DType::F32)?.t()?;
    let row = |r| -> Result<Tensor> { Ok(x.narrow(0, r, 1)?.to_dtype(DType::F32)?.matmul(&w)?) };
    let rows = (0..x.dim(0)?).map(row).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(&rows, 0)?.to_dtype(x.dtype())?)
}
