//! Attention on the CPU: online softmax over blocks of 64 slots, each row by itself.
//!
//! Blocks start at multiples of 64 slots whatever the rows are, and a row's sums run over slots in order: so a row's
//! bits depend neither on other rows nor on how many there are. A block's keys are transposed once for a tile of
//! rows, which puts slots in lanes and leaves no sum across lanes. Memory is linear in keys.

use rayon::prelude::*;

use crate::ops::cpu::{exp, Element};

pub(super) const BLOCK: usize = 64;
/// Rows that share a transposed block.
const TILE: usize = 32;
/// Queries whose sums stay in registers together, and lanes of each: they share every load of keys and values. Which queries
/// and lanes share a register changes no bit, every sum has an order of its own.
const QUERIES: usize = 2;
const LANES: usize = 32;
/// The same where registers are wider and there are more of them.
#[cfg(target_arch = "x86_64")]
const WIDE: (usize, usize) = (4, 64);

/// The sizes of a call.
#[derive(Clone, Copy)]
pub(super) struct Dims {
    pub rows: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub capacity: usize,
    pub len: usize,
    pub scale: f32,
}

impl Dims {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// `out` is `[rows, heads, dim]`.
pub(super) fn attention<T: Element>(q: &[f32], k: &[T], v: &[T], d: Dims) -> Vec<T> {
    let tiles = d.rows.div_ceil(TILE);
    let tasks: Vec<(usize, usize)> = (0..tiles)
        .rev()
        .flat_map(|t| (0..d.kv_heads).map(move |h| (h, t)))
        .collect();
    let run = |&(head, tile): &(usize, usize)| {
        let rows = tile * TILE..((tile + 1) * TILE).min(d.rows);
        let (k, v) = (
            &k[head * d.capacity * d.dim..],
            &v[head * d.capacity * d.dim..],
        );
        (head, rows.start, dispatch(q, k, v, d, head, rows))
    };
    // A short call is not worth waking other threads for.
    let work = d.rows * d.heads * d.dim * d.len;
    let parts: Vec<_> = match work < 1 << 18 {
        true => tasks.iter().map(run).collect(),
        false => tasks.par_iter().map(run).collect(),
    };
    let mut out = vec![T::round(0.0); d.rows * d.heads * d.dim];
    let width = d.group() * d.dim;
    for (head, first, part) in parts {
        for (r, part) in part.chunks_exact(width).enumerate() {
            let at = ((first + r) * d.heads + head * d.group()) * d.dim;
            let out = &mut out[at..at + width];
            out.iter_mut()
                .zip(part)
                .for_each(|(o, p)| *o = T::round(*p));
        }
    }
    out
}

fn dispatch<T: Element>(
    q: &[f32],
    k: &[T],
    v: &[T],
    d: Dims,
    head: usize,
    rows: std::ops::Range<usize>,
) -> Vec<f32> {
    #[cfg(target_arch = "x86_64")]
    if crate::ops::cpu::has_avx512() {
        // SAFETY: the features were just detected.
        return unsafe { tile_avx512(q, k, v, d, head, rows) };
    } else if crate::ops::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { tile_avx2(q, k, v, d, head, rows) };
    }
    tile::<T, QUERIES, LANES>(q, k, v, d, head, rows)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn tile_avx512<T: Element>(
    q: &[f32],
    k: &[T],
    v: &[T],
    d: Dims,
    head: usize,
    rows: std::ops::Range<usize>,
) -> Vec<f32> {
    tile::<T, { WIDE.0 }, { WIDE.1 }>(q, k, v, d, head, rows)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2<T: Element>(
    q: &[f32],
    k: &[T],
    v: &[T],
    d: Dims,
    head: usize,
    rows: std::ops::Range<usize>,
) -> Vec<f32> {
    tile::<T, QUERIES, LANES>(q, k, v, d, head, rows)
}

/// All query heads of one key head for a tile of rows: `[rows, group, dim]`. `Q` queries run together.
#[inline(always)]
fn tile<T: Element, const Q: usize, const W: usize>(
    q: &[f32],
    k: &[T],
    v: &[T],
    d: Dims,
    head: usize,
    rows: std::ops::Range<usize>,
) -> Vec<f32> {
    let group = d.group();
    let count = rows.len() * group;
    let mut out = vec![0f32; count * d.dim];
    let mut state = vec![(f32::NEG_INFINITY, 0f32); count];
    let mut keys = vec![0f32; d.dim * BLOCK];
    let mut values = vec![0f32; d.dim * BLOCK];
    let row = |i: usize| rows.start + i / group;
    let query = |i: usize| &q[(row(i) * d.heads + head * group + i % group) * d.dim..][..d.dim];
    let seen = |r: usize| d.len - d.rows + r + 1;
    let mut first = 0;
    while first < seen(rows.end - 1) {
        let filled = BLOCK.min(d.len - first);
        transpose(&k[first * d.dim..], d.dim, filled, &mut keys);
        let block = &v[first * d.dim..(first + filled) * d.dim];
        values.iter_mut().zip(block).for_each(|(o, e)| *o = e.f32());
        let visible = |i: usize| seen(row(i)).saturating_sub(first).min(BLOCK);
        let mut i = (0..count).find(|i| visible(*i) > 0).unwrap_or(count);
        while i + Q <= count {
            let mut p = scores::<Q, W>(std::array::from_fn(|j| query(i + j)), &keys, d.scale);
            let mut shrink = [0f32; Q];
            for j in 0..Q {
                shrink[j] = softmax_step(&mut p[j], visible(i + j), &mut state[i + j]);
            }
            let outs = &mut out[i * d.dim..(i + Q) * d.dim];
            if visible(i) == visible(i + Q - 1) {
                accumulate::<Q, W>(outs, d.dim, &p, visible(i), &values, &shrink);
            } else {
                for (j, out) in outs.chunks_exact_mut(d.dim).enumerate() {
                    let (p, shrink) = ([p[j]], [shrink[j]]);
                    accumulate::<1, W>(out, d.dim, &p, visible(i + j), &values, &shrink);
                }
            }
            i += Q;
        }
        for i in i..count {
            let mut p = scores::<1, W>([query(i)], &keys, d.scale);
            let shrink = [softmax_step(&mut p[0], visible(i), &mut state[i])];
            let out = &mut out[i * d.dim..][..d.dim];
            accumulate::<1, W>(out, d.dim, &p, visible(i), &values, &shrink);
        }
        first += BLOCK;
    }
    for (out, (_, sum)) in out.chunks_exact_mut(d.dim).zip(&state) {
        let inverse = 1.0 / sum;
        out.iter_mut().for_each(|o| *o *= inverse);
    }
    out
}

/// Turns a block's scores into weights relative to the running maximum; the result is what older sums shrink by.
#[inline(always)]
fn softmax_step(p: &mut [f32; BLOCK], visible: usize, state: &mut (f32, f32)) -> f32 {
    p[visible..].fill(f32::NEG_INFINITY);
    let (max, sum) = *state;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut tops = [max; 8];
    for p in p.chunks_exact(8) {
        tops.iter_mut()
            .zip(p)
            .for_each(|(t, p)| *t = larger(*t, *p));
    }
    let top = tops.into_iter().fold(max, larger);
    for p in p.iter_mut() {
        *p = exp(*p - top);
    }
    p[visible..].fill(0.0);
    let shrink = if max == top { 1.0 } else { exp(max - top) };
    let mut lanes = [0f32; 8];
    for p in p.chunks_exact(8) {
        lanes.iter_mut().zip(p).for_each(|(l, p)| *l += p);
    }
    let added = lanes.iter().sum::<f32>();
    *state = (top, sum.mul_add(shrink, added));
    shrink
}

/// `[BLOCK, dim]` to `[dim, BLOCK]`; slots past `filled` hold zeros.
#[inline(always)]
fn transpose<T: Element>(k: &[T], dim: usize, filled: usize, out: &mut [f32]) {
    for (i, lanes) in out.chunks_exact_mut(BLOCK).enumerate() {
        for (s, lane) in lanes.iter_mut().enumerate() {
            *lane = if s < filled {
                k[s * dim + i].f32()
            } else {
                0.0
            };
        }
    }
}

/// Scaled products of queries with a transposed block, summed over the head's lanes in order.
#[inline(always)]
fn scores<const Q: usize, const W: usize>(
    q: [&[f32]; Q],
    keys: &[f32],
    scale: f32,
) -> [[f32; BLOCK]; Q] {
    let dim = q[0].len();
    let q = q.map(|q| &q[..dim]);
    let mut out = [[0f32; BLOCK]; Q];
    for at in (0..BLOCK).step_by(W) {
        let mut s = [[0f32; W]; Q];
        for (i, keys) in keys.chunks_exact(BLOCK).enumerate().take(dim) {
            let keys = &keys[at..at + W];
            for (s, q) in s.iter_mut().zip(&q) {
                let q = q[i];
                s.iter_mut()
                    .zip(keys)
                    .for_each(|(s, k)| *s = q.mul_add(*k, *s));
            }
        }
        for (out, s) in out.iter_mut().zip(&s) {
            let out = out[at..at + W].iter_mut();
            out.zip(s).for_each(|(o, s)| *o = s * scale);
        }
    }
    out
}

/// `out = out * shrink + Σ p[s] * values[s]` over the first `visible` slots, in order of slots, for `Q` queries of `dim`
/// lanes each.
#[inline(always)]
fn accumulate<const Q: usize, const W: usize>(
    out: &mut [f32],
    dim: usize,
    p: &[[f32; BLOCK]; Q],
    visible: usize,
    values: &[f32],
    shrink: &[f32; Q],
) {
    let p: [&[f32]; Q] = std::array::from_fn(|j| &p[j][..visible]);
    let mut at = 0;
    while at + W <= dim {
        let mut sums = [[0f32; W]; Q];
        for (s, v) in values.chunks_exact(dim).enumerate().take(visible) {
            let v = &v[at..at + W];
            for (sum, p) in sums.iter_mut().zip(&p) {
                let p = p[s];
                sum.iter_mut()
                    .zip(v)
                    .for_each(|(a, v)| *a = p.mul_add(*v, *a));
            }
        }
        for (j, sum) in sums.iter().enumerate() {
            let out = &mut out[j * dim + at..][..W];
            out.iter_mut()
                .zip(sum)
                .for_each(|(o, s)| *o = o.mul_add(shrink[j], *s));
        }
        at += W;
    }
    for i in at..dim {
        for (j, p) in p.iter().enumerate() {
            let add = |a: f32, s: usize| p[s].mul_add(values[s * dim + i], a);
            let sum = (0..visible).fold(0.0, add);
            let out = &mut out[j * dim + i];
            *out = out.mul_add(shrink[j], sum);
        }
    }
}

/// Softmax over all `len` slots: `[heads, rows, len]`.
pub(super) fn probabilities<T: Element>(q: &[f32], k: &[T], d: Dims) -> Vec<f32> {
    let mut out = vec![0f32; d.heads * d.rows * d.len];
    let per_head = d.group() * d.rows * d.len;
    let blocks = d.len.div_ceil(BLOCK);
    for (head, out) in out.chunks_exact_mut(per_head.max(1)).enumerate() {
        let k = &k[head * d.capacity * d.dim..];
        let scored: Vec<Vec<f32>> = (0..blocks)
            .into_par_iter()
            .map(|b| score_dispatch(q, k, d, head, b))
            .collect();
        for (b, scored) in scored.iter().enumerate() {
            let filled = BLOCK.min(d.len - b * BLOCK);
            for (i, s) in scored.chunks_exact(BLOCK).enumerate() {
                out[i * d.len + b * BLOCK..][..filled].copy_from_slice(&s[..filled]);
            }
        }
        out.par_chunks_exact_mut(d.len).for_each(softmax_dispatch);
    }
    out
}

fn score_dispatch<T: Element>(q: &[f32], k: &[T], d: Dims, head: usize, b: usize) -> Vec<f32> {
    #[cfg(target_arch = "x86_64")]
    if crate::ops::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { score_avx2(q, k, d, head, b) };
    }
    score(q, k, d, head, b)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn score_avx2<T: Element>(q: &[f32], k: &[T], d: Dims, head: usize, b: usize) -> Vec<f32> {
    score(q, k, d, head, b)
}

/// Scores of one block for all queries of a key head: `[group, rows, BLOCK]`.
#[inline(always)]
fn score<T: Element>(q: &[f32], k: &[T], d: Dims, head: usize, b: usize) -> Vec<f32> {
    let group = d.group();
    let mut keys = vec![0f32; d.dim * BLOCK];
    let filled = BLOCK.min(d.len - b * BLOCK);
    transpose(&k[b * BLOCK * d.dim..], d.dim, filled, &mut keys);
    let mut out = Vec::with_capacity(group * d.rows * BLOCK);
    for g in 0..group {
        for r in 0..d.rows {
            let q = &q[(r * d.heads + head * group + g) * d.dim..][..d.dim];
            out.extend_from_slice(&scores::<1, BLOCK>([q], &keys, d.scale)[0]);
        }
    }
    out
}

fn softmax_dispatch(s: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if crate::ops::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { softmax_avx2(s) };
    }
    softmax(s)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn softmax_avx2(s: &mut [f32]) {
    softmax(s)
}

#[inline(always)]
fn softmax(s: &mut [f32]) {
    let top = s
        .iter()
        .fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
    let mut lanes = [0f32; 8];
    for chunk in s.chunks_mut(8) {
        for (l, s) in lanes.iter_mut().zip(chunk) {
            *s = exp(*s - top);
            *l += *s;
        }
    }
    let inverse = 1.0 / lanes.iter().sum::<f32>();
    s.iter_mut().for_each(|s| *s *= inverse);
}
