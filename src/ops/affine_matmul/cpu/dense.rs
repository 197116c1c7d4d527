//! Plain weights, kept in their own dtype: one pass, f32 sums in a fixed order.
//!
//! Contract: sixteen running sums, element `k` going to sum `k % 16` in order, by fma; then the sums are added pairwise by
//! halves (16 → 8 → 4 → 2 → 1).

use rayon::prelude::*;

use super::{Columns, SERIAL};
use crate::ops::cpu::Element;

const SUMS: usize = 16;

/// `y[rows, n]` for f32 rows `x` of `k` and a weight `[n, k]`.
pub(crate) fn matmul<W: Element, T: Element>(x: &[f32], w: &[W], n: usize, k: usize) -> Vec<T> {
    let rows = x.len() / k;
    let mut out = vec![T::round(0.0); rows * n];
    let target = Columns::new(&mut out, n);
    let run = |first: usize, end: usize| {
        let mut weights = vec![0f32; k];
        for column in first..end {
            dispatch(x, &w[column * k..][..k], column, &mut weights, &target);
        }
    };
    if rows * n * k < SERIAL {
        run(0, n);
    } else {
        let chunk = n.div_ceil(4 * rayon::current_num_threads()).max(1);
        (0..n.div_ceil(chunk))
            .into_par_iter()
            .for_each(|c| run(c * chunk, ((c + 1) * chunk).min(n)));
    }
    out
}

fn dispatch<W: Element, T: Element>(
    x: &[f32],
    w: &[W],
    column: usize,
    weights: &mut [f32],
    out: &Columns<T>,
) {
    #[cfg(target_arch = "x86_64")]
    if crate::ops::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { column_avx2(x, w, column, weights, out) };
    }
    run_column(x, w, column, weights, out)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn column_avx2<W: Element, T: Element>(
    x: &[f32],
    w: &[W],
    column: usize,
    weights: &mut [f32],
    out: &Columns<T>,
) {
    run_column(x, w, column, weights, out)
}

#[inline(always)]
fn run_column<W: Element, T: Element>(
    x: &[f32],
    w: &[W],
    column: usize,
    weights: &mut [f32],
    out: &Columns<T>,
) {
    weights.iter_mut().zip(w).for_each(|(o, w)| *o = w.f32());
    for (r, x) in x.chunks_exact(w.len()).enumerate() {
        out.put(r, column, T::round(dot(x, weights)));
    }
}

#[inline(always)]
fn dot(x: &[f32], w: &[f32]) -> f32 {
    let mut sums = [0f32; SUMS];
    let (xs, ws) = (x.chunks_exact(SUMS), w.chunks_exact(SUMS));
    let (x_rest, w_rest) = (xs.remainder(), ws.remainder());
    for (x, w) in xs.zip(ws) {
        for i in 0..SUMS {
            sums[i] = x[i].mul_add(w[i], sums[i]);
        }
    }
    for (i, (x, w)) in x_rest.iter().zip(w_rest).enumerate() {
        sums[i] = x.mul_add(*w, sums[i]);
    }
    let mut width = SUMS / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}
