//! A pass of packed rows through the layers.

use std::ops::Range;

use candle_core::{Tensor, D};

use crate::error::Result;
use crate::ops::{self, Context};

use super::cache::LayerCache;
use super::embeddings::Packed;
use super::layer::Mixer;
use super::model::{Model, Wanted};
use super::{attention, gated_delta_net};

impl Model {
    /// `x` is `[rows, hidden]`, `positions` `[rows]` or `[3, rows]`. All input was checked.
    pub(super) fn pass(
        &self,
        cx: &Context,
        x: Tensor,
        positions: &Tensor,
        batch: &mut [Packed],
        wanted: Wanted,
        mut queries: Option<&mut Vec<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let sizes: Vec<_> = batch.iter().map(|r| r.rows).collect();
        let groups = match ops::on_launches(cx, &x) {
            true => groups(&sizes),
            false => vec![],
        };
        if groups.len() <= 1 {
            return self.group_pass(cx, x, positions, batch, wanted, queries);
        }
        let (mut first_row, mut hidden) = (0, vec![]);
        for group in groups {
            let rows = sizes[group.clone()].iter().sum();
            let x = x.narrow(0, first_row, rows)?;
            let positions = positions.narrow(D::Minus1, first_row, rows)?.contiguous()?;
            let group = &mut batch[group];
            let out = self.group_pass(cx, x, &positions, group, wanted, queries.as_deref_mut());
            match out {
                Ok(out) => hidden.extend(out),
                Err(e) => {
                    // One pass for the caller: it failed for all.
                    let depth = self.depth(wanted)?;
                    batch.iter_mut().for_each(|r| r.cache.begin(depth));
                    return Err(e);
                }
            }
            first_row += rows;
        }
        Ok(match hidden.is_empty() {
            true => None,
            false => Some(Tensor::cat(&hidden, 0)?),
        })
    }

    fn group_pass(
        &self,
        cx: &Context,
        mut x: Tensor,
        positions: &Tensor,
        batch: &mut [Packed],
        wanted: Wanted,
        mut queries: Option<&mut Vec<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let depth = self.depth(wanted)?;
        cx.go_on()?;
        batch.iter_mut().for_each(|r| r.cache.begin(depth));
        let mut hidden = None;
        for (i, layer) in self.layers[..depth].iter().enumerate() {
            let last = i + 1 == depth;
            let of = |rows: usize| match wanted {
                _ if !last => rows,
                Wanted::All => rows,
                Wanted::Last => rows.min(1),
                Wanted::Nothing | Wanted::Keys(_) => 0,
            };
            let sizes: Vec<_> = batch.iter().map(|r| r.rows).collect();
            let sizes: Vec<_> = sizes.into_iter().map(|rows| (rows, of(rows))).collect();
            let residual = |x: &Tensor| attention::last_rows(x, &sizes);
            let out = layer.forward(cx, &x, residual, |mixer, x| match mixer {
                Mixer::Attention(mixer) => {
                    let spans = batch.iter_mut().filter_map(|r| {
                        let filled = r.cache.length().get();
                        match &mut r.cache.layers[i] {
                            LayerCache::Attention(key_values) => Some(attention::Span {
                                key_values,
                                filled,
                                rows: r.rows,
                                wanted: of(r.rows),
                            }),
                            LayerCache::Delta(_) => None,
                        }
                    });
                    let mut spans: Vec<_> = spans.collect();
                    let queries = queries.as_deref_mut();
                    let (rope, spans) = (&self.rope, &mut spans);
                    if spans.iter().any(|s| s.wanted > 0) {
                        let out = mixer.forward(cx, x, positions, rope, spans, queries)?;
                        return Ok(Some(out));
                    }
                    mixer.prime(cx, x, positions, rope, spans)?;
                    if let (Wanted::Keys(_), Some(queries)) = (wanted, queries) {
                        queries.push(mixer.queries_only(cx, x, positions, rope)?);
                    }
                    Ok(None)
                }
                Mixer::Delta(mixer) => {
                    let spans = batch
                        .iter_mut()
                        .filter_map(|r| match &mut r.cache.layers[i] {
                            LayerCache::Delta(state) => Some(gated_delta_net::Span {
                                state,
                                rows: r.rows,
                                wanted: of(r.rows),
                                keep: r.keep,
                            }),
                            LayerCache::Attention(_) => None,
                        });
                    mixer.forward(cx, x, &mut spans.collect::<Vec<_>>())
                }
            })?;
            match out {
                Some(out) if last => hidden = Some(out),
                Some(out) => x = out,
                None => {}
            }
        }
        let eps = self.config.rms_norm_eps;
        let norm = |x: Tensor| ops::rms_norm(cx, &x, &self.norm, eps);
        let hidden = hidden.map(norm).transpose()?;
        for rows in batch.iter_mut() {
            rows.cache.finish(rows.ends, rows.keep);
        }
        Ok(hidden)
    }
}

/// Sequences of `sizes` rows that may share a pass on a GPU, in order. Its kernels depend on the number of rows: few take those whose
/// rows do not depend on each other, many those of prompts. Which ones a sequence takes must be its own affair.
fn groups(sizes: &[usize]) -> Vec<Range<usize>> {
    let most = ops::DECODE_ROWS;
    let mut groups: Vec<(bool, usize, Range<usize>)> = vec![];
    for (i, rows) in sizes.iter().enumerate() {
        let prompt = *rows > most;
        // Of prompts each may want its last row.
        let load = if prompt { 1 } else { *rows };
        match groups.last_mut() {
            Some((kind, sum, range)) if *kind == prompt && *sum + load <= most => {
                *sum += load;
                range.end = i + 1;
            }
            _ => groups.push((prompt, load, i..i + 1)),
        }
    }
    groups.into_iter().map(|(_, _, range)| range).collect()
}
