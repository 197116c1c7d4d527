//! The kernels in plain Rust, written so that a compiler can vectorise them over columns.

use super::activations::{FixedTile, FloatTile};
use super::packed::{bytes, planes, Affine, Dense, COLUMNS};

/// K that a plain weight's partial sums span before they are added to the result.
pub(super) const SEGMENT: usize = 64;

/// A block of columns times a tile of rows: `out[row][column]`.
pub(super) fn affine(w: &Affine, block: usize, x: &FixedTile, limbs: usize, out: &mut [[f32; 16]]) {
    let (a, b) = planes(w.format.bits);
    let size = x.tile.size;
    let group_pairs = w.format.group_size / 2;
    let lines = &w.lines[block * w.block_lines()..][..w.block_lines()];
    out[..size].fill([0.0; 16]);
    for (g, lines) in lines.chunks_exact(w.group_lines()).enumerate() {
        let (codes, floats) = lines.split_at(w.code_lines());
        let mut sums = [[[0i32; COLUMNS]; 8]; 2];
        for pair in 0..group_pairs {
            let chunk = bytes(&codes[pair / 16 * w.format.bits..][..w.format.bits]);
            let mut code = [0i32; 32];
            let mut plane = |first: usize, width: usize, shift: usize| {
                let per_lane = 16 / width;
                let line = &chunk[(first + pair % 16 / per_lane) * 64..][..64];
                let (down, mask) = (pair % per_lane * width, (1u32 << width) - 1);
                for (code, lane) in code.iter_mut().zip(line.chunks_exact(2)) {
                    let lane = u16::from_le_bytes([lane[0], lane[1]]) as u32;
                    *code |= ((lane >> down & mask) << shift) as i32;
                }
            };
            plane(0, a, 0);
            if b > 0 {
                plane(a, b, a);
            }
            let values = &x.pairs[(g * group_pairs + pair) * limbs * size..][..limbs * size];
            for (limb, values) in values.chunks_exact(size).enumerate() {
                for (sums, v) in sums[limb].iter_mut().zip(values) {
                    let (x0, x1) = (*v as i16 as i32, v >> 16);
                    for (sum, code) in sums.iter_mut().zip(code.chunks_exact(2)) {
                        *sum += code[0] * x0 + code[1] * x1;
                    }
                }
            }
        }
        let floats = bytes(floats);
        for (r, out) in out[..size].iter_mut().enumerate() {
            let (step, sum) = (x.steps[g * size + r], x.sums[g * size + r]);
            for (c, y) in out.iter_mut().enumerate() {
                let high = sums[0][r][c] as f32;
                let dot = match limbs {
                    1 => high,
                    _ => high.mul_add(256.0, sums[1][r][c] as f32),
                };
                let (scale, bias) = (w.float.read(floats, c), w.float.read(floats, 16 + c));
                *y = bias.mul_add(sum, scale.mul_add(dot * step, *y));
            }
        }
    }
}

/// The same for a plain weight: per 64 K, even and odd K apart, each in order with fused multiply-add.
pub(super) fn dense(w: &Dense, block: usize, x: &FloatTile, out: &mut [[f32; 16]]) {
    let size = x.tile.size;
    let weights = bytes(&w.lines[block * w.block_lines()..][..w.block_lines()]);
    for (r, out) in out[..size].iter_mut().enumerate() {
        *out = [0.0; 16];
        for first in (0..w.k).step_by(SEGMENT) {
            let mut sums = [[0f32; COLUMNS]; 2];
            for k in first..w.k.min(first + SEGMENT) {
                let v = x.values[k * size + r];
                for (c, sum) in sums[k % 2].iter_mut().enumerate() {
                    *sum = w.float.read(weights, k * COLUMNS + c).mul_add(v, *sum);
                }
            }
            for (c, y) in out.iter_mut().enumerate() {
                *y += sums[0][c] + sums[1][c];
            }
        }
    }
}
