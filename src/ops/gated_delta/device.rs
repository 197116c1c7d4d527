//! A state on the device: tensors that every pass replaces.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::{metal, GatedDeltaDims, GatedDeltaParams, Keep, OP};
use crate::error::{Error, Result};
use crate::ops::launch::{self, Launcher, Operand};
use crate::ops::{check, Context};

/// The checkpoint and the tape, f32 but for the tape's inputs.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// `[value_heads, value_dim, key_dim]`: a simdgroup's key lanes lie side by side.
    state: Tensor,
    /// `[taps - 1, channels]`: the raw inputs before the tape.
    window: Tensor,
    tape: Option<Tape>,
    /// What the last pass ran on, where that was no device.
    launcher: Option<Arc<dyn Launcher>>,
}

#[derive(Clone, Debug)]
struct Tape {
    /// `[rows, channels]`: the raw inputs, as the call got them.
    x: Tensor,
    /// `[rows, channels]`: what the recurrence takes of them.
    rows: Tensor,
    /// `[rows, 2, value_heads]`: decay and beta.
    gates: Tensor,
}

fn operands(tensors: &[&Tensor]) -> Result<Vec<Operand>> {
    tensors.iter().map(|t| Operand::of(OP, t)).collect()
}

fn too_few() -> Error {
    Error::argument(OP, "a launcher returned too few outputs")
}

impl Stored {
    pub(super) fn zeros(d: GatedDeltaDims, device: &Device) -> Result<Self> {
        metal::check(d)?;
        Ok(Self {
            state: Tensor::zeros((d.value_heads, d.value_dim, d.key_dim), DType::F32, device)?,
            window: Tensor::zeros((d.taps - 1, d.channels()), DType::F32, device)?,
            tape: None,
            launcher: None,
        })
    }

    /// From a state `[value_heads, key_dim, value_dim]` and its window.
    pub(super) fn new(d: GatedDeltaDims, recurrent: &Tensor, window: Tensor) -> Result<Self> {
        metal::check(d)?;
        Ok(Self {
            state: recurrent.transpose(1, 2)?.contiguous()?,
            window: window.contiguous()?,
            tape: None,
            launcher: None,
        })
    }

    /// `[value_heads, key_dim, value_dim]` after the tape's accepted rows.
    pub(super) fn recurrent(&self, d: GatedDeltaDims, accepted: usize) -> Result<Tensor> {
        let mut state = self.state.clone();
        if let (Some(tape), true) = (&self.tape, accepted > 0) {
            let cx = self.launcher.clone().map(Context::with_launcher);
            let tensors = [&self.state, &tape.rows, &tape.gates];
            let [s, rows, gates] = tensors.map(|t| Operand::of(OP, t));
            let plan = metal::replay(d, accepted, &[s?, rows?, gates?]);
            state = launch::run_one(&cx.unwrap_or_default(), &plan, &tensors)?;
        }
        Ok(state.transpose(1, 2)?.contiguous()?)
    }

    /// `[taps - 1, channels]` after the tape's accepted rows.
    pub(super) fn window(&self, accepted: usize) -> Result<Tensor> {
        let Some(tape) = self.tape.as_ref().filter(|_| accepted > 0) else {
            return Ok(self.window.clone());
        };
        let size = self.window.dim(0)?;
        let new = accepted.min(size);
        let new = tape
            .x
            .narrow(0, accepted - new, new)?
            .to_dtype(DType::F32)?;
        let old = size - new.dim(0)?;
        let kept = self.window.narrow(0, size - old, old)?;
        Ok(match old {
            0 => new.contiguous()?,
            _ => Tensor::cat(&[&kept, &new], 0)?,
        })
    }

    /// Runs rows after the committed ones; on an error nothing has changed.
    pub(super) fn advance(
        &mut self,
        cx: &Context,
        params: &GatedDeltaParams,
        [x, a, b]: [&Tensor; 3],
        accepted: usize,
        keep: Keep,
    ) -> Result<Tensor> {
        let dense = |t: &Tensor| match t.stride()[1] {
            1 => Ok(t.clone()),
            _ => t.contiguous(),
        };
        let (x, a, b) = (dense(x)?, dense(a)?, dense(b)?);
        let mut tensors = vec![&x, &a, &b, &params.conv, &params.a_log, &params.dt_bias];
        tensors.extend([&self.state, &self.window]);
        if let (Some(tape), true) = (&self.tape, accepted > 0) {
            check::dtype(OP, "qkv", &x, tape.x.dtype())?;
            tensors.extend([&tape.x, &tape.rows, &tape.gates]);
        }
        let operands = operands(&tensors)?;
        let plan = metal::plan(params.dims, accepted, keep, &operands, metal::CHUNK)?;
        let mut outputs = launch::run(cx, &plan, &tensors)?.into_iter();
        let mut next = || outputs.next().ok_or_else(too_few);
        let (y, state, window) = (next()?, next()?, next()?);
        let tape = match keep {
            Keep::Commit => None,
            Keep::Pending => Some(Tape {
                x,
                rows: next()?,
                gates: next()?,
            }),
        };
        *self = Self {
            state,
            window,
            tape,
            launcher: cx.shared_launcher(),
        };
        Ok(y)
    }

    pub(super) fn size_bytes(&self) -> usize {
        let bytes = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        let tape = |t: &Tape| bytes(&t.x) + bytes(&t.rows) + bytes(&t.gates);
        bytes(&self.state) + bytes(&self.window) + self.tape.as_ref().map_or(0, tape)
    }
}
