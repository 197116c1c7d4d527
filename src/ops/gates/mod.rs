//! Gates: `x * sigmoid(gate)` after full attention, `x * silu(gate)` inside a feed-forward layer.

mod metal;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::cpu::{contiguous, for_element, Element};
use super::launch::{self, Operand};
use super::vector::{self, Kernel};
use super::{check, Context};
use crate::error::Result;

/// Elements that a thread takes at least.
const PART: usize = 1 << 13;

/// `x * sigmoid(gate)`, element by element: `gate` has `x`'s shape and dtype (f32, bf16 or f16). Computed in f32,
/// rounded once.
pub fn sigmoid_gate(cx: &Context, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    apply(cx, x, gate, Gate::Sigmoid)
}

/// `x * silu(gate)`, otherwise as [`sigmoid_gate`].
pub fn silu_gate(cx: &Context, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    apply(cx, x, gate, Gate::Silu)
}

/// The oracle of [`sigmoid_gate`].
pub fn reference(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let f32 = |t: &Tensor| t.to_dtype(DType::F32);
    let gate = candle_nn::ops::sigmoid(&f32(gate)?)?;
    Ok((f32(x)? * gate)?.to_dtype(x.dtype())?)
}

/// The oracle of [`silu_gate`].
pub fn silu_reference(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let f32 = |t: &Tensor| t.to_dtype(DType::F32);
    Ok((f32(x)? * f32(gate)?.silu()?)?.to_dtype(x.dtype())?)
}

#[derive(Clone, Copy)]
enum Gate {
    Sigmoid,
    Silu,
}

fn apply(cx: &Context, x: &Tensor, gate: &Tensor, kind: Gate) -> Result<Tensor> {
    let op = kind.op();
    let dtype = check::activation(op, "x", x)?;
    check::dtype(op, "gate", gate, dtype)?;
    let shape: Vec<_> = x.dims().iter().map(|d| Some(*d)).collect();
    check::shape(op, "gate", gate, &shape)?;
    if launch::wanted(cx, x) {
        cx.routes().count(op, "metal", dtype);
        let of = |t: &Tensor| Operand::of(op, t);
        let (x, gate) = match Operand::common_rows(&of(x)?, &of(gate)?) {
            Some(_) => (x.clone(), gate.clone()),
            None => (x.contiguous()?, gate.contiguous()?),
        };
        let plan = metal::plan(kind, &of(&x)?, &of(&gate)?)?;
        return launch::run_one(cx, &plan, &[&x, &gate]);
    }
    cx.routes().count(op, "cpu", dtype);
    let (x, gate) = (x.contiguous()?, gate.contiguous()?);
    Ok(x.apply_op2_no_bwd(&gate, &kind)?)
}

impl Gate {
    fn op(self) -> &'static str {
        match self {
            Self::Sigmoid => "sigmoid_gate",
            Self::Silu => "silu_gate",
        }
    }
}

impl CustomOp2 for Gate {
    fn name(&self) -> &'static str {
        self.op()
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gate: &CpuStorage,
        gate_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            kind: Gate,
            (x, x_layout): (&CpuStorage, &Layout),
            (gate, gate_layout): (&CpuStorage, &Layout),
        ) -> candle_core::Result<CpuStorage> {
            let mut out = contiguous::<T>(x, x_layout)?.to_vec();
            let gate = contiguous::<T>(gate, gate_layout)?;
            let part = |(x, gate): (&mut [T], &[T])| match kind {
                Gate::Sigmoid => vector::run(Sigmoid { x, gate }),
                Gate::Silu => vector::run(Silu { x, gate }),
            };
            if out.len() < 2 * PART {
                part((&mut out, gate));
            } else {
                let parts = out.par_chunks_mut(PART).zip(gate.par_chunks(PART));
                parts.for_each(part);
            }
            Ok(T::to_cpu_storage_owned(out))
        }
        let out = for_element!(x.dtype(), run(*self, (x, x_layout), (gate, gate_layout)))?;
        Ok((out, x_layout.shape().clone()))
    }
}

struct Sigmoid<'a, T> {
    x: &'a mut [T],
    gate: &'a [T],
}

impl<T: Element> Kernel for Sigmoid<'_, T> {
    #[inline(always)]
    fn call(self) {
        for (x, gate) in self.x.iter_mut().zip(self.gate) {
            *x = T::round(x.f32() * vector::sigmoid(gate.f32()));
        }
    }
}

struct Silu<'a, T> {
    x: &'a mut [T],
    gate: &'a [T],
}

impl<T: Element> Kernel for Silu<'_, T> {
    #[inline(always)]
    fn call(self) {
        for (x, gate) in self.x.iter_mut().zip(self.gate) {
            *x = T::round(x.f32() * vector::silu(gate.f32()));
        }
    }
}
