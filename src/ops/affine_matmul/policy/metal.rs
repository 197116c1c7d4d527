//! The same for Metal. A weight has one form whatever the number of rows is, decoding included: forms differ in their last bits.
//!
//! Estimates from public figures, no measurement on Apple hardware. Issue slots per 4-bit code: lanes 4.5, 9 and 12.5 for 1, 4 and 8 rows
//! (L1 may make 8 rows dearer); matrix 10.6 for any number up to 8. At full bandwidth an M1 Max has 7.5 of them, M2 Max, M3 Max and M4 8 to 10,
//! M1 10.8. So on M1 to M4 drafts of up to 3 tokens (4 rows) take lanes: c(4) is 1.0 to 1.2, and decoding runs at the bandwidth. Longer drafts
//! take the matrix form: c(8) is 1.0 of itself, and decoding costs up to 1.4 times as much on an M1 Max, nothing extra on an M1. On M5
//! (matrix units beside the ALUs) both hold until somebody measures.

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

/// Up to so many rows a row has the bits that it has alone; more take the prefill kernel.
pub const DECODE_ROWS: usize = 16;

/// Rows of a verify pass up to which lanes are the faster form.
const LANES_UP_TO: usize = 4;
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
            verify_rows: 8,
            ..shape(4096, 4096)
        };
        assert_eq!(choose(wide), Form::Matrix);
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
