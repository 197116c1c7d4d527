//! The kernels with AVX2 and FMA, eight columns to a vector; with AVX-VNNI where that is there too.
//!
//! `vpmaddwd` multiplies 16-bit codes by 16-bit limbs and adds pairs, exactly, so the sums are the portable ones; `vpdpwssd`
//! of AVX-VNNI adds them to the sum as well.

// Indexed loops over constant sizes unroll into registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::activations::{FixedTile, FloatTile};
use super::packed::{planes, Affine, Dense, Float};
use super::portable::SEGMENT;

/// How far ahead codes are fetched: a row of blocks is short, and hardware prefetchers restart at each page.
const PREFETCH_BYTES: usize = 2048;

/// Eight floats from element `$i` on. A macro, because a call would spill every sum.
macro_rules! load {
    ($float:expr, $p:expr, $i:expr) => {
        match $float {
            Float::F32 => _mm256_loadu_ps($p.add($i * 4).cast()),
            Float::Bf16 => {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128($p.add($i * 2).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
            Float::F16 => _mm256_cvtph_ps(_mm_loadu_si128($p.add($i * 2).cast())),
        }
    };
}

/// See [`super::portable::affine`].
///
/// # Safety
/// AVX2, FMA and F16C must be there, AVX-VNNI too if `VNNI`, and `out` must hold the tile's rows.
pub(super) unsafe fn affine<const VNNI: bool>(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    limbs: usize,
    out: &mut [[f32; 16]],
) {
    macro_rules! rows {
        ($a:literal, $b:literal) => {
            match (limbs, x.tile.size) {
                (1, 1) => rows!($a, $b, 1, 1, 2),
                (1, 2) => rows!($a, $b, 2, 1, 2),
                (1, 3) => rows!($a, $b, 3, 1, 2),
                (1, 4) => rows!($a, $b, 4, 1, 1),
                (1, 6) => rows!($a, $b, 6, 1, 1),
                (1, 8) => rows!($a, $b, 8, 1, 1),
                (2, 1) => rows!($a, $b, 1, 2, 2),
                (2, 2) => rows!($a, $b, 2, 2, 1),
                (2, 3) => rows!($a, $b, 3, 2, 1),
                (2, 4) => rows!($a, $b, 4, 2, 1),
                _ => super::portable::affine(w, block, x, limbs, out),
            }
        };
        ($a:literal, $b:literal, $r:literal, $l:literal, $h:literal) => {
            match VNNI {
                true => tile_vnni::<$a, $b, $r, $l, $h>(w, block, x, out),
                false => tile_avx2::<$a, $b, $r, $l, $h>(w, block, x, out),
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

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_avx2<const A: i32, const B: i32, const R: usize, const L: usize, const H: usize>(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    out: &mut [[f32; 16]],
) {
    tile::<A, B, R, L, H, false>(w, block, x, out)
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn tile_vnni<const A: i32, const B: i32, const R: usize, const L: usize, const H: usize>(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    out: &mut [[f32; 16]],
) {
    tile::<A, B, R, L, H, true>(w, block, x, out)
}

// Inlined always, so that it is compiled with its caller's instruction set.
#[inline(always)]
unsafe fn tile<
    const A: i32,
    const B: i32,
    const R: usize,
    const L: usize,
    const H: usize,
    const VNNI: bool,
>(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    out: &mut [[f32; 16]],
) {
    let (pa, bits) = (A as usize, (A + B) as usize);
    let per_lane = 16 / pa;
    let lines_per_b = if B > 0 { pa / B as usize } else { usize::MAX };
    let mask_a = _mm256_set1_epi16((1i16 << A).wrapping_sub(1));
    let mask_b = _mm256_set1_epi16((1i16 << B) - 1);
    let chunks = w.format.group_size / 32;
    let group_bytes = w.group_lines() * 64;
    let mut p = w.lines.as_ptr().add(block * w.block_lines()).cast::<u8>();
    // Few rows: both halves of a block at once, for independent chains of sums; more rows: one half, to stay in registers.
    let mut y = [[[_mm256_setzero_ps(); R]; H]; 2];
    let mut pairs = x.pairs.as_ptr();
    let (mut steps, mut sums) = (x.steps.as_ptr(), x.sums.as_ptr());
    for _ in 0..w.groups {
        let mut at = 0;
        while at < group_bytes {
            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(PREFETCH_BYTES + at).cast());
            at += 64;
        }
        let floats = p.add(w.code_lines() * 64);
        for (part, y) in y.iter_mut().enumerate().take(2 / H) {
            let mut acc = [[[_mm256_setzero_si256(); R]; L]; H];
            let mut codes = p.add(part * 32);
            let mut v = pairs;
            for _ in 0..chunks {
                let mut b = [_mm256_setzero_si256(); H];
                for line in 0..pa {
                    let mut a = [_mm256_setzero_si256(); H];
                    for h in 0..H {
                        a[h] = _mm256_load_si256(codes.add(line * 64 + h * 32).cast());
                    }
                    if B > 0 && line % lines_per_b == 0 {
                        let line = codes.add((pa + line / lines_per_b) * 64);
                        for h in 0..H {
                            b[h] = _mm256_load_si256(line.add(h * 32).cast());
                        }
                    }
                    for _ in 0..per_lane {
                        let mut code = [_mm256_setzero_si256(); H];
                        for h in 0..H {
                            code[h] = _mm256_and_si256(a[h], mask_a);
                            a[h] = _mm256_srli_epi16::<A>(a[h]);
                            if B > 0 {
                                let high = _mm256_and_si256(b[h], mask_b);
                                b[h] = _mm256_srli_epi16::<B>(b[h]);
                                code[h] = _mm256_or_si256(code[h], _mm256_slli_epi16::<A>(high));
                            }
                        }
                        for l in 0..L {
                            for r in 0..R {
                                let pair = _mm256_set1_epi32(*v.add(l * R + r));
                                for h in 0..H {
                                    let sum = &mut acc[h][l][r];
                                    if VNNI {
                                        *sum = _mm256_dpwssd_avx_epi32(*sum, code[h], pair);
                                    } else {
                                        let product = _mm256_madd_epi16(code[h], pair);
                                        *sum = _mm256_add_epi32(*sum, product);
                                    }
                                }
                            }
                        }
                        v = v.add(L * R);
                    }
                }
                codes = codes.add(bits * 64);
            }
            for h in 0..H {
                let scale = load!(w.float, floats, (part + h) * 8);
                let bias = load!(w.float, floats, 16 + (part + h) * 8);
                for r in 0..R {
                    let mut dot = _mm256_cvtepi32_ps(acc[h][0][r]);
                    if L == 2 {
                        let low = _mm256_cvtepi32_ps(acc[h][L - 1][r]);
                        dot = _mm256_fmadd_ps(dot, _mm256_set1_ps(256.0), low);
                    }
                    let dot = _mm256_mul_ps(dot, _mm256_set1_ps(*steps.add(r)));
                    let sum = _mm256_set1_ps(*sums.add(r));
                    y[h][r] = _mm256_fmadd_ps(scale, dot, y[h][r]);
                    y[h][r] = _mm256_fmadd_ps(bias, sum, y[h][r]);
                }
            }
        }
        p = p.add(group_bytes);
        pairs = pairs.add(w.format.group_size / 2 * L * R);
        (steps, sums) = (steps.add(R), sums.add(R));
    }
    for (part, y) in y.iter().enumerate().take(2 / H) {
        for (h, y) in y.iter().enumerate() {
            for (out, y) in out[..R].iter_mut().zip(y) {
                _mm256_storeu_ps(out.as_mut_ptr().add((part + h) * 8), *y);
            }
        }
    }
}

/// See [`super::portable::dense`].
///
/// # Safety
/// As for [`affine`], without AVX-VNNI.
pub(super) unsafe fn dense(w: &Dense, block: usize, x: &FloatTile, out: &mut [[f32; 16]]) {
    // The type is a constant of the loops: a match inside them costs ten times the arithmetic.
    macro_rules! rows {
        ($float:literal) => {
            match x.tile.size {
                1 => dense_tile::<$float, 1, 2>(w, block, x, out),
                2 => dense_tile::<$float, 2, 2>(w, block, x, out),
                3 => dense_tile::<$float, 3, 1>(w, block, x, out),
                4 => dense_tile::<$float, 4, 1>(w, block, x, out),
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

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dense_tile<const FLOAT: u8, const R: usize, const V: usize>(
    w: &Dense,
    block: usize,
    x: &FloatTile,
    out: &mut [[f32; 16]],
) {
    let float = [Float::F32, Float::Bf16, Float::F16][FLOAT as usize];
    let values = x.values.as_ptr();
    let p = w.lines.as_ptr().add(block * w.block_lines()).cast::<u8>();
    let row_bytes = 16 * float.size();
    let mut y = [[[_mm256_setzero_ps(); V]; R]; 2];
    for first in (0..w.k).step_by(SEGMENT) {
        let end = w.k.min(first + SEGMENT);
        for (part, y) in y.iter_mut().enumerate().take(2 / V) {
            let mut acc = [[[_mm256_setzero_ps(); V]; R]; 2];
            macro_rules! step {
                ($parity:literal, $k:expr) => {
                    let at = p.add($k * row_bytes);
                    for v in 0..V {
                        let weight = load!(float, at, part * 8 + v * 8);
                        for r in 0..R {
                            let value = _mm256_set1_ps(*values.add($k * R + r));
                            acc[$parity][r][v] = _mm256_fmadd_ps(weight, value, acc[$parity][r][v]);
                        }
                    }
                };
            }
            let mut k = first;
            while k + 1 < end {
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(k * row_bytes + PREFETCH_BYTES).cast());
                step!(0, k);
                step!(1, k + 1);
                k += 2;
            }
            if k < end {
                step!(0, k);
            }
            for r in 0..R {
                for v in 0..V {
                    let sum = _mm256_add_ps(acc[0][r][v], acc[1][r][v]);
                    y[r][v] = _mm256_add_ps(y[r][v], sum);
                }
            }
        }
    }
    for (part, y) in y.iter().enumerate().take(2 / V) {
        for (out, y) in out[..R].iter_mut().zip(y) {
            for (v, y) in y.iter().enumerate() {
                _mm256_storeu_ps(out.as_mut_ptr().add(part * 8 + v * 8), *y);
            }
        }
    }
}
