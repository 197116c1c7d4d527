//! The CPU path: one row at a time. Sines and cosines of a row are computed once and shared by its heads.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Shape};
use rayon::prelude::*;

use super::{Rope, RopeLayout, OP};
use crate::ops::cpu::{contiguous, for_element, Element};

/// Below this many elements a call runs on the calling thread.
const PARALLEL: usize = 1 << 14;

pub(super) struct Rotate<'a>(pub(super) &'a Rope);

impl CustomOp2 for Rotate<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        positions: &CpuStorage,
        positions_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let positions: Vec<f32> = match positions.dtype() {
            DType::U32 => contiguous::<u32>(positions, positions_layout)?
                .iter()
                .map(|p| *p as f32)
                .collect(),
            _ => contiguous::<i64>(positions, positions_layout)?
                .iter()
                .map(|p| *p as f32)
                .collect(),
        };
        let (rows, heads, dim) = layout.shape().dims3()?;
        let shape = (rows, heads, dim);
        let out = for_element!(x.dtype(), on_cpu(self.0, x, layout, &positions, shape))?;
        Ok((out, layout.shape().clone()))
    }
}

fn on_cpu<T: Element>(
    rope: &Rope,
    x: &CpuStorage,
    layout: &Layout,
    positions: &[f32],
    (rows, heads, dim): (usize, usize, usize),
) -> candle_core::Result<CpuStorage> {
    let mut out = contiguous::<T>(x, layout)?.to_vec();
    let width = heads * dim;
    if !out.is_empty() {
        let rotate = |(r, row): (usize, &mut [T])| {
            let at = |axis: usize| match positions.len() > rows {
                true => positions[axis * rows + r],
                false => positions[r],
            };
            rotate_row(rope, row, dim, at)
        };
        if out.len() < PARALLEL {
            out.chunks_mut(width).enumerate().for_each(rotate);
        } else {
            out.par_chunks_mut(width).enumerate().for_each(rotate);
        }
    }
    Ok(T::to_cpu_storage_owned(out))
}

fn rotate_row<T: Element>(rope: &Rope, row: &mut [T], dim: usize, at: impl Fn(usize) -> f32) {
    let pairs = rope.dims / 2;
    // Past the table's end nothing turns, but the pre-scale still applies.
    let turn = |i: usize| match rope.frequencies.get(i) {
        Some(f) => (at(rope.axis(i)) * rope.position_scale * f).sin_cos(),
        None => (0.0, 1.0),
    };
    let turns: Vec<(f32, f32)> = (0..pairs).map(turn).collect();
    for head in row.chunks_mut(dim) {
        let mut rotate = |a: usize, b: usize, (sin, cos): (f32, f32)| {
            let (x, y) = (
                head[a].f32() * rope.pre_scale,
                head[b].f32() * rope.pre_scale,
            );
            head[a] = T::round(x * cos - y * sin);
            head[b] = T::round(y * cos + x * sin);
        };
        for (i, turn) in turns.iter().enumerate() {
            match rope.layout {
                RopeLayout::HalfSplit => rotate(i, i + pairs, *turn),
                RopeLayout::Interleaved => rotate(2 * i, 2 * i + 1, *turn),
            }
        }
    }
}
