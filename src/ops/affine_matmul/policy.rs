//! Which kernel a call takes: pure code, one table.

pub mod metal;

use std::sync::OnceLock;

use candle_core::DType;

use crate::affine::AffineFormat;

/// An instruction set. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AArch64 with NEON.
    Neon,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// AVX2 and AVX-VNNI.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW and VNNI.
    Avx512,
}

impl Isa {
    /// The instruction sets that this machine runs, best first.
    pub fn available() -> &'static [Isa] {
        static AVAILABLE: OnceLock<Vec<Isa>> = OnceLock::new();
        AVAILABLE.get_or_init(Self::detect)
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Vec<Isa> {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni");
        let vnni = avx2 && is_x86_feature_detected!("avxvnni");
        let sets = [
            (avx512, Isa::Avx512),
            (vnni, Isa::AvxVnni),
            (avx2, Isa::Avx2),
            (true, Isa::Portable),
        ];
        sets.into_iter().filter(|s| s.0).map(|s| s.1).collect()
    }

    #[cfg(target_arch = "aarch64")]
    fn detect() -> Vec<Isa> {
        vec![Isa::Neon, Isa::Portable]
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn detect() -> Vec<Isa> {
        vec![Isa::Portable]
    }

    /// The best that this machine runs.
    pub fn best() -> Isa {
        Self::available()[0]
    }
}

/// The shape of a call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Whether the tensors are in the CPU's memory.
    pub cpu: bool,
    /// Rows of `x`.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Columns of `x`.
    pub k: usize,
    /// `None` for a plain weight.
    pub format: Option<AffineFormat>,
    /// `x`'s dtype.
    pub dtype: DType,
}

/// What runs a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The route's name.
    pub name: &'static str,
    /// Limbs of the activations: 1 is 16 bits, 2 is 24; 0 for plain weights.
    pub limbs: usize,
    /// Whether the columns are split over threads.
    pub threaded: bool,
    /// Why this is not the fast path, if so.
    pub fallback: Option<&'static str>,
}

/// Multiplications below which waking threads costs more than it gains.
const THREADED_FROM: usize = 1 << 17;

/// Chooses the kernel; every call has one.
pub fn choose(call: Call, isa: Isa) -> Kernel {
    let threaded = call.m.saturating_mul(call.n).saturating_mul(call.k) >= THREADED_FROM;
    if !call.cpu {
        return Kernel {
            name: "reference",
            limbs: 0,
            threaded: false,
            fallback: Some("no kernel for this device"),
        };
    }
    let limbs = match (call.format, call.dtype) {
        (None, _) => 0,
        (Some(_), DType::F32) => 2,
        (Some(_), _) => 1,
    };
    let name = match (isa, limbs) {
        (Isa::Avx512, 0) => "dense_avx512",
        (Isa::Avx512, 1) => "fixed16_avx512",
        (Isa::Avx512, _) => "fixed24_avx512",
        (Isa::AvxVnni | Isa::Avx2, 0) => "dense_avx2",
        (Isa::AvxVnni, 1) => "fixed16_avxvnni",
        (Isa::AvxVnni, _) => "fixed24_avxvnni",
        (Isa::Avx2, 1) => "fixed16_avx2",
        (Isa::Avx2, _) => "fixed24_avx2",
        (Isa::Neon, 0) => "dense_neon",
        (Isa::Neon, 1) => "fixed16_neon",
        (Isa::Neon, _) => "fixed24_neon",
        (Isa::Portable, 0) => "dense_portable",
        (Isa::Portable, 1) => "fixed16_portable",
        (Isa::Portable, _) => "fixed24_portable",
    };
    Kernel {
        name,
        limbs,
        threaded,
        fallback: None,
    }
}
