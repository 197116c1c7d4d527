//! `x * sigmoid(gate)`: the output gate of full attention.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};

use super::cpu::{contiguous, for_element, Element};
use super::vector::{self, Kernel};
use super::{check, Context};
use crate::error::Result;

const OP: &str = "sigmoid_gate";

/// `x * sigmoid(gate)`, element by element: `gate` has `x`'s shape and dtype (f32, bf16 or f16). Computed in f32,
/// rounded once.
pub fn sigmoid_gate(cx: &Context, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let dtype = check::activation(OP, "x", x)?;
    check::dtype(OP, "gate", gate, dtype)?;
    let shape: Vec<_> = x.dims().iter().map(|d| Some(*d)).collect();
    check::shape(OP, "gate", gate, &shape)?;
    cx.routes().count(OP, "cpu", dtype);
    let (x, gate) = (x.contiguous()?, gate.contiguous()?);
    Ok(x.apply_op2_no_bwd(&gate, &SigmoidGate)?)
}

/// The oracle of [`sigmoid_gate`].
pub fn reference(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let f32 = |t: &Tensor| t.to_dtype(candle_core::DType::F32);
    let gate = candle_nn::ops::sigmoid(&f32(gate)?)?;
    Ok((f32(x)? * gate)?.to_dtype(x.dtype())?)
}

struct SigmoidGate;

impl CustomOp2 for SigmoidGate {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gate: &CpuStorage,
        gate_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        fn run<T: Element>(
            (x, x_layout): (&CpuStorage, &Layout),
            (gate, gate_layout): (&CpuStorage, &Layout),
        ) -> candle_core::Result<CpuStorage> {
            let mut out = contiguous::<T>(x, x_layout)?.to_vec();
            let gate = contiguous::<T>(gate, gate_layout)?;
            vector::run(Gate { x: &mut out, gate });
            Ok(T::to_cpu_storage_owned(out))
        }
        let out = for_element!(x.dtype(), run((x, x_layout), (gate, gate_layout)))?;
        Ok((out, x_layout.shape().clone()))
    }
}

struct Gate<'a, T> {
    x: &'a mut [T],
    gate: &'a [T],
}

impl<T: Element> Kernel for Gate<'_, T> {
    #[inline(always)]
    fn call(self) {
        for (x, gate) in self.x.iter_mut().zip(self.gate) {
            *x = T::round(x.f32() * vector::sigmoid(gate.f32()));
        }
    }
}
