//! Activations in the kernels' order: tiles of rows, as fixed point per group (affine weights) or as f32 (plain weights).

use rayon::prelude::*;

/// Rows of a tile, or the next larger size that a kernel exists for (the spare rows are zero).
pub(super) const TILES_16: [usize; 6] = [1, 2, 3, 4, 6, 8];
/// The same for 24-bit rows and for plain weights.
pub(super) const TILES_24: [usize; 4] = [1, 2, 3, 4];

/// A tile of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// First row.
    pub first: usize,
    /// Rows that are real.
    pub rows: usize,
    /// Rows that the kernel computes.
    pub size: usize,
}

pub(super) fn tiles(rows: usize, sizes: &[usize]) -> Vec<Tile> {
    let largest = sizes[sizes.len() - 1];
    (0..rows)
        .step_by(largest)
        .map(|first| {
            let rows = largest.min(rows - first);
            let size = sizes
                .iter()
                .copied()
                .find(|s| *s >= rows)
                .unwrap_or(largest);
            Tile { first, rows, size }
        })
        .collect()
}

/// One tile in fixed point.
#[derive(Debug)]
pub(super) struct FixedTile {
    pub tile: Tile,
    /// `[k/2][limb][row]`: two consecutive 16-bit values in an i32, the lower K in the lower half.
    pub pairs: Vec<i32>,
    /// `[group][row]`: the power of two that a unit stands for.
    pub steps: Vec<f32>,
    /// `[group][row]`: the sum of the group's fixed-point values, times the step.
    pub sums: Vec<f32>,
}

/// All rows of an `x` in fixed point for one group size.
#[derive(Debug)]
pub(super) struct Fixed {
    pub group_size: usize,
    pub limbs: usize,
    pub tiles: Vec<FixedTile>,
    /// Rows with NaN or Inf: zero in the tiles, computed apart.
    pub special: Vec<usize>,
}

impl Fixed {
    /// Of `x` `[rows, k]`; one limb is 16 bits, two are 24.
    pub(super) fn new(x: &[f32], k: usize, group_size: usize, limbs: usize) -> Self {
        let rows = x.len().checked_div(k).unwrap_or(0);
        let sizes: &[usize] = if limbs == 1 { &TILES_16 } else { &TILES_24 };
        let special: Vec<usize> = (0..rows)
            .filter(|r| !all_finite(&x[r * k..][..k]))
            .collect();
        let make = |tile: Tile| {
            let groups = k / group_size;
            let mut out = FixedTile {
                tile,
                pairs: vec![0; k / 2 * limbs * tile.size],
                steps: vec![1.0; groups * tile.size],
                sums: vec![0.0; groups * tile.size],
            };
            out.fill(x, k, group_size, &special);
            out
        };
        let tiles = tiles(rows, sizes);
        let tiles = match tiles.len() {
            0..4 => tiles.into_iter().map(make).collect(),
            _ => tiles.into_par_iter().map(make).collect(),
        };
        Self {
            group_size,
            limbs,
            tiles,
            special,
        }
    }
}

fn all_finite(x: &[f32]) -> bool {
    let largest = x.iter().fold(0, |m, v| (v.to_bits() & 0x7fff_ffff).max(m));
    largest < 0x7f80_0000
}

/// Groups of a tile that one thread takes at least: fewer are not worth waking another.
const GROUPS_PER_THREAD: usize = 64;

impl FixedTile {
    /// Fills in the tile's rows, leaving out the `special` ones.
    fn fill(&mut self, x: &[f32], k: usize, group_size: usize, special: &[usize]) {
        let (tile, size) = (self.tile, self.tile.size);
        let per_group = self.pairs.len() / (k / group_size).max(1);
        if per_group == 0 {
            return;
        }
        let group = |g: usize, pairs: &mut [i32], steps: &mut [f32], sums: &mut [f32]| {
            let place = Group {
                pairs,
                steps,
                sums,
                size,
                group_size,
            };
            let rows = (0..tile.rows)
                .filter(|r| !special.contains(&(tile.first + r)))
                .map(|r| (r, &x[(tile.first + r) * k + g * group_size..][..group_size]));
            place.fill(rows);
        };
        let parts = (self.pairs.par_chunks_mut(per_group))
            .zip(self.steps.par_chunks_mut(size))
            .zip(self.sums.par_chunks_mut(size))
            .enumerate();
        if tile.rows * k < 1 << 13 {
            let parts = (self.pairs.chunks_mut(per_group))
                .zip(self.steps.chunks_mut(size))
                .zip(self.sums.chunks_mut(size))
                .enumerate();
            parts.for_each(|(g, ((pairs, steps), sums))| group(g, pairs, steps, sums));
        } else {
            parts
                .with_min_len(GROUPS_PER_THREAD.div_ceil(tile.rows))
                .for_each(|(g, ((pairs, steps), sums))| group(g, pairs, steps, sums));
        }
    }
}

/// Where a group of a tile goes.
struct Group<'a> {
    pairs: &'a mut [i32],
    steps: &'a mut [f32],
    sums: &'a mut [f32],
    size: usize,
    group_size: usize,
}

impl Group<'_> {
    fn fill<'x>(self, rows: impl Iterator<Item = (usize, &'x [f32])>) {
        #[cfg(target_arch = "x86_64")]
        if crate::ops::cpu::has_avx2() {
            // SAFETY: the feature was just detected.
            return unsafe { self.fill_avx2(rows) };
        }
        self.fill_any(rows)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fill_avx2<'x>(self, rows: impl Iterator<Item = (usize, &'x [f32])>) {
        self.fill_any(rows)
    }

    #[inline(always)]
    fn fill_any<'x>(self, rows: impl Iterator<Item = (usize, &'x [f32])>) {
        // Row by row first and interleaved afterwards: each loop is then one that vectorises.
        let mut limbs = [[0i16; 128]; 2];
        let mut values = [0i32; 128];
        let values = &mut values[..self.group_size];
        let two = self.pairs.len() > self.group_size / 2 * self.size;
        for (r, x) in rows {
            let (step, sum) = quantize(x, values, if two { 23 } else { 15 });
            (self.steps[r], self.sums[r]) = (step, sum as f32 * step);
            let [high, low] = &mut limbs;
            if two {
                for (v, (h, l)) in values.iter().zip(high.iter_mut().zip(low.iter_mut())) {
                    (*h, *l) = ((*v >> 8) as i16, (*v & 0xff) as i16);
                }
            } else {
                high.iter_mut()
                    .zip(values.iter())
                    .for_each(|(h, v)| *h = *v as i16);
            }
            let stride = if two { 2 * self.size } else { self.size };
            interleave(high, &mut self.pairs[r..], stride, self.group_size / 2);
            if two {
                interleave(
                    low,
                    &mut self.pairs[self.size + r..],
                    stride,
                    self.group_size / 2,
                );
            }
        }
    }
}

/// Every two values to one place in `stride`.
#[inline(always)]
fn interleave(values: &[i16; 128], pairs: &mut [i32], stride: usize, count: usize) {
    // One check, and none in the loop.
    let pairs = &mut pairs[..(count - 1) * stride + 1];
    for j in 0..count.min(64) {
        let pair = (values[2 * j] as u16 as u32) | (values[2 * j + 1] as u16 as u32) << 16;
        // SAFETY: `j < count`, so the place is within the slice that was just cut to `(count - 1) * stride + 1`.
        unsafe { *pairs.get_unchecked_mut(j * stride) = pair as i32 };
    }
}

/// Rounds finite `x` to signed integers of `bits` bits and a sign, to nearest, ties to even; returns the step and the integers' sum.
/// The step is `2^(e - bits)` where the largest `|x|` is in `[2^(e-1), 2^e)`, but no smaller than the smallest normal f32.
#[inline(always)]
pub(super) fn quantize(x: &[f32], values: &mut [i32], bits: u32) -> (f32, i32) {
    let largest = x.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
    let exponent = ((largest >> 23) + 1).saturating_sub(bits).max(1);
    let step = f32::from_bits(exponent << 23);
    let inverse = f32::from_bits((254 - exponent) << 23);
    let limit = ((1u32 << bits) - 1) as f32;
    let mut sum = 0;
    for (v, q) in x.iter().zip(values) {
        let rounded = (v * inverse).round_ties_even().max(-limit).min(limit);
        // SAFETY: finite and within ±2^23.
        *q = unsafe { rounded.to_int_unchecked::<i32>() };
        sum += *q;
    }
    (step, sum)
}

/// One tile of f32 rows, `[k][row]`.
#[derive(Debug)]
pub(super) struct FloatTile {
    pub tile: Tile,
    pub values: Vec<f32>,
}

/// Rows of `x` `[rows, k]` for plain weights.
pub(super) fn float_tiles(x: &[f32], k: usize) -> Vec<FloatTile> {
    let rows = x.len().checked_div(k).unwrap_or(0);
    let make = |tile: Tile| {
        let mut values = vec![0.0; k * tile.size];
        for r in 0..tile.rows {
            let row = &x[(tile.first + r) * k..][..k];
            for (out, v) in values.chunks_exact_mut(tile.size).zip(row) {
                out[r] = *v;
            }
        }
        FloatTile { tile, values }
    };
    tiles(rows, &TILES_24).into_iter().map(make).collect()
}
