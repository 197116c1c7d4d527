//! The kernels with AVX-512 (F, BW, VNNI), a block's sixteen columns to a vector.
//!
//! `vpdpwssd` multiplies 16-bit codes by 16-bit limbs and adds pairs to the sum, exactly, so the sums are the portable ones
//! whatever number of chains they are split over.

// Indexed loops over constant sizes unroll into registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::activations::{FixedTile, FloatTile};
use super::packed::{planes, Affine, Dense, Float};
use super::portable::SEGMENT;

/// How far ahead codes are fetched: a row of blocks is short, and hardware prefetchers restart at each page.
const PREFETCH_BYTES: usize = 4096;

/// Sixteen floats from `$p` on. A macro, because a call would spill every sum.
macro_rules! load {
    ($float:expr, $p:expr) => {
        match $float {
            Float::F32 => _mm512_loadu_ps($p.cast()),
            Float::Bf16 => {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256($p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
            Float::F16 => _mm512_cvtph_ps(_mm256_loadu_si256($p.cast())),
        }
    };
}

/// See [`super::portable::affine`]; two blocks where `out` has two, which halves the loads of activations.
///
/// # Safety
/// AVX-512 F, BW and VNNI must be there, and `out` must hold the tile's rows.
pub(super) unsafe fn affine(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    limbs: usize,
    out: &mut [[[f32; 16]; 8]],
) {
    // Blocks, rows, limbs, chains: few rows take several chains of sums, because one `vpdpwssd` waits for the one before.
    macro_rules! rows {
        ($a:literal, $b:literal) => {
            match (out.len(), limbs, x.tile.size) {
                (2, 1, 1) => tile::<$a, $b, 2, 1, 1, 2>(w, block, x, out),
                (2, 1, 2) => tile::<$a, $b, 2, 2, 1, 2>(w, block, x, out),
                (2, 1, 3) => tile::<$a, $b, 2, 3, 1, 1>(w, block, x, out),
                (2, 1, 4) => tile::<$a, $b, 2, 4, 1, 1>(w, block, x, out),
                (2, 1, 6) => tile::<$a, $b, 2, 6, 1, 1>(w, block, x, out),
                (2, 1, 8) => tile::<$a, $b, 2, 8, 1, 1>(w, block, x, out),
                (2, 2, 1) => tile::<$a, $b, 2, 1, 2, 2>(w, block, x, out),
                (2, 2, 2) => tile::<$a, $b, 2, 2, 2, 1>(w, block, x, out),
                (2, 2, 3) => tile::<$a, $b, 2, 3, 2, 1>(w, block, x, out),
                (2, 2, 4) => tile::<$a, $b, 2, 4, 2, 1>(w, block, x, out),
                (1, 1, 1) => tile::<$a, $b, 1, 1, 1, 4>(w, block, x, out),
                (1, 1, 2) => tile::<$a, $b, 1, 2, 1, 2>(w, block, x, out),
                (1, 1, 3) => tile::<$a, $b, 1, 3, 1, 2>(w, block, x, out),
                (1, 1, 4) => tile::<$a, $b, 1, 4, 1, 2>(w, block, x, out),
                (1, 1, 6) => tile::<$a, $b, 1, 6, 1, 1>(w, block, x, out),
                (1, 1, 8) => tile::<$a, $b, 1, 8, 1, 1>(w, block, x, out),
                (1, 2, 1) => tile::<$a, $b, 1, 1, 2, 2>(w, block, x, out),
                (1, 2, 2) => tile::<$a, $b, 1, 2, 2, 2>(w, block, x, out),
                (1, 2, 3) => tile::<$a, $b, 1, 3, 2, 1>(w, block, x, out),
                (1, 2, 4) => tile::<$a, $b, 1, 4, 2, 1>(w, block, x, out),
                _ => {
                    for (i, out) in out.iter_mut().enumerate() {
                        super::portable::affine(w, block + i, x, limbs, out)
                    }
                }
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

/// `vpdpwssd` by name: LLVM takes a chain of its intrinsic apart into multiplications and additions, which is twice the work.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn dpwssd(sum: &mut __m512i, code: __m512i, pair: __m512i) {
    std::arch::asm!("vpdpwssd {sum}, {code}, {pair}",
        sum = inout(zmm_reg) *sum, code = in(zmm_reg) code, pair = in(zmm_reg) pair,
        options(pure, nomem, nostack, preserves_flags));
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile<
    const A: u32,
    const B: u32,
    const W: usize,
    const R: usize,
    const L: usize,
    const C: usize,
>(
    w: &Affine,
    block: usize,
    x: &FixedTile,
    out: &mut [[[f32; 16]; 8]],
) {
    let (pa, bits) = (A as usize, (A + B) as usize);
    let per_lane = 16 / pa;
    let lines_per_b = if B > 0 { pa / B as usize } else { usize::MAX };
    let mask_a = _mm512_set1_epi16((1i16 << A).wrapping_sub(1));
    let mask_b = _mm512_set1_epi16((1i16 << B) - 1);
    let chunks = w.format.group_size / 32;
    let (group_bytes, code_bytes) = (w.group_lines() * 64, w.code_lines() * 64);
    let block_bytes = w.block_lines() * 64;
    let mut p = w.lines.as_ptr().add(block * w.block_lines()).cast::<u8>();
    let mut y = [[_mm512_setzero_ps(); R]; W];
    let mut v = x.pairs.as_ptr();
    let (mut steps, mut sums) = (x.steps.as_ptr(), x.sums.as_ptr());
    for group in 0..w.groups {
        // What comes after the end of W blocks lies behind the last of them.
        let ends = (w.groups - group) * group_bytes <= PREFETCH_BYTES;
        let ahead = PREFETCH_BYTES + if ends { (W - 1) * block_bytes } else { 0 };
        let mut acc = [[[[_mm512_setzero_si512(); R]; W]; L]; C];
        let mut codes = p;
        for _ in 0..chunks {
            let mut b = [_mm512_setzero_si512(); W];
            for line in 0..pa {
                let mut a = [_mm512_setzero_si512(); W];
                for i in 0..W {
                    let at = codes.add(i * block_bytes + line * 64);
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ahead).cast());
                    a[i] = _mm512_load_si512(at.cast());
                    if B > 0 && line % lines_per_b == 0 {
                        let at = codes.add(i * block_bytes + (pa + line / lines_per_b) * 64);
                        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ahead).cast());
                        b[i] = _mm512_load_si512(at.cast());
                    }
                }
                for pair in 0..per_lane {
                    let mut code = [_mm512_setzero_si512(); W];
                    for i in 0..W {
                        code[i] = _mm512_and_si512(a[i], mask_a);
                        a[i] = _mm512_srli_epi16::<A>(a[i]);
                        if B > 0 {
                            let high = _mm512_and_si512(b[i], mask_b);
                            b[i] = _mm512_srli_epi16::<B>(b[i]);
                            code[i] = _mm512_or_si512(code[i], _mm512_slli_epi16::<A>(high));
                        }
                    }
                    let acc = &mut acc[pair % C];
                    for l in 0..L {
                        for r in 0..R {
                            let pair = _mm512_set1_epi32(*v.add(l * R + r));
                            for i in 0..W {
                                dpwssd(&mut acc[l][i][r], code[i], pair);
                            }
                        }
                    }
                    v = v.add(L * R);
                }
            }
            codes = codes.add(bits * 64);
        }
        for i in 0..W {
            let floats = p.add(i * block_bytes + code_bytes);
            let scale = load!(w.float, floats);
            let bias = load!(w.float, floats.add(16 * w.float.size()));
            for r in 0..R {
                let mut total = [_mm512_setzero_si512(); L];
                for l in 0..L {
                    for c in 0..C {
                        total[l] = _mm512_add_epi32(total[l], acc[c][l][i][r]);
                    }
                }
                let mut dot = _mm512_cvtepi32_ps(total[0]);
                if L == 2 {
                    let low = _mm512_cvtepi32_ps(total[L - 1]);
                    dot = _mm512_fmadd_ps(dot, _mm512_set1_ps(256.0), low);
                }
                let dot = _mm512_mul_ps(dot, _mm512_set1_ps(*steps.add(r)));
                let sum = _mm512_set1_ps(*sums.add(r));
                y[i][r] = _mm512_fmadd_ps(scale, dot, y[i][r]);
                y[i][r] = _mm512_fmadd_ps(bias, sum, y[i][r]);
            }
        }
        p = p.add(group_bytes);
        (steps, sums) = (steps.add(R), sums.add(R));
    }
    for (out, y) in out.iter_mut().zip(&y) {
        for r in 0..R {
            _mm512_storeu_ps(out[r].as_mut_ptr(), y[r]);
        }
    }
}

/// See [`super::portable::dense`].
///
/// # Safety
/// As for [`affine`].
pub(super) unsafe fn dense(w: &Dense, block: usize, x: &FloatTile, out: &mut [[f32; 16]]) {
    // The type is a constant of the loops: a match inside them costs ten times the arithmetic.
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

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
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
    let mut y = [_mm512_setzero_ps(); R];
    for first in (0..w.k).step_by(SEGMENT) {
        let end = w.k.min(first + SEGMENT);
        let mut acc = [[_mm512_setzero_ps(); R]; 2];
        macro_rules! step {
            ($parity:literal, $k:expr) => {
                let weight = load!(float, p.add($k * row_bytes));
                for r in 0..R {
                    let value = _mm512_set1_ps(*values.add($k * R + r));
                    acc[$parity][r] = _mm512_fmadd_ps(weight, value, acc[$parity][r]);
                }
            };
        }
        let mut k = first;
        while k + 1 < end {
            let ahead = p.wrapping_add(k * row_bytes + PREFETCH_BYTES);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            if float == Float::F32 {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64).cast());
            }
            step!(0, k);
            step!(1, k + 1);
            k += 2;
        }
        if k < end {
            step!(0, k);
        }
        for r in 0..R {
            y[r] = _mm512_add_ps(y[r], _mm512_add_ps(acc[0][r], acc[1][r]));
        }
    }
    for r in 0..R {
        _mm512_storeu_ps(out[r].as_mut_ptr(), y[r]);
    }
}
