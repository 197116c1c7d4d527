//! Rows that come as embeddings with positions on three axes: the way in for an application's own vision tower.

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::ops::gated_delta::Keep;
use crate::ops::Context;

use super::cache::Cache;
use super::model::{Model, Wanted};

/// One sequence's rows of a pass whose input is embeddings.
pub struct EmbeddingRows<'a> {
    /// The sequence's cache.
    pub cache: &'a mut Cache,
    /// `[rows, hidden]` in the model's dtype: what the vision tower gave, and [`Model::embeddings`] of text tokens.
    pub embeddings: &'a Tensor,
    /// A position per row on each axis: time, height, width. Text has three times the same.
    pub positions: &'a [[u32; 3]],
    /// Whether the rows are committed at once or stay pending.
    pub keep: Keep,
}

/// One sequence's part of a checked pass.
pub(super) struct Packed<'a> {
    pub(super) cache: &'a mut Cache,
    pub(super) rows: usize,
    /// Per row the position after which the next row comes, if it is the last one.
    pub(super) ends: &'a [u32],
    pub(super) keep: Keep,
}

impl Model {
    /// Embeddings `[rows, hidden]` of tokens, in the model's dtype.
    pub fn embeddings(&self, tokens: &[u32]) -> Result<Tensor> {
        let vocab = self.config().vocab_size;
        match tokens.iter().find(|id| **id as usize >= vocab) {
            _ if tokens.is_empty() => Err(Error::Prompt("empty: no tokens to embed".into())),
            Some(id) => Err(Error::Prompt(format!(
                "token id {id} is outside the vocabulary of {vocab}"
            ))),
            None => self.embed(&Context::default(), tokens),
        }
    }

    /// [`Model::forward_wanted`] of embeddings, with positions of three axes that rotate the pairs of a head in turn
    /// (`mrope_section`, interleaved). Rows with three equal positions give bitwise what their tokens would. The row after
    /// them stands one past the largest position of any axis, as [`Cache::next_position`] says. The draft head is not
    /// primed: it reads tokens.
    pub fn forward_embeddings(
        &self,
        cx: &Context,
        batch: &mut [EmbeddingRows],
        wanted: Wanted,
    ) -> Result<Option<Tensor>> {
        let depth = self.depth(wanted)?;
        for rows in batch.iter() {
            self.check_embeddings(rows)?;
            rows.cache.ready(&self.config().layer_types, depth)?;
        }
        let ends: Vec<_> = batch.iter().map(ends).collect();
        let axis = |axis: usize| {
            let rows = batch.iter().flat_map(|r| r.positions);
            rows.map(|p| p[axis]).collect::<Vec<u32>>()
        };
        let axes = [axis(0), axis(1), axis(2)];
        let positions = match axes[0] == axes[1] && axes[0] == axes[2] {
            true => Tensor::new(axes[0].as_slice(), self.device())?,
            false => Tensor::new(axes.concat(), self.device())?.reshape((3, ()))?,
        };
        let embeddings: Vec<_> = batch.iter().map(|r| r.embeddings).collect();
        let x = Tensor::cat(&embeddings, 0)?;
        let packed = batch.iter_mut().zip(&ends).map(|(r, ends)| Packed {
            cache: r.cache,
            rows: r.positions.len(),
            ends,
            keep: r.keep,
        });
        let mut packed: Vec<_> = packed.collect();
        self.in_pool(|| self.pass(cx, x, &positions, &mut packed, wanted, None))
    }

    fn check_embeddings(&self, rows: &EmbeddingRows) -> Result<()> {
        let (found, count) = (rows.embeddings, rows.positions.len());
        let expected = [count, self.config().hidden_size];
        if count == 0 {
            return Err(Error::Prompt("empty: a pass needs at least one row".into()));
        }
        if found.dims() != expected {
            return Err(Error::Shape {
                op: "forward_embeddings",
                name: "embeddings",
                found: found.dims().to_vec(),
                expected: format!("{expected:?}, a row per position"),
            });
        }
        if found.dtype() != self.dtype() {
            return Err(Error::DType {
                op: "forward_embeddings",
                name: "embeddings",
                found: found.dtype(),
                expected: format!("the model's {:?}", self.dtype()),
            });
        }
        let text = rows.positions.iter().all(|[t, h, w]| t == h && t == w);
        if !text && !self.config().has_axes() {
            return Err(Error::Prompt(format!(
                "positions differ between axes, but the model's mrope_section {:?} does not cover its {} rotary pairs",
                self.config().mrope_section,
                self.config().rotary_dims() / 2
            )));
        }
        self.check_positions(rows.positions.as_flattened())
    }
}

/// The largest position up to each row. An image's rows do not come in the order of their largest position.
fn ends(rows: &EmbeddingRows) -> Vec<u32> {
    let before = rows.cache.next_position().get().saturating_sub(1);
    let largest = rows.positions.iter().scan(before, |largest, p| {
        *largest = p.iter().fold(*largest, |a, b| a.max(*b));
        Some(*largest)
    });
    largest.collect()
}
