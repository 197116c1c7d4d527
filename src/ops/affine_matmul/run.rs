//! Runs a kernel over all blocks of columns and tiles of rows.

use candle_core::{CpuStorage, DType, Storage, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::activations::{float_tiles, Fixed, Tile};
use super::packed::{Affine, Dense, COLUMNS};
use super::policy::Isa;
use super::{avx2_affine, avx2_dense, portable};
use crate::error::Result;

/// Bytes of activations that stay in a core's cache while the weights stream by.
const PANEL_BYTES: usize = 192 << 10;

/// `x` as f32 values in row order.
pub(super) fn values(x: &Tensor) -> Result<Vec<f32>> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + x.elem_count();
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v[range].to_vec(),
        Storage::Cpu(CpuStorage::BF16(v)) => v[range].iter().map(|v| v.to_f32()).collect(),
        Storage::Cpu(CpuStorage::F16(v)) => v[range].iter().map(|v| v.to_f32()).collect(),
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
        for (i, v) in values.iter().enumerate() {
            match self {
                Self::F32(p) => *p.add(at + i) = *v,
                Self::Bf16(p) => *p.add(at + i) = bf16::from_f32(*v),
                Self::F16(p) => *p.add(at + i) = f16::from_f32(*v),
            }
        }
    }
}

/// Calls `tile(block, index of tile, out)` for every block and tile, blocks split over threads.
fn blocks(
    n: usize,
    tiles: &[Tile],
    row_bytes: usize,
    threaded: bool,
    out: &mut Output,
    tile: impl Fn(usize, usize, &mut [[f32; 16]]) + Sync,
) {
    let cells = out.cells();
    let count = n.div_ceil(COLUMNS);
    let panel = (PANEL_BYTES / row_bytes.max(1) / tiles.first().map_or(1, |t| t.size)).max(1);
    let part = |range: std::ops::Range<usize>| {
        for first in (0..tiles.len()).step_by(panel) {
            for block in range.clone() {
                let columns = COLUMNS.min(n - block * COLUMNS);
                for (i, t) in tiles.iter().enumerate().skip(first).take(panel) {
                    let mut sums = [[0.0; 16]; 8];
                    tile(block, i, &mut sums);
                    for (r, sums) in sums[..t.rows].iter().enumerate() {
                        let at = (t.first + r) * n + block * COLUMNS;
                        // SAFETY: the tile's rows and the block's columns lie within `[m, n]`; see `Cells`.
                        unsafe { cells.write(at, &sums[..columns]) };
                    }
                }
            }
        }
    };
    if !threaded {
        return part(0..count);
    }
    let step = count.div_ceil(4 * rayon::current_num_threads()).max(1);
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
    blocks(w.n, &tiles, row_bytes, threaded, out, |block, i, out| {
        let tile = &fixed.tiles[i];
        match isa {
            // SAFETY: an `Isa` is only used where it is available.
            Isa::Avx2 => unsafe { avx2_affine(w, block, tile, fixed.limbs, out) },
            Isa::Portable => portable::affine(w, block, tile, fixed.limbs, out),
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
        threaded,
        out,
        |block, i, out| match isa {
            // SAFETY: an `Isa` is only used where it is available.
            Isa::Avx2 => unsafe { avx2_dense(w, block, &x[i], out) },
            Isa::Portable => portable::dense(w, block, &x[i], out),
        },
    );
}
