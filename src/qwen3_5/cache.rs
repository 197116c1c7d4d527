//! What a sequence leaves behind: keys and values, gated-delta states, the draft head's keys and values.
//!
//! A cache holds committed rows and the pending rows of its last pass. [`Cache::accept`] keeps the first `n` pending rows
//! and forgets the rest; nothing is copied. The number of rows and the next position are different things: after a
//! sparse prefill the cache holds fewer rows than the prompt has positions.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::ops::gated_delta::{GatedDeltaDims, GatedDeltaState, Keep};
use crate::ops::memory;

use super::config::{LayerType, TextConfig};
use super::length::{CacheLength, Position};

/// Slots by which a key/value cache grows at the least.
const GROWTH: usize = 256;

/// Slots that are made when `slots` are needed. An eighth more: to copy a cache is about the work of one decoded token, and spare
/// room is memory that long prompts miss.
pub(super) fn capacity_for(slots: usize) -> usize {
    (slots + slots / 8).next_multiple_of(GROWTH)
}

/// Keys and values of one attention layer, `[kv_heads, capacity, head_dim]` each.
#[derive(Clone, Debug)]
pub(crate) struct KeyValues {
    keys: Tensor,
    values: Tensor,
}

impl KeyValues {
    fn new(kv_heads: usize, head_dim: usize, dtype: DType, device: &Device) -> Result<Self> {
        let empty = || memory::zeros((kv_heads, GROWTH, head_dim), dtype, device);
        Ok(Self {
            keys: empty()?,
            values: empty()?,
        })
    }

    fn capacity(&self) -> usize {
        self.keys.dims()[1]
    }

    /// Makes room for `slots` in all, keeping the first `filled`.
    fn reserve(&mut self, slots: usize, filled: usize) -> Result<()> {
        if slots <= self.capacity() {
            return Ok(());
        }
        let capacity = capacity_for(slots);
        let grow = |old: &Tensor| -> Result<Tensor> {
            let (heads, _, dim) = old.dims3()?;
            let new = memory::zeros((heads, capacity, dim), old.dtype(), old.device())?;
            if filled > 0 {
                new.slice_set(&old.narrow(1, 0, filled)?.contiguous()?, 1, 0)?;
            }
            Ok(new)
        };
        (self.keys, self.values) = (grow(&self.keys)?, grow(&self.values)?);
        Ok(())
    }

    /// Writes `keys` and `values` (`[rows, kv_heads, head_dim]`) into the slots after the first `filled`.
    pub(crate) fn write(&mut self, keys: &Tensor, values: &Tensor, filled: usize) -> Result<()> {
        self.reserve(filled + keys.dim(0)?, filled)?;
        self.keys
            .slice_set(&keys.transpose(0, 1)?.contiguous()?, 1, filled)?;
        self.values
            .slice_set(&values.transpose(0, 1)?.contiguous()?, 1, filled)?;
        Ok(())
    }

    pub(crate) fn keys(&self) -> &Tensor {
        &self.keys
    }

    pub(crate) fn values(&self) -> &Tensor {
        &self.values
    }

    fn deep_copy(&self) -> Result<Self> {
        Ok(Self {
            keys: self.keys.copy()?,
            values: self.values.copy()?,
        })
    }

    fn size_bytes(&self) -> usize {
        2 * self.keys.elem_count() * self.keys.dtype().size_in_bytes()
    }
}

#[derive(Clone, Debug)]
pub(crate) enum LayerCache {
    Attention(KeyValues),
    Delta(GatedDeltaState),
}

/// One sequence's cache, made by [`Model::new_cache`](super::Model::new_cache).
#[derive(Debug)]
pub struct Cache {
    pub(crate) layers: Vec<LayerCache>,
    pub(crate) draft: Option<KeyValues>,
    rows: usize,
    pending: Vec<u32>,
    draft_rows: usize,
    next_position: u32,
    /// Layers that hold the rows: fewer than all after passes that stopped early.
    depth: usize,
    failed: bool,
    /// This cache and no other: marks point to it.
    id: Arc<()>,
    /// Restores that forgot rows.
    generation: u64,
    /// Of those, the ones that no later one went below: generation and rows that were left, both rising.
    cuts: Vec<(u64, usize)>,
}

/// A state of committed rows that [`Cache::restore`] goes back to.
#[derive(Clone, Debug)]
pub struct Mark {
    deltas: Vec<GatedDeltaState>,
    rows: usize,
    draft_rows: usize,
    next_position: u32,
    cache: Arc<()>,
    generation: u64,
}

impl Mark {
    /// Committed rows at the mark.
    pub fn length(&self) -> CacheLength {
        CacheLength::new(self.rows)
    }

    /// The position of the row that came next.
    pub fn next_position(&self) -> Position {
        Position::new(self.next_position)
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        self.deltas.iter().map(GatedDeltaState::size_bytes).sum()
    }
}

impl Cache {
    pub(crate) fn new(
        config: &TextConfig,
        draft: bool,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let key_values =
            || KeyValues::new(config.num_key_value_heads, config.head_dim, dtype, device);
        let dims = delta_dims(config);
        let layers = config.layer_types.iter().map(|kind| {
            Ok(match kind {
                LayerType::FullAttention => LayerCache::Attention(key_values()?),
                LayerType::LinearAttention => {
                    LayerCache::Delta(GatedDeltaState::new(dims, device)?)
                }
            })
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            draft: draft.then(key_values).transpose()?,
            rows: 0,
            pending: vec![],
            draft_rows: 0,
            next_position: 0,
            depth: config.layer_types.len(),
            failed: false,
            id: Arc::default(),
            generation: 0,
            cuts: vec![],
        })
    }

    /// Committed rows. Not a position: see [`Cache::next_position`].
    pub fn length(&self) -> CacheLength {
        CacheLength::new(self.rows)
    }

    /// Rows of the last pass that are neither accepted nor forgotten.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Rows in the draft head's own cache.
    pub fn draft_rows(&self) -> usize {
        self.draft_rows
    }

    /// The position of the row that comes next.
    pub fn next_position(&self) -> Position {
        Position::new(self.next_position)
    }

    /// Sets the position of the row that comes next: a sparse prefill sets it to the prompt's true length.
    pub fn set_next_position(&mut self, position: Position) {
        self.next_position = position.get();
    }

    /// Commits the first `n` pending rows and forgets the rest. Refuses, and changes nothing, when fewer are pending.
    pub fn accept(&mut self, n: usize) -> Result<()> {
        self.usable()?;
        if n > self.pending.len() {
            return Err(Error::Cache(format!(
                "{n} rows accepted, but only {} are pending",
                self.pending.len()
            )));
        }
        for layer in &mut self.layers {
            if let LayerCache::Delta(state) = layer {
                state.accept(n)?;
            }
        }
        if n > 0 {
            self.next_position = self.pending[n - 1] + 1;
        }
        self.rows += n;
        self.pending.clear();
        Ok(())
    }

    /// Forgets the draft head's rows after the first `n`.
    pub fn truncate_draft(&mut self, n: usize) -> Result<()> {
        if n > self.draft_rows {
            return Err(Error::Cache(format!(
                "cannot keep {n} rows of the draft head, it has {}",
                self.draft_rows
            )));
        }
        self.draft_rows = n;
        Ok(())
    }

    /// Keys `[kv_heads, capacity, head_dim]` of the `index`-th full-attention layer, after normalisation and RoPE, and the
    /// number of slots that hold committed rows. `None` past the last such layer.
    pub fn keys(&self, index: usize) -> Option<(&Tensor, usize)> {
        let attention = self.layers.iter().filter_map(|l| match l {
            LayerCache::Attention(kv) => Some(kv),
            LayerCache::Delta(_) => None,
        });
        attention.map(|kv| (kv.keys(), self.rows)).nth(index)
    }

    /// Values, as [`Cache::keys`] gives the keys.
    pub fn values(&self, index: usize) -> Option<(&Tensor, usize)> {
        let attention = self.layers.iter().filter_map(|l| match l {
            LayerCache::Attention(kv) => Some(kv),
            LayerCache::Delta(_) => None,
        });
        attention.map(|kv| (kv.values(), self.rows)).nth(index)
    }

    /// Keys and values of the draft head, and the number of slots that are filled. `None` without a head.
    pub fn draft_keys_values(&self) -> Option<(&Tensor, &Tensor, usize)> {
        let head = self.draft.as_ref()?;
        Some((head.keys(), head.values(), self.draft_rows))
    }

    /// The committed state of every gated-delta layer: recurrent state and convolution inputs, f32.
    pub fn delta_states(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let states = self.layers.iter().filter_map(|l| match l {
            LayerCache::Delta(state) => Some(state),
            LayerCache::Attention(_) => None,
        });
        states
            .map(|s| Ok((s.recurrent()?, s.conv_inputs()?)))
            .collect()
    }

    /// Remembers the committed rows, so that whatever is appended later can be undone. Costs a copy of the gated-delta
    /// states; keys and values are not copied.
    pub fn mark(&self) -> Result<Mark> {
        self.usable()?;
        if self.pending() > 0 {
            return Err(undecided(self.pending()));
        }
        let deltas = self.layers.iter().filter_map(|l| match l {
            LayerCache::Delta(state) => Some(state.clone()),
            LayerCache::Attention(_) => None,
        });
        Ok(Mark {
            deltas: deltas.collect(),
            rows: self.rows,
            draft_rows: self.draft_rows,
            next_position: self.next_position,
            cache: self.id.clone(),
            generation: self.generation,
        })
    }

    /// Goes back to `mark`. Refuses, and changes nothing, when another cache made it (a fork is another cache), or when an earlier
    /// restore went back to fewer rows: those after them may have been overwritten since.
    pub fn restore(&mut self, mark: &Mark) -> Result<()> {
        if !Arc::ptr_eq(&mark.cache, &self.id) {
            return Err(Error::Cache(format!(
                "the mark of {} rows is not of this cache: restore the cache that made it",
                mark.rows
            )));
        }
        let later = self.cuts.partition_point(|(at, _)| *at <= mark.generation);
        match self.cuts.get(later) {
            Some((_, left)) if *left < mark.rows => {
                return Err(Error::Cache(format!(
                    "the mark of {} rows is no longer good: the cache went back to {left} rows since",
                    mark.rows
                )));
            }
            _ => {}
        }
        if mark.rows < self.rows {
            self.generation += 1;
            let kept = self.cuts.partition_point(|(_, left)| *left < mark.rows);
            self.cuts.truncate(kept);
            self.cuts.push((self.generation, mark.rows));
        }
        let states = self.layers.iter_mut().filter_map(|l| match l {
            LayerCache::Delta(state) => Some(state),
            LayerCache::Attention(_) => None,
        });
        for (state, saved) in states.zip(&mark.deltas) {
            *state = saved.clone();
        }
        self.rows = mark.rows;
        self.draft_rows = mark.draft_rows.min(self.draft_rows);
        self.next_position = mark.next_position;
        self.pending.clear();
        self.failed = false;
        Ok(())
    }

    /// A copy that goes its own way.
    pub fn fork(&self) -> Result<Self> {
        self.usable()?;
        let layers = self.layers.iter().map(|layer| {
            Ok(match layer {
                LayerCache::Attention(kv) => LayerCache::Attention(kv.deep_copy()?),
                LayerCache::Delta(state) => LayerCache::Delta(state.clone()),
            })
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            draft: self.draft.as_ref().map(KeyValues::deep_copy).transpose()?,
            rows: self.rows,
            pending: self.pending.clone(),
            draft_rows: self.draft_rows,
            next_position: self.next_position,
            depth: self.depth,
            failed: self.failed,
            id: Arc::default(),
            generation: 0,
            cuts: vec![],
        })
    }

    /// Bytes that the cache holds, its spare capacity included.
    pub fn size_bytes(&self) -> usize {
        let layer = |l: &LayerCache| match l {
            LayerCache::Attention(kv) => kv.size_bytes(),
            LayerCache::Delta(state) => state.size_bytes(),
        };
        let draft = self.draft.as_ref().map_or(0, KeyValues::size_bytes);
        self.layers.iter().map(layer).sum::<usize>() + draft
    }

    fn usable(&self) -> Result<()> {
        if self.failed {
            return Err(Error::Cache(
                "an earlier pass failed half-way: restore a mark, or start with a new cache".into(),
            ));
        }
        Ok(())
    }

    /// Whether a pass of the first `depth` layers may begin.
    pub(crate) fn ready(&self, layers: &[LayerType], depth: usize) -> Result<()> {
        self.usable()?;
        if self.rows > 0 && self.depth != depth {
            return Err(Error::Cache(format!(
                "its rows went through {} layers, this pass has {depth}: start with a new cache",
                self.depth
            )));
        }
        if self.pending() > 0 {
            return Err(undecided(self.pending()));
        }
        let fits = self.layers.len() == layers.len()
            && self.layers.iter().zip(layers).all(|(c, l)| {
                matches!(c, LayerCache::Attention(_)) == (*l == LayerType::FullAttention)
            });
        if !fits {
            return Err(Error::Cache(
                "this cache belongs to a model with other layers".into(),
            ));
        }
        Ok(())
    }

    /// A pass begins: until [`Cache::finish`] the cache counts as failed.
    pub(crate) fn begin(&mut self, depth: usize) {
        self.failed = true;
        self.depth = depth;
    }

    /// A pass over rows at `positions` went through.
    pub(crate) fn finish(&mut self, positions: &[u32], keep: Keep) {
        self.failed = false;
        match keep {
            Keep::Commit => {
                self.rows += positions.len();
                if let Some(last) = positions.last() {
                    self.next_position = last + 1;
                }
            }
            Keep::Pending => self.pending = positions.to_vec(),
        }
    }

    /// The draft head went over `rows` more rows.
    pub(crate) fn finish_draft(&mut self, rows: usize) {
        self.draft_rows += rows;
    }
}

fn undecided(pending: usize) -> Error {
    Error::Cache(format!(
        "{pending} rows are pending: call accept (with 0 to forget them) first"
    ))
}

pub(crate) fn delta_dims(config: &TextConfig) -> GatedDeltaDims {
    GatedDeltaDims {
        key_heads: config.linear_num_key_heads,
        value_heads: config.linear_num_value_heads,
        key_dim: config.linear_key_head_dim,
        value_dim: config.linear_value_head_dim,
        taps: config.linear_conv_kernel_dim,
    }
}
