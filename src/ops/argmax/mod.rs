//! The most likely token of every row, found where the logits are: greedy decoding then reads a number per row and no logits.

mod metal;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::cpu::{for_element, with_slice, Element};
use super::launch::{self, Operand};
use super::vector::{self, Kernel};
use super::{check, Context};
use crate::error::{Error, Result};

const OP: &str = "argmax";

/// Set in the result of a row that has a NaN; the other bits are the column of the first one.
pub const NAN: u32 = 1 << 31;
/// The result of a row without a value above -inf.
pub const NOTHING: u32 = u32::MAX;

/// The column of every row's largest value, the first of equal ones (0 and -0 are equal): u32 `[rows]` of `logits` `[rows, columns]`
/// (f32, bf16 or f16; at least one column). See [`NAN`] and [`NOTHING`] for rows without one; [`tokens`] makes them errors.
pub fn argmax(cx: &Context, logits: &Tensor) -> Result<Tensor> {
    let dtype = check::activation(OP, "logits", logits)?;
    check::shape(OP, "logits", logits, &[None, None])?;
    let (rows, columns) = logits.dims2()?;
    if columns == 0 || columns >= NAN as usize {
        return Err(Error::argument(
            OP,
            format!("{columns} columns; 1 to 2^31 - 1 are allowed"),
        ));
    }
    if launch::wanted(cx, logits) {
        cx.routes().count(OP, "metal", dtype);
        let logits = match logits.stride()[1] {
            1 => logits.clone(),
            _ => logits.contiguous()?,
        };
        let plan = metal::plan(&Operand::of(OP, &logits)?)?;
        return launch::run_one(cx, &plan, &[&logits]);
    }
    cx.routes().count(OP, "cpu", dtype);
    let best = for_element!(dtype, on_cpu(logits, columns))?;
    Ok(Tensor::from_vec(best, rows, &Device::Cpu)?)
}

/// [`argmax`] on the host, an error for a row that has a NaN or nothing above -inf.
pub fn tokens(cx: &Context, logits: &Tensor) -> Result<Vec<Result<u32>>> {
    let best = argmax(cx, logits)?.to_vec1::<u32>()?;
    Ok(best.into_iter().map(token).collect())
}

fn token(best: u32) -> Result<u32> {
    let what = match best {
        NOTHING => "no token has a logit above -inf".to_string(),
        _ if best & NAN != 0 => format!(
            "the logit of token {} is NaN: the weights or the dtype are at fault",
            best & !NAN
        ),
        _ => return Ok(best),
    };
    Err(Error::argument(OP, what))
}

/// The token of a row on the host; see [`tokens`].
pub(crate) fn of_row(logits: &[f32]) -> Result<u32> {
    token(best(logits))
}

fn on_cpu<T: Element>(logits: &Tensor, columns: usize) -> Result<Vec<u32>> {
    with_slice::<T, _>(OP, logits, |all| {
        Ok(all.par_chunks(columns).map(best).collect())
    })
}

fn best<T: Element>(row: &[T]) -> u32 {
    let mut best = NOTHING;
    let out = &mut best;
    vector::run(Row { row, out });
    best
}

struct Row<'a, T> {
    row: &'a [T],
    out: &'a mut u32,
}

impl<T: Element> Kernel for Row<'_, T> {
    #[inline(always)]
    fn call(self) {
        // In lanes, which vectorise: a vocabulary has a quarter of a million tokens.
        const LANES: usize = 16;
        let (mut best, mut nan) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
        let mut take = |lane: usize, v: f32| {
            best[lane] = if v > best[lane] { v } else { best[lane] };
            nan[lane] |= v.is_nan();
        };
        let chunks = self.row.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, v) in chunk.iter().enumerate() {
                take(lane, v.f32());
            }
        }
        for (lane, v) in rest.iter().enumerate() {
            take(lane, v.f32());
        }
        let mut values = self.row.iter().map(|v| v.f32());
        *self.out = if nan.contains(&true) {
            values
                .position(f32::is_nan)
                .map_or(NOTHING, |i| i as u32 | NAN)
        } else {
            match best.into_iter().fold(f32::NEG_INFINITY, f32::max) {
                f32::NEG_INFINITY => NOTHING,
                top => values.position(|v| v == top).map_or(NOTHING, |i| i as u32),
            }
        };
    }
}

/// The oracle of [`argmax`]: one value after the other.
pub fn reference(logits: &Tensor) -> Result<Tensor> {
    let rows = logits.to_dtype(candle_core::DType::F64)?.to_vec2::<f64>()?;
    let best = rows.iter().map(|row| {
        if let Some(i) = row.iter().position(|v| v.is_nan()) {
            return NAN | i as u32;
        }
        let mut best = (NOTHING, f64::NEG_INFINITY);
        for (i, v) in row.iter().enumerate() {
            if *v > best.1 {
                best = (i as u32, *v);
            }
        }
        best.0
    });
    let best: Vec<u32> = best.collect();
    Ok(Tensor::from_vec(best, rows.len(), &Device::Cpu)?)
}
