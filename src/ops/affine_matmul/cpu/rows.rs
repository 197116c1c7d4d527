//! Activation rows as fixed point: per group a power-of-two step and integers.
//!
//! bf16 and f16 rows take one 16-bit limb (the group's largest magnitude lies in 2^14 … 2^15), f32 rows two
//! (`high * 256 + low`, largest in 2^21 … 2^22).

use rayon::prelude::*;

use crate::ops::cpu::Element;

pub(crate) struct FixedRows {
    pub k: usize,
    pub group: usize,
    pub wide: bool,
    pub high: Vec<i16>,
    pub low: Vec<i16>,
    /// Per row and group.
    pub steps: Vec<f32>,
    /// Per row and group: the sum of the row's fixed-point values.
    pub sums: Vec<f32>,
    /// Per row: whether every value is finite. Other rows are not in fixed point.
    pub finite: Vec<bool>,
}

impl FixedRows {
    pub fn new<T: Element>(x: &[T], k: usize, group: usize, wide: bool) -> Self {
        let (rows, groups) = (x.len() / k, k / group);
        let mut out = Self {
            k,
            group,
            wide,
            high: vec![0; rows * k],
            low: vec![0; if wide { rows * k } else { 0 }],
            steps: vec![0.0; rows * groups],
            sums: vec![0.0; rows * groups],
            finite: vec![true; rows],
        };
        let mut no_low: Vec<[i16; 0]> = vec![[]; if wide { 0 } else { rows }];
        let lows: Vec<&mut [i16]> = match wide {
            true => out.low.chunks_exact_mut(k).collect(),
            false => no_low.iter_mut().map(|l| &mut l[..]).collect(),
        };
        let parts = out
            .high
            .chunks_exact_mut(k)
            .zip(lows)
            .zip(out.steps.chunks_exact_mut(groups))
            .zip(out.sums.chunks_exact_mut(groups))
            .zip(out.finite.iter_mut())
            .zip(x.chunks_exact(k));
        let run =
            |(((((high, low), steps), sums), finite), x): (((((_, _), _), _), &mut bool), &[T])| {
                *finite = dispatch(x, group, wide, high, low, steps, sums);
            };
        if rows < 16 {
            parts.for_each(run);
        } else {
            parts.collect::<Vec<_>>().into_par_iter().for_each(run);
        }
        out
    }

    pub fn rows(&self) -> usize {
        self.finite.len()
    }
}

fn dispatch<T: Element>(
    x: &[T],
    group: usize,
    wide: bool,
    high: &mut [i16],
    low: &mut [i16],
    steps: &mut [f32],
    sums: &mut [f32],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if crate::ops::cpu::has_avx2() {
        // SAFETY: the features were just detected.
        return unsafe { row_avx2(x, group, wide, high, low, steps, sums) };
    }
    row(x, group, wide, high, low, steps, sums)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn row_avx2<T: Element>(
    x: &[T],
    group: usize,
    wide: bool,
    high: &mut [i16],
    low: &mut [i16],
    steps: &mut [f32],
    sums: &mut [f32],
) -> bool {
    row(x, group, wide, high, low, steps, sums)
}

/// Adding it rounds an f32 of magnitude below 2^22 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

#[inline(always)]
fn row<T: Element>(
    x: &[T],
    group: usize,
    wide: bool,
    high: &mut [i16],
    low: &mut [i16],
    steps: &mut [f32],
    sums: &mut [f32],
) -> bool {
    let mut values = [0f32; 128];
    let values = &mut values[..group];
    for (g, x) in x.chunks_exact(group).enumerate() {
        let mut top = 0u32;
        for (v, x) in values.iter_mut().zip(x) {
            *v = x.f32();
            top = top.max(v.to_bits() & 0x7fff_ffff);
        }
        if top >= 0x7f80_0000 {
            return false;
        }
        // The exponent e of top = m * 2^e with m in 1 … 2, kept where both powers below are normal numbers.
        let e = (top >> 23) as i32 - 127;
        let bits = if wide { 21 } else { 14 };
        let shift = (bits - e).min(126);
        let power = |p: i32| f32::from_bits(((p + 127) as u32) << 23);
        let up = power(shift);
        let mut sum = 0i32;
        let high = &mut high[g * group..][..group];
        if wide {
            let low = &mut low[g * group..][..group];
            for ((v, h), l) in values.iter().zip(high).zip(low) {
                let q = ((v * up + ROUND) - ROUND) as i32;
                *h = ((q + 128) >> 8) as i16;
                *l = (q - ((q + 128) >> 8 << 8)) as i16;
                sum += q;
            }
        } else {
            for (v, h) in values.iter().zip(high) {
                let q = (((v * up + ROUND) - ROUND) as i32).min(32767);
                *h = q.max(-32767) as i16;
                sum += q.max(-32767);
            }
        }
        steps[g] = power(-shift);
        sums[g] = sum as f32 * steps[g];
    }
    true
}
