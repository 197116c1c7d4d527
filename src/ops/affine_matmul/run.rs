//! Runs a kernel over all blocks of columns and tiles of rows.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Storage, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use super::activations::{float_tiles, Fixed, Tile};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::packed::{Affine, Dense, COLUMNS};
use super::policy::Isa;
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::error::Result;
use crate::ops::cpu::Element;

/// Bytes of activations that stay in a core's cache while the weights stream by.
const PANEL_BYTES: usize = 192 << 10;

/// `x` as f32 values in row order.
pub(super) fn values(x: &Tensor) -> Result<Vec<f32>> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + x.elem_count();
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v[range].to_vec(),
        // Not `to_f32`, whose NaN check keeps the loop from vectorising.
        Storage::Cpu(CpuStorage::BF16(v)) => v[range].iter().map(|v| Element::f32(*v)).collect(),
        Storage::Cpu(CpuStorage::F16(v)) => v[range].to_f32_vec(),
        _ => x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?,
    })
}

/// An output `[m, n]` under construction, rounded once.
pub(super) enum Output {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Output {
    pub(super) fn new(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(vec![bf16::ZERO; len]),
            DType::F16 => Self::F16(vec![f16::ZERO; len]),
            _ => Self::F32(vec![0.0; len]),
        }
    }

    fn cells(&mut self) -> Cells {
        match self {
            Self::F32(v) => Cells::F32(v.as_mut_ptr()),
            Self::Bf16(v) => Cells::Bf16(v.as_mut_ptr()),
            Self::F16(v) => Cells::F16(v.as_mut_ptr()),
        }
    }

    pub(super) fn tensor(self, m: usize, n: usize) -> Result<Tensor> {
        let device = &candle_core::Device::Cpu;
        Ok(match self {
            Self::F32(v) => Tensor::from_vec(v, (m, n), device)?,
            Self::Bf16(v) => Tensor::from_vec(v, (m, n), device)?,
            Self::F16(v) => Tensor::from_vec(v, (m, n), device)?,
        })
    }
}

/// Where blocks write: every block owns its columns, so no two threads share a cell.
#[derive(Clone, Copy)]
enum Cells {
    F32(*mut f32),
    Bf16(*mut bf16),
    F16(*mut f16),
}

// SAFETY: see above; the vector outlives the calls.
unsafe impl Send for Cells {}
unsafe impl Sync for Cells {}

impl Cells {
    /// SAFETY: `at + values.len()` lies within the output, and nobody else touches these cells.
    unsafe fn write(&self, at: usize, values: &[f32]) {
        match self {
            Self::F32(p) => p.add(at).copy_from(values.as_ptr(), values.len()),
            Self::Bf16(p) => {
                let cells = std::slice::from_raw_parts_mut(p.add(at), values.len());
                cells
                    .iter_mut()
                    .zip(values)
                    .for_each(|(c, v)| *c = Element::round(*v));
            }
            Self::F16(p) => std::slice::from_raw_parts_mut(p.add(at), values.len())
                .convert_from_f32_slice(values),
        }
    }
}

/// Columns of a block for the rows of a tile.
type Sums = [[f32; COLUMNS]; 8];

/// Calls `tile(first block, index of tile, out)` for every block and tile, `out` being one to `at_once` blocks; blocks are
/// split over threads.
fn blocks(
    n: usize,
    tiles: &[Tile],
    row_bytes: usize,
    (threaded, at_once): (bool, usize),
    out: &mut Output,
    tile: impl Fn(usize, usize, &mut [Sums]) + Sync,
) {
    let cells = out.cells();
    let count = n.div_ceil(COLUMNS);
    let panel = (PANEL_BYTES / row_bytes.max(1) / tiles.first().map_or(1, |t| t.size)).max(1);
    let part = |range: Range<usize>| {
        for first in (0..tiles.len()).step_by(panel) {
            for block in range.clone().step_by(at_once) {
                let here = at_once.min(range.end - block);
                for (i, t) in tiles.iter().enumerate().skip(first).take(panel) {
                    let mut sums = [[[0.0; COLUMNS]; 8]; 2];
                    tile(block, i, &mut sums[..here]);
                    for (block, sums) in (block..).zip(&sums[..here]) {
                        let columns = COLUMNS.min(n - block * COLUMNS);
                        for (r, sums) in sums[..t.rows].iter().enumerate() {
                            let at = (t.first + r) * n + block * COLUMNS;
                            // SAFETY: the tile's rows and the block's columns lie within `[m, n]`; see `Cells`.
                            unsafe { cells.write(at, &sums[..columns]) };
                        }
                    }
                }
            }
        }
    };
    if !threaded {
        return part(0..count);
    }
    let step = count.div_ceil(4 * rayon::current_num_threads()).max(1);
    let step = step.next_multiple_of(at_once);
    (0..count.div_ceil(step))
        .into_par_iter()
        .for_each(|i| part(i * step..count.min((i + 1) * step)));
}

/// An affine weight times rows in fixed point; `x` is read for the rows with NaN or Inf.
pub(super) fn affine(
    isa: Isa,
    threaded: bool,
    w: &Affine,
    fixed: &Fixed,
    x: &[f32],
    out: &mut Output,
) {
    let tiles: Vec<Tile> = fixed.tiles.iter().map(|t| t.tile).collect();
    let row_bytes = w.k() * 2 * fixed.limbs;
    // Two blocks share the loads of activations, which counts from three vectors of them on.
    let vectors = fixed.limbs * tiles.first().map_or(0, |t| t.size);
    let at_once = match isa {
        Isa::Avx512 if vectors > 2 => 2,
        _ => 1,
    };
    let split = (threaded, at_once);
    blocks(w.n, &tiles, row_bytes, split, out, |block, i, out| {
        let tile = &fixed.tiles[i];
        // SAFETY: an `Isa` is only used where it is available.
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::affine(w, block, tile, fixed.limbs, out) },
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => unsafe {
                avx2::affine::<true>(w, block, tile, fixed.limbs, &mut out[0])
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::affine::<false>(w, block, tile, fixed.limbs, &mut out[0]) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::affine(w, block, tile, fixed.limbs, &mut out[0]) },
            _ => portable::affine(w, block, tile, fixed.limbs, &mut out[0]),
        }
    });
    let cells = out.cells();
    for r in &fixed.special {
        let x = &x[r * w.k()..][..w.k()];
        (0..w.n).into_par_iter().for_each(|n| {
            let y: f64 = w.row(n).zip(x).map(|(w, x)| w as f64 * *x as f64).sum();
            // SAFETY: row and column lie within `[m, n]`; every column is written by one call.
            unsafe { cells.write(r * w.n + n, &[y as f32]) };
        });
    }
}

/// A plain weight times f32 rows.
pub(super) fn dense(isa: Isa, threaded: bool, w: &Dense, x: &[f32], out: &mut Output) {
    let x = float_tiles(x, w.k);
    let tiles: Vec<Tile> = x.iter().map(|t| t.tile).collect();
    blocks(
        w.n,
        &tiles,
        w.k * 4,
        (threaded, 1),
        out,
        // SAFETY: an `Isa` is only used where it is available.
        |block, i, out| match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::dense(w, block, &x[i], &mut out[0]) },
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni | Isa::Avx2 => unsafe { avx2::dense(w, block, &x[i], &mut out[0]) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::dense(w, block, &x[i], &mut out[0]) },
            _ => portable::dense(w, block, &x[i], &mut out[0]),
        },
    );
}
