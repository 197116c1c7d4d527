//! Runs a kernel over all blocks of columns and tiles of rows.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Storage, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use super::activations::{Fixed, FloatTile, Tile};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::packed::{Affine, Dense, COLUMNS};
use super::policy::Isa;
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::error::Result;
use crate::ops::cpu::Element;
use crate::ops::vector::{self, Kernel};

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

/// An output `[m, n]` under construction: unwritten until its job has run.
pub(super) enum Output {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Output {
    pub(super) fn new(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(Vec::with_capacity(len)),
            DType::F16 => Self::F16(Vec::with_capacity(len)),
            _ => Self::F32(Vec::with_capacity(len)),
        }
    }

    fn cells(&mut self) -> Cells {
        match self {
            Self::F32(v) => Cells::F32(v.as_mut_ptr()),
            Self::Bf16(v) => Cells::Bf16(v.as_mut_ptr()),
            Self::F16(v) => Cells::F16(v.as_mut_ptr()),
        }
    }

    /// # Safety
    /// All `m * n` values must have been written.
    pub(super) unsafe fn tensor(self, m: usize, n: usize) -> Result<Tensor> {
        let device = &candle_core::Device::Cpu;
        Ok(match self {
            Self::F32(mut v) => {
                v.set_len(m * n);
                Tensor::from_vec(v, (m, n), device)?
            }
            Self::Bf16(mut v) => {
                v.set_len(m * n);
                Tensor::from_vec(v, (m, n), device)?
            }
            Self::F16(mut v) => {
                v.set_len(m * n);
                Tensor::from_vec(v, (m, n), device)?
            }
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
    /// SAFETY: `at + values.len()` lies within the output's capacity, and nobody else touches these cells.
    #[inline(always)]
    unsafe fn write(&self, at: usize, values: &[f32]) {
        match self {
            Self::F32(p) => p.add(at).copy_from(values.as_ptr(), values.len()),
            Self::Bf16(p) => {
                for (i, v) in values.iter().enumerate() {
                    p.add(at + i).write(Element::round(*v));
                }
            }
            Self::F16(p) => {
                let mut halves = [f16::ZERO; COLUMNS];
                let halves = &mut halves[..values.len()];
                halves.convert_from_f32_slice(values);
                p.add(at).copy_from(halves.as_ptr(), halves.len());
            }
        }
    }
}

/// Rounds and writes the rows of a block.
struct Write<'a> {
    cells: Cells,
    /// Of the first row.
    at: usize,
    /// From row to row.
    stride: usize,
    columns: usize,
    sums: &'a [[f32; COLUMNS]],
}

impl Kernel for Write<'_> {
    #[inline(always)]
    fn call(self) {
        for (r, sums) in self.sums.iter().enumerate() {
            let at = self.at + r * self.stride;
            // SAFETY: the caller's rows and columns lie within the output; see `Cells`. A whole block has its own branch, because
            // its constant width vectorises.
            unsafe {
                match self.columns {
                    COLUMNS => self.cells.write(at, &sums[..COLUMNS]),
                    columns => self.cells.write(at, &sums[..columns]),
                }
            }
        }
    }
}

/// A weight and its rows of `x` in the kernels' order.
pub(super) enum Operands<'a> {
    Affine(&'a Affine, &'a Fixed),
    Dense(&'a Dense, &'a [FloatTile]),
}

/// One product of a call.
pub(super) struct Job<'a> {
    pub operands: Operands<'a>,
    pub threaded: bool,
    pub out: &'a mut Output,
}

/// Columns of a block for the rows of a tile.
type Sums = [[f32; COLUMNS]; 8];

/// Runs all jobs in one parallel loop over blocks of their columns; `x` `[rows, k]` is read for the rows with NaN or Inf.
/// Afterwards every value of every output is written.
pub(super) fn run(isa: Isa, x: &[f32], jobs: Vec<Job>) {
    let parts: Vec<Part> = jobs
        .into_iter()
        .map(|job| {
            let cells = job.out.cells();
            Part::new(isa, job.operands, job.threaded, cells)
        })
        .collect();
    let pieces = |part: &Part| {
        let count = part.n.div_ceil(COLUMNS);
        let step = match part.threaded {
            true => count.div_ceil(4 * rayon::current_num_threads()).max(1),
            false => count.max(1),
        };
        (count, step.next_multiple_of(part.at_once))
    };
    let tasks: Vec<(&Part, Range<usize>)> = parts
        .iter()
        .flat_map(|part| {
            let (count, step) = pieces(part);
            (0..count)
                .step_by(step)
                .map(move |first| (part, first..count.min(first + step)))
        })
        .collect();
    if parts.iter().any(|p| p.threaded) && tasks.len() > 1 {
        tasks
            .into_par_iter()
            .for_each(|(part, range)| part.blocks(isa, range));
    } else {
        tasks
            .into_iter()
            .for_each(|(part, range)| part.blocks(isa, range));
    }
    parts.iter().for_each(|part| part.special_rows(x));
}

struct Part<'a> {
    operands: Operands<'a>,
    tiles: Vec<Tile>,
    n: usize,
    k: usize,
    threaded: bool,
    /// Blocks that a kernel takes at once.
    at_once: usize,
    /// Tiles whose activations stay in a core's cache while the weights stream by.
    panel: usize,
    cells: Cells,
}

impl<'a> Part<'a> {
    fn new(isa: Isa, operands: Operands<'a>, threaded: bool, cells: Cells) -> Self {
        let (tiles, n, k, row_bytes): (Vec<Tile>, _, _, _) = match &operands {
            Operands::Affine(w, fixed) => {
                let tiles = fixed.tiles.iter().map(|t| t.tile).collect();
                (tiles, w.n, w.k(), w.k() * 2 * fixed.limbs)
            }
            Operands::Dense(w, x) => (x.iter().map(|t| t.tile).collect(), w.n, w.k, w.k * 4),
        };
        let size = tiles.first().map_or(1, |t| t.size);
        // Two blocks share the loads of activations, which counts from three vectors of them on.
        let at_once = match &operands {
            Operands::Affine(_, x) if isa == Isa::Avx512 && x.limbs * size > 2 => 2,
            _ => 1,
        };
        Self {
            operands,
            tiles,
            n,
            k,
            threaded,
            at_once,
            panel: (PANEL_BYTES / row_bytes.max(1) / size).max(1),
            cells,
        }
    }

    fn blocks(&self, isa: Isa, range: Range<usize>) {
        let n = self.n;
        for first in (0..self.tiles.len()).step_by(self.panel) {
            for block in range.clone().step_by(self.at_once) {
                let here = self.at_once.min(range.end - block);
                for (i, t) in self.tiles.iter().enumerate().skip(first).take(self.panel) {
                    let mut sums: [Sums; 2] = [[[0.0; COLUMNS]; 8]; 2];
                    self.tile(isa, block, i, &mut sums[..here]);
                    for (block, sums) in (block..).zip(&sums[..here]) {
                        let columns = COLUMNS.min(n - block * COLUMNS);
                        vector::run(Write {
                            cells: self.cells,
                            at: t.first * n + block * COLUMNS,
                            stride: n,
                            columns,
                            sums: &sums[..t.rows],
                        });
                    }
                }
            }
        }
    }

    /// The blocks from `block` on, as many as `out` has, times tile `i`.
    fn tile(&self, isa: Isa, block: usize, i: usize, out: &mut [Sums]) {
        // SAFETY: an `Isa` is only used where it is available.
        match &self.operands {
            Operands::Affine(w, x) => {
                let (tile, limbs) = (&x.tiles[i], x.limbs);
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => unsafe { avx512::affine(w, block, tile, limbs, out) },
                    #[cfg(target_arch = "x86_64")]
                    Isa::AvxVnni => unsafe {
                        avx2::affine::<true>(w, block, tile, limbs, &mut out[0])
                    },
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => unsafe {
                        avx2::affine::<false>(w, block, tile, limbs, &mut out[0])
                    },
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon => unsafe { neon::affine(w, block, tile, limbs, &mut out[0]) },
                    _ => portable::affine(w, block, tile, limbs, &mut out[0]),
                }
            }
            Operands::Dense(w, x) => match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { avx512::dense(w, block, &x[i], &mut out[0]) },
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni | Isa::Avx2 => unsafe { avx2::dense(w, block, &x[i], &mut out[0]) },
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => unsafe { neon::dense(w, block, &x[i], &mut out[0]) },
                _ => portable::dense(w, block, &x[i], &mut out[0]),
            },
        }
    }

    /// Rows with NaN or Inf, exactly and slowly.
    fn special_rows(&self, x: &[f32]) {
        let Operands::Affine(w, fixed) = &self.operands else {
            return;
        };
        for r in &fixed.special {
            let x = &x[r * self.k..][..self.k];
            (0..self.n).into_par_iter().for_each(|n| {
                let y: f64 = w.row(n).zip(x).map(|(w, x)| w as f64 * *x as f64).sum();
                // SAFETY: row and column lie within `[m, n]`; every column is written by one call.
                unsafe { self.cells.write(r * self.n + n, &[y as f32]) };
            });
        }
    }
}
