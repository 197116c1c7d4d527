//! How a tensor lies in memory, for the kernels that read it.

use candle_core::{DType, Layout, Tensor};

use crate::error::{Error, Result};

/// A tensor that a plan reads: dtype, sizes, and strides and offset in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Its dtype.
    pub dtype: DType,
    /// Its sizes.
    pub dims: Vec<usize>,
    /// Elements between neighbours, per dimension.
    pub strides: Vec<usize>,
    /// Elements before the first.
    pub offset: usize,
}

impl Operand {
    /// An error if the tensor reaches past 2^32 elements: kernels count in 32 bits.
    pub fn new(op: &'static str, dtype: DType, layout: &Layout) -> Result<Self> {
        let (dims, strides) = (layout.dims().to_vec(), layout.stride().to_vec());
        let reach = dims
            .iter()
            .zip(&strides)
            .map(|(d, s)| d.saturating_sub(1).saturating_mul(*s));
        if reach.fold(0usize, usize::saturating_add) > u32::MAX as usize {
            return Err(Error::argument(
                op,
                format!("a tensor of shape {dims:?} reaches past 2^32 elements; split it"),
            ));
        }
        Ok(Self {
            dtype,
            dims,
            strides,
            offset: layout.start_offset(),
        })
    }

    pub(crate) fn of(op: &'static str, x: &Tensor) -> Result<Self> {
        Self::new(op, x.dtype(), x.layout())
    }

    pub(crate) fn offset_bytes(&self) -> usize {
        self.offset * self.dtype.size_in_bytes()
    }

    /// Whether elements lie in order without gaps.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut next = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(d, s)| {
            let fits = *d == 1 || *s == next;
            next *= d;
            fits
        })
    }

    /// Whether loads of `bytes` at the first element are aligned.
    pub(crate) fn aligned(&self, bytes: usize) -> bool {
        self.offset_bytes().is_multiple_of(bytes)
    }
}

/// An operand as rows whose columns lie side by side: row `(o, i)` starts at `o * outer_stride + i * inner_stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowView {
    pub(crate) outer: usize,
    pub(crate) inner: usize,
    pub(crate) width: usize,
    pub(crate) outer_stride: usize,
    pub(crate) inner_stride: usize,
}

impl RowView {
    pub(crate) fn count(&self) -> usize {
        self.outer * self.inner
    }

    /// The same rows with that many inner ones, if the strides allow it.
    fn with_inner(self, inner: usize) -> Option<Self> {
        if self.inner == inner {
            return Some(self);
        }
        let even = self.inner == 1 && inner > 0 && self.outer.is_multiple_of(inner);
        even.then(|| Self {
            outer: self.outer / inner,
            inner,
            outer_stride: self.outer_stride * inner,
            inner_stride: self.outer_stride,
            ..self
        })
    }
}

impl Operand {
    /// All dimensions but the last, merged into at most two.
    fn rows(&self) -> Option<RowView> {
        let last = self.dims.len().checked_sub(1)?;
        if self.strides[last] != 1 && self.dims[last] > 1 {
            return None;
        }
        let mut merged: Vec<(usize, usize)> = vec![];
        for (dim, stride) in self.dims[..last].iter().zip(&self.strides) {
            match merged.last_mut() {
                _ if *dim == 1 => {}
                Some(before) if before.1 == dim * stride => *before = (before.0 * dim, *stride),
                _ => merged.push((*dim, *stride)),
            }
        }
        let width = self.dims[last];
        let view = |(outer, outer_stride), (inner, inner_stride)| RowView {
            outer,
            inner,
            width,
            outer_stride,
            inner_stride,
        };
        match merged[..] {
            [] => Some(view((1, 0), (1, 0))),
            [rows] => Some(view(rows, (1, 0))),
            [outer, inner] => Some(view(outer, inner)),
            _ => None,
        }
    }

    /// Two operands of one shape as rows numbered alike; `None` where strides do not allow it.
    pub(crate) fn common_rows(a: &Self, b: &Self) -> Option<(RowView, RowView)> {
        let (a, b) = (a.rows()?, b.rows()?);
        let inner = a.inner.max(b.inner);
        Some((a.with_inner(inner)?, b.with_inner(inner)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_know_their_layout() {
        let x = Tensor::zeros((4, 6), DType::F16, &candle_core::Device::Cpu).unwrap();
        let row = Operand::of("t", &x.narrow(0, 1, 2).unwrap()).unwrap();
        assert!(row.is_contiguous() && row.offset_bytes() == 12 && !row.aligned(8));
        let column = Operand::of("t", &x.narrow(1, 1, 2).unwrap()).unwrap();
        assert!(!column.is_contiguous() && column.strides == [6, 1]);
    }

    #[test]
    fn rows_are_merged_where_strides_allow() {
        let x = Tensor::zeros((4, 3, 5), DType::F32, &candle_core::Device::Cpu).unwrap();
        let of = |x: &Tensor| Operand::of("t", x).unwrap();
        let whole = of(&x).rows().unwrap();
        assert_eq!((whole.outer, whole.inner, whole.outer_stride), (12, 1, 5));
        let two = of(&x.narrow(1, 1, 2).unwrap());
        let view = two.rows().unwrap();
        assert_eq!((view.outer, view.inner), (4, 2));
        assert_eq!((view.outer_stride, view.inner_stride), (15, 5));
        let other = Tensor::zeros((4, 2, 5), DType::F32, &candle_core::Device::Cpu).unwrap();
        let (a, b) = Operand::common_rows(&of(&other), &two).unwrap();
        assert_eq!(
            (a.outer, a.inner, a.outer_stride, a.inner_stride),
            (4, 2, 10, 5)
        );
        assert_eq!(b, view);
        assert!(of(&x.transpose(1, 2).unwrap()).rows().is_none());
    }
}
