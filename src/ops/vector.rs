//! Run-time dispatch of CPU kernels to AVX-512 or AVX2 + FMA, and f32 functions that vectorise inside them.
//!
//! A kernel is written once, in plain Rust with `mul_add`; compiled with them it is fast, compiled without it
//! calls the C library's `fmaf`. Both give the same bits, because Rust never reorders floating-point operations.

use super::cpu::exp;

/// A kernel that [`run`] compiles for the machine's best instruction set. Mark `call` `#[inline(always)]`.
pub(crate) trait Kernel {
    /// Runs it.
    fn call(self);
}

/// Runs a kernel with AVX-512 or AVX2 + FMA where the machine has them.
#[inline]
pub(crate) fn run<K: Kernel>(kernel: K) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            // SAFETY: the features were just detected.
            return unsafe { run_avx512(kernel) };
        }
        if super::cpu::has_avx2() {
            // SAFETY: both features were just detected.
            return unsafe { run_avx2(kernel) };
        }
    }
    kernel.call()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
unsafe fn run_avx512<K: Kernel>(kernel: K) {
    kernel.call()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    kernel.call()
}

/// The logistic function.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `sum a[i] * b[i]` over 16 lanes and then as a tree: the order depends on the length only.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    let (a16, b16) = (a.chunks_exact(16), b.chunks_exact(16));
    for (i, (x, y)) in a16.remainder().iter().zip(b16.remainder()).enumerate() {
        lanes[i] = x * y;
    }
    for (x, y) in a16.zip(b16) {
        for i in 0..16 {
            lanes[i] = x[i].mul_add(y[i], lanes[i]);
        }
    }
    sum16(lanes)
}

/// The sum of 16 lanes, as a tree.
#[inline(always)]
pub(crate) fn sum16(mut lanes: [f32; 16]) -> f32 {
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
