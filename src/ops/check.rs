//! Checks that every op makes on its input.

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// The dtype of activations: f32, bf16 or f16.
pub(crate) fn activation(op: &'static str, name: &'static str, x: &Tensor) -> Result<DType> {
    match x.dtype() {
        d @ (DType::F32 | DType::BF16 | DType::F16) => Ok(d),
        found => Err(Error::DType {
            op,
            name,
            found,
            expected: "f32, bf16 or f16".into(),
        }),
    }
}

/// `x` must have exactly this dtype.
pub(crate) fn dtype(
    op: &'static str,
    name: &'static str,
    x: &Tensor,
    expected: DType,
) -> Result<()> {
    if x.dtype() == expected {
        return Ok(());
    }
    Err(Error::DType {
        op,
        name,
        found: x.dtype(),
        expected: expected.as_str().into(),
    })
}

/// `x` must have this shape; `None` is any size.
pub(crate) fn shape(
    op: &'static str,
    name: &'static str,
    x: &Tensor,
    expected: &[Option<usize>],
) -> Result<()> {
    let fits = x.rank() == expected.len()
        && x.dims()
            .iter()
            .zip(expected)
            .all(|(d, e)| e.is_none_or(|e| e == *d));
    if fits {
        return Ok(());
    }
    let dims: Vec<String> = expected
        .iter()
        .map(|e| e.map_or("_".to_string(), |e| e.to_string()))
        .collect();
    Err(Error::Shape {
        op,
        name,
        found: x.dims().to_vec(),
        expected: format!("[{}]", dims.join(", ")),
    })
}
