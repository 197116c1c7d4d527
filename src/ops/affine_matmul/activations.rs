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
        let special = |r: &usize| x[r * k..][..k].iter().any(|v| !v.is_finite());
        let make = |tile: Tile| {
            let groups = k / group_size;
            let mut out = FixedTile {
                tile,
                pairs: vec![0; k / 2 * limbs * tile.size],
                steps: vec![1.0; groups * tile.size],
                sums: vec![0.0; groups * tile.size],
            };
            for r in 0..tile.rows {
                let row = &x[(tile.first + r) * k..][..k];
                if row.iter().all(|v| v.is_finite()) {
                    out.set_row(r, row, group_size, limbs);
                }
            }
            out
        };
        let tiles = tiles(rows, sizes);
        let tiles = match x.len() < 1 << 15 {
            true => tiles.into_iter().map(make).collect(),
            false => tiles.into_par_iter().map(make).collect(),
        };
        Self {
            group_size,
            limbs,
            tiles,
            special: (0..rows).filter(special).collect(),
        }
    }
}

impl FixedTile {
    fn set_row(&mut self, r: usize, row: &[f32], group_size: usize, limbs: usize) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was just detected.
            return unsafe { self.set_row_avx2(r, row, group_size, limbs) };
        }
        self.set_row_any(r, row, group_size, limbs)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn set_row_avx2(&mut self, r: usize, row: &[f32], group_size: usize, limbs: usize) {
        self.set_row_any(r, row, group_size, limbs)
    }

    #[inline(always)]
    fn set_row_any(&mut self, r: usize, row: &[f32], group_size: usize, limbs: usize) {
        let size = self.tile.size;
        let mut values = [0i32; 128];
        for (g, x) in row.chunks_exact(group_size).enumerate() {
            let values = &mut values[..group_size];
            let (step, sum) = quantize(x, values, if limbs == 1 { 15 } else { 23 });
            self.steps[g * size + r] = step;
            self.sums[g * size + r] = sum as f32 * step;
            let pairs = &mut self.pairs[g * group_size / 2 * limbs * size..]
                [..group_size / 2 * limbs * size];
            if limbs == 1 {
                for (pair, out) in values.chunks_exact(2).zip(pairs.chunks_exact_mut(size)) {
                    out[r] = (pair[0] & 0xffff) | pair[1] << 16;
                }
            } else {
                for (pair, out) in values.chunks_exact(2).zip(pairs.chunks_exact_mut(2 * size)) {
                    out[r] = (pair[0] >> 8 & 0xffff) | (pair[1] >> 8) << 16;
                    out[size + r] = (pair[0] & 0xff) | (pair[1] & 0xff) << 16;
                }
            }
        }
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
