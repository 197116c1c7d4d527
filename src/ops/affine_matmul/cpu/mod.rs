//! The CPU kernels: one arithmetic for every width from decode to prefill.
//!
//! Contract, per row and column, groups in order, all in f32 unless said otherwise:
//! `d = Σ code · x` exactly, in integers, `x` being the row's fixed point (see [`rows`]); for f32 rows `d` is
//! `fma(f32(Σ code · high), 256, f32(Σ code · low))`; then `y = fma(scale, d · step, y)` and `y = fma(bias, Σ x, y)`. Integer sums
//! have no order, so every instruction set, tile and thread count gives the same bits. A row with a NaN or an infinity
//! is summed in f32, one code after the other, without touching the others.

pub(crate) mod dense;
pub(crate) mod packed;
pub(crate) mod rows;

use rayon::prelude::*;

use packed::{Packed, LANES};
use rows::FixedRows;

use crate::ops::cpu::Element;

/// Rows that share an unpacked column block.
const PANEL: usize = 64;
/// Rows whose sums are held in registers.
const TILE: usize = 4;
/// Multiplications below which a second thread costs more than it brings.
pub(crate) const SERIAL: usize = 1 << 17;

/// `y[rows, n]`.
pub(crate) fn matmul<T: Element>(x: &[T], fixed: &FixedRows, w: &Packed) -> Vec<T> {
    let rows = fixed.rows();
    let mut out = vec![T::round(0.0); rows * w.n];
    let target = Columns::new(&mut out, w.n);
    let blocks = w.blocks();
    let run = |first: usize, end: usize, panel: std::ops::Range<usize>| {
        let mut scratch = vec![[0u32; LANES]; w.k / 2];
        for block in first..end {
            // SAFETY of the writes: tasks have disjoint blocks or panels.
            dispatch(fixed, w, block, panel.clone(), &mut scratch, &target);
        }
    };
    for start in (0..rows).step_by(PANEL) {
        let panel = start..(start + PANEL).min(rows);
        if panel.len() * w.n * w.k < SERIAL {
            run(0, blocks, panel);
        } else {
            let chunk = blocks.div_ceil(4 * rayon::current_num_threads()).max(1);
            (0..blocks.div_ceil(chunk)).into_par_iter().for_each(|c| {
                run(c * chunk, ((c + 1) * chunk).min(blocks), panel.clone());
            });
        }
    }
    if fixed.finite.iter().any(|f| !f) {
        for column in 0..w.n {
            let mut weights = vec![0f32; w.k];
            w.column(column, &mut weights);
            for r in (0..rows).filter(|r| !fixed.finite[*r]) {
                let x = &x[r * w.k..][..w.k];
                let sum = x
                    .iter()
                    .zip(&weights)
                    .fold(0.0, |s, (x, w)| x.f32().mul_add(*w, s));
                out[r * w.n + column] = T::round(sum);
            }
        }
    }
    out
}

/// The output, written column block by column block from several threads.
pub(crate) struct Columns<T> {
    data: *mut T,
    len: usize,
    n: usize,
}

// SAFETY: every element is written by one task only.
unsafe impl<T: Send> Sync for Columns<T> {}

impl<T> Columns<T> {
    pub fn new(out: &mut [T], n: usize) -> Self {
        Self {
            data: out.as_mut_ptr(),
            len: out.len(),
            n,
        }
    }

    #[inline(always)]
    pub fn put(&self, row: usize, column: usize, value: T) {
        let at = row * self.n + column;
        debug_assert!(at < self.len);
        // SAFETY: in bounds by the caller's tiling, and no other task has this column of this row.
        unsafe { self.data.add(at).write(value) }
    }
}

fn dispatch<T: Element>(
    x: &FixedRows,
    w: &Packed,
    block: usize,
    panel: std::ops::Range<usize>,
    scratch: &mut [[u32; LANES]],
    out: &Columns<T>,
) {
    #[cfg(target_arch = "x86_64")]
    if crate::ops::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { avx2::block(x, w, block, panel, scratch, out) };
    }
    portable(x, w, block, panel, scratch, out)
}

/// The portable way: the integer reference in plain Rust.
pub(crate) fn portable<T: Element>(
    x: &FixedRows,
    w: &Packed,
    block: usize,
    panel: std::ops::Range<usize>,
    scratch: &mut [[u32; LANES]],
    out: &Columns<T>,
) {
    let (pairs, groups) = (x.group / 2, w.groups());
    for g in 0..groups {
        w.unpack(block, g, &mut scratch[g * pairs..][..pairs]);
    }
    for r in panel.filter(|r| x.finite[*r]) {
        let mut y = [0f32; LANES];
        for g in 0..groups {
            let codes = &scratch[g * pairs..][..pairs];
            let at = r * x.k + g * x.group;
            let dot = |limb: &[i16]| {
                let mut sum = [0i32; LANES];
                for (x, codes) in limb[at..at + x.group].chunks_exact(2).zip(codes) {
                    for (s, c) in sum.iter_mut().zip(codes) {
                        *s += x[0] as i32 * (c & 0xffff) as i32 + x[1] as i32 * (c >> 16) as i32;
                    }
                }
                sum
            };
            let (scales, biases) = w.constants(block, g);
            let (step, total) = (x.steps[r * groups + g], x.sums[r * groups + g]);
            let high = dot(&x.high);
            let low = x.wide.then(|| dot(&x.low));
            for lane in 0..LANES {
                let d = match &low {
                    Some(low) => (high[lane] as f32).mul_add(256.0, low[lane] as f32),
                    None => high[lane] as f32,
                };
                y[lane] = scales[lane].mul_add(d * step, y[lane]);
                y[lane] = biases[lane].mul_add(total, y[lane]);
            }
        }
        store(r, block, w.n, y, out);
    }
}

#[inline(always)]
fn store<T: Element>(row: usize, block: usize, n: usize, y: [f32; LANES], out: &Columns<T>) {
    let first = block * LANES;
    for (lane, y) in y.iter().enumerate().take(n - first) {
        out.put(row, first + lane, T::round(*y));
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::*;

    /// One block of columns for a panel of rows.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn block<T: Element>(
        x: &FixedRows,
        w: &Packed,
        block: usize,
        panel: std::ops::Range<usize>,
        scratch: &mut [[u32; LANES]],
        out: &Columns<T>,
    ) {
        let (pairs, groups) = (x.group / 2, w.groups());
        for g in 0..groups {
            w.unpack(block, g, &mut scratch[g * pairs..][..pairs]);
        }
        let mut r = panel.start;
        while r < panel.end {
            match (panel.end - r).min(TILE) {
                1 => tile::<1, T>(x, w, block, r, scratch, out),
                2 => tile::<2, T>(x, w, block, r, scratch, out),
                3 => tile::<3, T>(x, w, block, r, scratch, out),
                _ => tile::<TILE, T>(x, w, block, r, scratch, out),
            }
            r += TILE;
        }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn tile<const R: usize, T: Element>(
        x: &FixedRows,
        w: &Packed,
        block: usize,
        first: usize,
        scratch: &[[u32; LANES]],
        out: &Columns<T>,
    ) {
        let (pairs, groups) = (x.group / 2, w.groups());
        let mut y = [_mm256_setzero_ps(); R];
        for g in 0..groups {
            let codes = &scratch[g * pairs..][..pairs];
            let at = |r: usize| (first + r) * x.k + g * x.group;
            let high = dot::<R>(codes, std::array::from_fn(|r| &x.high[at(r)..][..x.group]));
            let (scales, biases) = w.constants(block, g);
            let (scales, biases) = (
                _mm256_loadu_ps(scales.as_ptr()),
                _mm256_loadu_ps(biases.as_ptr()),
            );
            let mut d = [_mm256_setzero_ps(); R];
            if x.wide {
                let low = dot::<R>(codes, std::array::from_fn(|r| &x.low[at(r)..][..x.group]));
                let shift = _mm256_set1_ps(256.0);
                for r in 0..R {
                    d[r] = _mm256_fmadd_ps(
                        _mm256_cvtepi32_ps(high[r]),
                        shift,
                        _mm256_cvtepi32_ps(low[r]),
                    );
                }
            } else {
                for r in 0..R {
                    d[r] = _mm256_cvtepi32_ps(high[r]);
                }
            }
            for r in 0..R {
                let i = (first + r) * groups + g;
                let scaled = _mm256_mul_ps(d[r], _mm256_set1_ps(x.steps[i]));
                y[r] = _mm256_fmadd_ps(scales, scaled, y[r]);
                y[r] = _mm256_fmadd_ps(biases, _mm256_set1_ps(x.sums[i]), y[r]);
            }
        }
        for (r, y) in y.iter().enumerate() {
            if x.finite[first + r] {
                let mut lanes = [0f32; LANES];
                _mm256_storeu_ps(lanes.as_mut_ptr(), *y);
                store(first + r, block, w.n, lanes, out);
            }
        }
    }

    /// Exact sums of codes times 16-bit limbs, for R rows of one group.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn dot<const R: usize>(codes: &[[u32; LANES]], x: [&[i16]; R]) -> [__m256i; R] {
        let mut sums = [_mm256_setzero_si256(); R];
        for (j, codes) in codes.iter().enumerate() {
            let codes = _mm256_loadu_si256(codes.as_ptr().cast());
            for r in 0..R {
                // Two neighbouring limbs; the slices hold group_size = 2 * codes.len() of them.
                let pair = x[r].as_ptr().add(2 * j).cast::<i32>().read_unaligned();
                let product = _mm256_madd_epi16(codes, _mm256_set1_epi32(pair));
                sums[r] = _mm256_add_epi32(sums[r], product);
            }
        }
        sums
    }
}
