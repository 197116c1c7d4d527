//! The same for Metal. A weight has one form whatever the number of rows is, decoding included: forms differ in their last bits.

/// How the rows of a weight are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Lanes split K; `split` simdgroups share columns.
    Lanes {
        /// 1, 2 or 4.
        split: usize,
    },
}

/// Up to so many rows a row has the bits that it has alone; more take the prefill kernel.
pub const DECODE_ROWS: usize = 16;

/// Simdgroups that fill an M1 Max or smaller: 32 cores of 32.
const SIMDGROUPS: usize = 1024;
/// k that a simdgroup covers in a step.
const BLOCK: usize = 1024;

/// Chooses by the weight alone.
pub fn choose(n: usize, k: usize) -> Form {
    let (mut split, blocks) = (1, k.div_ceil(BLOCK));
    while split < 4 && n.div_ceil(4) * split < SIMDGROUPS && 2 * split <= blocks {
        split *= 2;
    }
    Form::Lanes { split }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_and_long_weights_are_split() {
        let split = |n, k| match choose(n, k) {
            Form::Lanes { split } => split,
        };
        assert_eq!(split(17408, 5120), 1);
        assert_eq!(split(248_320, 1024), 1);
        assert_eq!(split(1024, 3584), 4);
        assert_eq!(split(2048, 2048), 2);
        assert_eq!(split(256, 1024), 1);
    }
}
