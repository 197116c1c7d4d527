//! What the CPU paths share: element types, slices of tensors, and the instruction set to run on.

use candle_core::{CpuStorage, Device, Layout, Storage, Tensor, WithDType};
use half::{bf16, f16};

use crate::error::{Error, Result};

/// An activation's element. Arithmetic is f32, rounded once on the way back.
pub(crate) trait Element: WithDType + Copy + Send + Sync {
    fn f32(self) -> f32;
    fn round(v: f32) -> Self;
}

impl Element for f32 {
    fn f32(self) -> f32 {
        self
    }
    fn round(v: f32) -> Self {
        v
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn round(v: f32) -> Self {
        if v.is_nan() {
            return bf16::from_f32(v);
        }
        let bits = v.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        bf16::from_bits((rounded >> 16) as u16)
    }
}

impl Element for f16 {
    fn f32(self) -> f32 {
        self.to_f32()
    }
    fn round(v: f32) -> Self {
        f16::from_f32(v)
    }
}

/// Calls `$run::<T>(…)` with `T` the element type of `$dtype`, which was checked to be one of the three.
macro_rules! for_element {
    ($dtype:expr, $run:ident ( $($arg:expr),* $(,)? )) => {
        match $dtype {
            candle_core::DType::BF16 => $run::<half::bf16>($($arg),*),
            candle_core::DType::F16 => $run::<half::f16>($($arg),*),
            _ => $run::<f32>($($arg),*),
        }
    };
}
pub(crate) use for_element;

/// Runs `f` on the elements of a CPU tensor in order, without a copy where the tensor is contiguous.
pub(crate) fn with_slice<T: WithDType, R>(
    op: &'static str,
    x: &Tensor,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    if !matches!(x.device(), Device::Cpu) {
        return Err(Error::argument(
            op,
            "only CPU tensors are supported by this build",
        ));
    }
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::argument(op, "a CPU tensor without CPU storage"));
    };
    let start = layout.start_offset();
    let end = start + layout.shape().elem_count();
    // An empty tensor's offset may lie past its storage.
    f(slice::<T>(storage)?.get(start..end).unwrap_or(&[]))
}

/// The elements of a contiguous tensor, as a custom op gets it.
pub(crate) fn contiguous<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> candle_core::Result<&'a [T]> {
    let Some((from, to)) = layout.contiguous_offsets() else {
        candle_core::bail!("a strided tensor reached a kernel for contiguous ones");
    };
    // An empty tensor's offset may lie past its storage.
    Ok(storage.as_slice::<T>()?.get(from..to).unwrap_or(&[]))
}

fn slice<T: WithDType>(storage: &CpuStorage) -> Result<&[T]> {
    Ok(storage.as_slice::<T>()?)
}

/// The elements as f32.
pub(crate) fn to_f32<T: Element>(op: &'static str, x: &Tensor) -> Result<Vec<f32>> {
    with_slice::<T, _>(op, x, |v| Ok(v.iter().map(|e| e.f32()).collect()))
}

/// Whether AVX2 and FMA are there. The portable code does the same operations in the same order, so the bits agree.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Whether the AVX-512 features are there that float code is compiled for.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("fma")
}

/// `e^x` to 2 ulp for `x` in -87…88; below it is 0 to within 1e-38, NaN stays NaN. Straight-line code that vectorises.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = r.mul_add(1.987_569_1e-4, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    // The integer stands in the low bits of `shifted`: a conversion would have to saturate, which does not vectorise everywhere.
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    p * f32::from_bits(power.wrapping_add(127) << 23)
}

#[cfg(test)]
mod tests {
    #[test]
    fn exp_is_accurate() {
        for i in -87_000..88_000 {
            let x = i as f32 / 1000.0 + 0.000_37;
            let want = (x as f64).exp();
            let got = super::exp(x.min(88.0)) as f64;
            let want = if x > 88.0 { 88f64.exp() } else { want };
            assert!((got / want - 1.0).abs() < 2.4e-7, "{x}: {got} {want}");
        }
        assert_eq!(super::exp(0.0), 1.0);
        assert!(super::exp(f32::NAN).is_nan());
        assert!(super::exp(f32::NEG_INFINITY) < 2e-38);
    }
}
