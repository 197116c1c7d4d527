//! The kernels with NEON, four columns to a vector. Run under emulation (qemu), not timed on hardware.
//!
//! `smlal` multiplies 16-bit codes by 16-bit limbs into 32-bit sums, exactly; even and odd K have lanes of their own and are
//! added at the end of a group, so the sums are the portable ones.

// Indexed loops over constant sizes unroll into registers.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;

use super::activations::{FixedTile, FloatTile};
use super::packed::{planes, Affine, Dense, Float};
use super::portable::SEGMENT;

/// Four floats, element `i` and on.
#[inline(always)]
unsafe fn load(float: Float, p: *const u8, i: usize) -> float32x4_t {
    match float {
        Float::F32 => vld1q_f32(p.add(i * 4).cast()),
        Float::Bf16 => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(i * 2).cast()))),
        Float::F16 => {
            let half = |j: usize| half::f16::from_bits(p.cast::<u16>().add(i + j).read()).to_f32();
            vld1q_f32([half(0), half(1), half(2), half(3)].as_ptr())
        }
    }
}

/// See [`super::portable::affine`].
///
/// # Safety
/// `out` must hold the tile's rows.
pub(super) unsafe fn affine(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    limbs: usize,
    out: &mut [[f32; 16]],
) {
    // Rows, limbs, vectors of four columns at once: sixteen of the thirty-two registers hold sums.
    macro_rules! rows {
        ($a:literal, $b:literal) => {
            match (limbs, x.tile.size) {
                (1, 1) => tile::<$a, $b, 1, 1, 4>(w, block, x, out),
                (1, 2) => tile::<$a, $b, 2, 1, 4>(w, block, x, out),
                (1, 3) => tile::<$a, $b, 3, 1, 2>(w, block, x, out),
                (1, 4) => tile::<$a, $b, 4, 1, 2>(w, block, x, out),
                (1, 6) => tile::<$a, $b, 6, 1, 1>(w, block, x, out),
                (1, 8) => tile::<$a, $b, 8, 1, 1>(w, block, x, out),
                (2, 1) => tile::<$a, $b, 1, 2, 4>(w, block, x, out),
                (2, 2) => tile::<$a, $b, 2, 2, 2>(w, block, x, out),
                (2, 3) => tile::<$a, $b, 3, 2, 1>(w, block, x, out),
                (2, 4) => tile::<$a, $b, 4, 2, 1>(w, block, x, out),
                _ => super::portable::affine(w, block, x, limbs, out),
            }
        };
    }
    match planes(w.format.bits) {
        (2, 0) => rows!(2, 0),
        (2, 1) => rows!(2, 1),
        (4, 0) => rows!(4, 0),
        (4, 1) => rows!(4, 1),
        (4, 2) => rows!(4, 2),
        _ => rows!(8, 0),
    }
}

#[target_feature(enable = "neon")]
unsafe fn tile<const A: i16, const B: i16, const R: usize, const L: usize, const H: usize>(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    out: &mut [[f32; 16]],
) {
    let (pa, bits) = (A as usize, (A + B) as usize);
    let per_lane = 16 / pa;
    let lines_per_b = if B > 0 { pa / B as usize } else { usize::MAX };
    let mask_a = vdupq_n_u16((1u16 << A) - 1);
    let mask_b = vdupq_n_u16((1u16 << B) - 1);
    let (down_a, down_b, up_a) = (vdupq_n_s16(-A), vdupq_n_s16(-B), vdupq_n_s16(A));
    let chunks = w.format.group_size / 32;
    let mut p = w.lines.as_ptr().add(block * w.block_lines()).cast::<u8>();
    let mut y = [[vdupq_n_f32(0.0); R]; 4];
    let mut pairs = x.pairs.as_ptr();
    let (mut steps, mut sums) = (x.steps.as_ptr(), x.sums.as_ptr());
    for _ in 0..w.groups {
        let floats = p.add(w.code_lines() * 64);
        for first in (0..4).step_by(H) {
            let mut acc = [[[[vdupq_n_s32(0); 2]; R]; L]; H];
            let mut codes = p.add(first * 16);
            let mut v = pairs;
            for _ in 0..chunks {
                let mut b = [vdupq_n_u16(0); H];
                for line in 0..pa {
                    let mut a = [vdupq_n_u16(0); H];
                    for h in 0..H {
                        a[h] = vld1q_u16(codes.add(line * 64 + h * 16).cast());
                        if B > 0 && line % lines_per_b == 0 {
                            let at = (pa + line / lines_per_b) * 64 + h * 16;
                            b[h] = vld1q_u16(codes.add(at).cast());
                        }
                    }
                    for _ in 0..per_lane {
                        let mut code = [vdupq_n_s16(0); H];
                        for h in 0..H {
                            let mut bits = vandq_u16(a[h], mask_a);
                            a[h] = vshlq_u16(a[h], down_a);
                            if B > 0 {
                                let high = vandq_u16(b[h], mask_b);
                                b[h] = vshlq_u16(b[h], down_b);
                                bits = vorrq_u16(bits, vshlq_u16(high, up_a));
                            }
                            code[h] = vreinterpretq_s16_u16(bits);
                        }
                        for l in 0..L {
                            for r in 0..R {
                                let pair = vreinterpret_s16_s32(vdup_n_s32(*v.add(l * R + r)));
                                for h in 0..H {
                                    let [low, high] = &mut acc[h][l][r];
                                    *low = vmlal_s16(*low, vget_low_s16(code[h]), pair);
                                    *high = vmlal_s16(*high, vget_high_s16(code[h]), pair);
                                }
                            }
                        }
                        v = v.add(L * R);
                    }
                }
                codes = codes.add(bits * 64);
            }
            for h in 0..H {
                let scale = load(w.float, floats, (first + h) * 4);
                let bias = load(w.float, floats, 16 + (first + h) * 4);
                for r in 0..R {
                    let total = |l: usize| {
                        let [low, high] = acc[h][l][r];
                        vcvtq_f32_s32(vpaddq_s32(low, high))
                    };
                    let mut dot = total(0);
                    if L == 2 {
                        dot = vfmaq_f32(total(L - 1), dot, vdupq_n_f32(256.0));
                    }
                    let dot = vmulq_f32(dot, vdupq_n_f32(*steps.add(r)));
                    let y = &mut y[first + h][r];
                    *y = vfmaq_f32(*y, scale, dot);
                    *y = vfmaq_f32(*y, bias, vdupq_n_f32(*sums.add(r)));
                }
            }
        }
        p = p.add(w.group_lines() * 64);
        pairs = pairs.add(w.format.group_size / 2 * L * R);
        (steps, sums) = (steps.add(R), sums.add(R));
    }
    for (h, y) in y.iter().enumerate() {
        for (out, y) in out[..R].iter_mut().zip(y) {
            vst1q_f32(out.as_mut_ptr().add(h * 4), *y);
        }
    }
}

/// See [`super::portable::dense`].
///
/// # Safety
/// As for [`affine`].
pub(super) unsafe fn dense(w: &Dense, block: usize, x: &FloatTile, out: &mut [[f32; 16]]) {
    // The type is a constant of the loops: a match inside them costs more than the arithmetic.
    macro_rules! rows {
        ($float:literal) => {
            match x.tile.size {
                1 => dense_tile::<$float, 1>(w, block, x, out),
                2 => dense_tile::<$float, 2>(w, block, x, out),
                3 => dense_tile::<$float, 3>(w, block, x, out),
                4 => dense_tile::<$float, 4>(w, block, x, out),
                _ => super::portable::dense(w, block, x, out),
            }
        };
    }
    match w.float {
        Float::F32 => rows!(0),
        Float::Bf16 => rows!(1),
        Float::F16 => rows!(2),
    }
}

#[target_feature(enable = "neon")]
unsafe fn dense_tile<const FLOAT: u8, const R: usize>(
    w: &Dense,
    block: usize,
    x: &FloatTile,
    out: &mut [[f32; 16]],
) {
    let float = [Float::F32, Float::Bf16, Float::F16][FLOAT as usize];
    let values = x.values.as_ptr();
    let p = w.lines.as_ptr().add(block * w.block_lines()).cast::<u8>();
    let row_bytes = 16 * float.size();
    for half in 0..2 {
        let mut y = [[vdupq_n_f32(0.0); 2]; R];
        for first in (0..w.k).step_by(SEGMENT) {
            let mut acc = [[[vdupq_n_f32(0.0); 2]; R]; 2];
            for k in first..w.k.min(first + SEGMENT) {
                for v in 0..2 {
                    let weight = load(float, p.add(k * row_bytes), half * 8 + v * 4);
                    for r in 0..R {
                        let sum = &mut acc[k % 2][r][v];
                        *sum = vfmaq_f32(*sum, weight, vdupq_n_f32(*values.add(k * R + r)));
                    }
                }
            }
            for r in 0..R {
                for v in 0..2 {
                    y[r][v] = vaddq_f32(y[r][v], vaddq_f32(acc[0][r][v], acc[1][r][v]));
                }
            }
        }
        for r in 0..R {
            for v in 0..2 {
                vst1q_f32(out[r].as_mut_ptr().add(half * 8 + v * 4), y[r][v]);
            }
        }
    }
}
