//! Position-mapped rotary embedding: each row is rotated at the position that it had in the prompt.
//!
//! Source: Su et al., RoFormer (arXiv 2104.09864); the partial, multi-axis (mRoPE) form is Qwen's.

mod cpu;
mod metal;

use std::sync::Arc;

use candle_core::{DType, Tensor, D};

use super::launch::{self, Operand};
use super::{check, Context};
use crate::error::{Error, Result};

const OP: &str = "rope";

/// Which lanes form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RopeLayout {
    /// Lane `i` with lane `i + dims/2` (Hugging Face, "rotate half").
    #[default]
    HalfSplit,
    /// Lane `2i` with lane `2i + 1` (GPT-J, "traditional").
    Interleaved,
}

/// How lanes are rotated. Angles are f32: `position * position_scale * frequency[i]`.
#[derive(Clone, Debug)]
pub struct Rope {
    frequencies: Arc<[f32]>,
    dims: usize,
    layout: RopeLayout,
    position_scale: f32,
    pre_scale: f32,
    sections: Option<[usize; 3]>,
}

impl Rope {
    /// Rotates the first `dims` lanes of a head with frequencies `base^(-2i/dims)`.
    pub fn new(base: f64, dims: usize) -> Result<Self> {
        if !(base.is_finite() && base > 0.0) {
            return Err(Error::argument(
                OP,
                format!("base {base} must be positive and finite"),
            ));
        }
        let frequencies = (0..dims / 2).map(|i| base.powf(-2.0 * i as f64 / dims as f64) as f32);
        Self::from_frequencies(frequencies.collect::<Vec<_>>(), dims)
    }

    /// Rotates the first `dims` lanes with the given frequencies (radians per position). A table shorter than
    /// `dims / 2` leaves the pairs past its end unrotated; pairs are still formed over all `dims` lanes.
    pub fn from_frequencies(frequencies: impl Into<Arc<[f32]>>, dims: usize) -> Result<Self> {
        let frequencies = frequencies.into();
        if !dims.is_multiple_of(2) {
            return Err(Error::argument(
                OP,
                format!("rotary dims {dims} must be even"),
            ));
        }
        if frequencies.len() > dims / 2 {
            return Err(Error::argument(
                OP,
                format!("{} frequencies for {} pairs", frequencies.len(), dims / 2),
            ));
        }
        if let Some(bad) = frequencies.iter().find(|f| !f.is_finite()) {
            return Err(Error::argument(
                OP,
                format!("frequency {bad} is not finite"),
            ));
        }
        Ok(Self {
            frequencies,
            dims,
            layout: RopeLayout::default(),
            position_scale: 1.0,
            pre_scale: 1.0,
            sections: None,
        })
    }

    /// Sets the layout of pairs.
    pub fn with_layout(mut self, layout: RopeLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Multiplies every position (linear scaling by a factor `f` is `1/f` here).
    pub fn with_position_scale(mut self, scale: f32) -> Self {
        self.position_scale = scale;
        self
    }

    /// Multiplies the rotated lanes before they are rotated (YaRN's and LongRoPE's attention factor).
    pub fn with_pre_scale(mut self, scale: f32) -> Self {
        self.pre_scale = scale;
        self
    }

    /// Takes positions of three axes (time, height, width): pair `i` follows axis `i % 3` while `i < 3 * sections[axis]`,
    /// else the time axis (Qwen's interleaved mRoPE).
    pub fn with_sections(mut self, sections: [usize; 3]) -> Result<Self> {
        if sections.iter().sum::<usize>() != self.dims / 2 {
            return Err(Error::argument(
                OP,
                format!(
                    "mRoPE sections {sections:?} must add up to {} pairs",
                    self.dims / 2
                ),
            ));
        }
        self.sections = Some(sections);
        Ok(self)
    }

    /// Lanes that are rotated.
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// Frequencies, in radians per position.
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// The axis whose position rotates pair `i`.
    pub fn axis(&self, pair: usize) -> usize {
        match self.sections {
            Some(s) if !pair.is_multiple_of(3) && pair < 3 * s[pair % 3] => pair % 3,
            _ => 0,
        }
    }
}

/// Rotates `x` (`[rows, heads, head_dim]`, f32, bf16 or f16) at `positions` (`[rows]`, or `[3, rows]` for mRoPE; u32 or
/// i64) and returns it in its own dtype: angles, sines and products are f32, rounded once.
pub fn rope(cx: &Context, x: &Tensor, positions: &Tensor, rope: &Rope) -> Result<Tensor> {
    let dtype = check::activation(OP, "x", x)?;
    check::shape(OP, "x", x, &[None; 3])?;
    let rows = x.dim(0)?;
    if !matches!(positions.dtype(), DType::U32 | DType::I64) {
        return Err(Error::DType {
            op: OP,
            name: "positions",
            found: positions.dtype(),
            expected: "u32 or i64".into(),
        });
    }
    match positions.rank() {
        1 => check::shape(OP, "positions", positions, &[Some(rows)])?,
        _ => check::shape(OP, "positions", positions, &[Some(3), Some(rows)])?,
    }
    if x.dim(2)? < rope.dims {
        return Err(Error::argument(
            OP,
            format!(
                "head_dim {} is smaller than the {} rotary dims",
                x.dim(2)?,
                rope.dims
            ),
        ));
    }
    if launch::wanted(cx, x) {
        let sparse = x.stride()[2] != 1;
        let x = if sparse { &x.contiguous()? } else { x };
        let plan = metal::plan(rope, &Operand::of(OP, x)?, &Operand::of(OP, positions)?)?;
        cx.routes().count(OP, "metal", dtype);
        return launch::run_one(cx, &plan, &[x, positions]);
    }
    cx.routes().count(OP, "cpu", dtype);
    let (x, positions) = (x.contiguous()?, positions.contiguous()?);
    Ok(x.apply_op2_no_bwd(&positions, &cpu::Rotate(rope))?)
}

/// The oracle: the same in tensor ops.
pub fn reference(x: &Tensor, positions: &Tensor, rope: &Rope) -> Result<Tensor> {
    let (rows, pairs, device) = (x.dim(0)?, rope.dims / 2, x.device());
    let mut frequencies = rope.frequencies.to_vec();
    frequencies.resize(pairs, 0.0);
    let frequencies = Tensor::new(frequencies, device)?;
    let positions = positions
        .to_dtype(DType::F32)?
        .affine(rope.position_scale as f64, 0.0)?;
    let angles = match positions.rank() {
        1 => positions.reshape((rows, 1))?.broadcast_mul(&frequencies)?,
        _ => {
            let axes: Vec<u32> = (0..pairs).map(|i| rope.axis(i) as u32).collect();
            let per_pair = positions
                .t()?
                .contiguous()?
                .index_select(&Tensor::new(axes, device)?, 1)?;
            per_pair.broadcast_mul(&frequencies)?
        }
    };
    let (cos, sin) = (angles.cos()?.unsqueeze(1)?, angles.sin()?.unsqueeze(1)?);
    let rotated = x
        .narrow(2, 0, rope.dims)?
        .to_dtype(DType::F32)?
        .affine(rope.pre_scale as f64, 0.0)?;
    let heads = x.dim(1)?;
    let (a, b) = match rope.layout {
        RopeLayout::HalfSplit => (
            rotated.narrow(2, 0, pairs)?,
            rotated.narrow(2, pairs, pairs)?,
        ),
        RopeLayout::Interleaved => {
            let p = rotated.reshape((rows, heads, pairs, 2))?;
            (
                p.narrow(3, 0, 1)?.squeeze(3)?,
                p.narrow(3, 1, 1)?.squeeze(3)?,
            )
        }
    };
    let ra = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let rb = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let rotated = match rope.layout {
        RopeLayout::HalfSplit => Tensor::cat(&[ra, rb], D::Minus1)?,
        RopeLayout::Interleaved => {
            Tensor::stack(&[ra, rb], 3)?.reshape((rows, heads, rope.dims))?
        }
    };
    let rest = x.narrow(2, rope.dims, x.dim(2)? - rope.dims)?;
    Ok(Tensor::cat(
        &[&rotated.to_dtype(x.dtype())?, &rest],
        D::Minus1,
    )?)
}
