//! The same for Metal. A weight has one form whatever the number of rows is, decoding included: forms differ in their last bits.
//!
//! | rows | affine weights | plain weights |
//! |---|---|---|
//! | decoding and verify passes, drafts of up to 7 tokens | lanes (`affine_matmul.metal`) | lanes (`dense_matmul.metal`) |
//! | the same, for passes of more than 8 rows | matrix (`affine_matrix.metal`), where it fits; else lanes | lanes |
//! | prompts of more than 16 rows | `matmul_prefill.metal` | `matmul_prefill.metal` |
//!
//! An NVIDIA H200 took for 4096 x 4096 (4 bits, groups of 64, bf16, weights from memory) 8, 10 and 13 us with lanes for 1, 2 and 4 rows,
//! and 24 us with the matrix form for 1 to 8 rows, 30 us for 16: an earlier build of this form, not timed again since (`tests/metal-gpu`
//! does it). More rows go in tiles of 4. Nothing was measured on Apple hardware. By estimate
//! from public figures (issue slots per 4-bit code: lanes 4.5 for 1 row and 9 for 4, matrix 10.6 for any number up to 8):
//!
//! - M1 and M2 (7.5 to 10 slots a code at full bandwidth on the Max, 10.8 on an M1): lanes. Decoding runs at the bandwidth, c(4) is 1.0 to
//!   1.2, c(8) up to 2.4. The matrix form would make c(8) 1.4 of lanes' c(1), but every token decoded alone would cost 1.4 as well, so it
//!   pays only where most passes are wide: it is left to passes of more than 8 rows. These GPUs run 8x8 matrices on the same ALUs.
//! - M3 and M4 (8 to 10 slots; registers and threadgroup memory are a cache, so occupancy depends less on their number): the same.
//! - M5 (matrix units beside the ALUs, reached through tensor ops that these kernels do not use): the same kernels run; nobody knows yet
//!   where the matrix form overtakes. `bench matmul` measures it.

use candle_core::DType;

use crate::affine::AffineFormat;

/// How the rows of a weight are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Lanes split K; `split` simdgroups share columns.
    Lanes {
        /// 1, 2 or 4.
        split: usize,
    },
    /// 8x8 simdgroup matrices.
    Matrix,
}

/// A weight and what it is multiplied by; not how many rows.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Columns of the output.
    pub n: usize,
    /// Columns of `x`.
    pub k: usize,
    /// `None` for a plain weight.
    pub format: Option<AffineFormat>,
    /// `x`'s dtype.
    pub dtype: DType,
    /// Rows of the widest verify pass.
    pub verify_rows: usize,
}

/// Rows of a verify pass up to which lanes are the faster form: two tiles of theirs.
const LANES_UP_TO: usize = 8;
/// Simdgroups that fill an M1 Max or smaller: 32 cores of 32.
const SIMDGROUPS: usize = 1024;
/// k that a simdgroup covers in a step.
const BLOCK: usize = 1024;

/// Whether the matrix kernel takes such weights: 128 + code must be exact in `x`'s dtype, and a group fill its 64 k.
fn fits_matrix(shape: Shape) -> bool {
    let format = shape
        .format
        .is_some_and(|f| f.bits <= 6 && f.group_size >= 64);
    format && matches!(shape.dtype, DType::F16 | DType::BF16)
}

/// Chooses by the weight and the request's widest pass; never by a call's rows.
pub fn choose(shape: Shape) -> Form {
    if shape.verify_rows > LANES_UP_TO && fits_matrix(shape) {
        return Form::Matrix;
    }
    let (mut split, blocks) = (1, shape.k.div_ceil(BLOCK));
    while split < 4 && shape.n.div_ceil(4) * split < SIMDGROUPS && 2 * split <= blocks {
        split *= 2;
    }
    Form::Lanes { split }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(n: usize, k: usize) -> Shape {
        Shape {
            n,
            k,
            format: AffineFormat::new(4, 64).ok(),
            dtype: DType::BF16,
            verify_rows: 4,
        }
    }

    #[test]
    fn narrow_and_long_weights_are_split() {
        let split = |n, k| choose(shape(n, k));
        assert_eq!(split(17408, 5120), Form::Lanes { split: 1 });
        assert_eq!(split(248_320, 1024), Form::Lanes { split: 1 });
        assert_eq!(split(1024, 3584), Form::Lanes { split: 4 });
        assert_eq!(split(1024, 4096), Form::Lanes { split: 4 });
        assert_eq!(split(2048, 2048), Form::Lanes { split: 2 });
        assert_eq!(split(256, 1024), Form::Lanes { split: 1 });
    }

    #[test]
    fn wide_passes_take_matrices_where_codes_are_exact() {
        let wide = Shape {
            verify_rows: 9,
            ..shape(4096, 4096)
        };
        assert_eq!(choose(wide), Form::Matrix);
        let seven_drafts = Shape {
            verify_rows: 8,
            ..wide
        };
        assert_eq!(choose(seven_drafts), Form::Lanes { split: 1 });
        let lanes = |format, dtype| {
            matches!(
                choose(Shape {
                    format,
                    dtype,
                    ..wide
                }),
                Form::Lanes { .. }
            )
        };
        assert!(lanes(AffineFormat::new(8, 64).ok(), DType::BF16));
        assert!(lanes(AffineFormat::new(4, 32).ok(), DType::BF16));
        assert!(lanes(AffineFormat::new(4, 64).ok(), DType::F32));
        assert!(lanes(None, DType::F16));
    }
}
