//! How much each prompt token matters, by the attention of a draft model that looks ahead.
//!
//! The recipe of Speculative Prefill (arXiv 2502.02789): the draft reads the prompt and decodes a few tokens; per
//! full-attention layer and head the softmax of their queries over the prompt's keys, average-pooled along the prompt; then
//! the maximum over layers and heads and the mean over the queries.

use std::time::Instant;

use candle_core::Tensor;
use rayon::prelude::*;

use super::{Progress, Settings};
use crate::error::{Error, Result};
use crate::ops::{attention::attention_probabilities, Context};
use crate::qwen3_5::{Cache, Capture, Keep, Model, Rows, Wanted};

/// What scoring found and what it cost.
#[derive(Clone, Debug)]
pub struct Scores {
    /// Per prompt token.
    pub importance: Vec<f32>,
    /// Seconds that the draft took to read the prompt.
    pub prefill_s: f64,
    /// Seconds that looking ahead and scoring took.
    pub lookahead_s: f64,
}

/// Scores `tokens` with the draft. `cache` must be empty; it holds the prompt and nothing else afterwards.
pub fn score(
    draft: &Model,
    cx: &Context,
    cache: &mut Cache,
    tokens: &[u32],
    settings: &Settings,
    progress: &mut dyn FnMut(Progress),
) -> Result<Scores> {
    settings.validate()?;
    if cache.rows() != 0 {
        return Err(Error::Cache("scoring starts from an empty cache".into()));
    }
    let start = Instant::now();
    // The last token goes alone: its query is the first of the look-ahead in the paper's own code.
    let Some((last, body)) = tokens.split_last() else {
        return Err(Error::Prompt("empty: there is nothing to score".into()));
    };
    for (i, part) in body.chunks(settings.prefill_chunk.max(1)).enumerate() {
        // Of these rows only the caches are read, so the last layer computes no attention and no feed-forward.
        feed(draft, cx, cache, part, Wanted::Nothing, None)?;
        let done = i * settings.prefill_chunk + part.len();
        progress(Progress::Scoring {
            done,
            total: tokens.len(),
        });
    }
    let mut capture = Capture::default();
    let mut hidden = feed(draft, cx, cache, &[*last], Wanted::Last, Some(&mut capture))?;
    progress(Progress::Scoring {
        done: tokens.len(),
        total: tokens.len(),
    });
    let prefill_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mark = cache.mark()?;
    let mut queries = vec![];
    if settings.first_query_is_prompt_end {
        queries.push(std::mem::take(&mut capture.queries));
    }
    while queries.len() < settings.lookahead {
        progress(Progress::Lookahead {
            done: queries.len(),
            total: settings.lookahead,
        });
        let Some(row) = &hidden else {
            return Err(Error::Draft("its pass gave no hidden state".into()));
        };
        let logits = draft.logits(cx, row)?;
        let next = logits.argmax(1)?.to_vec1::<u32>()?[0];
        hidden = feed(draft, cx, cache, &[next], Wanted::Last, Some(&mut capture))?;
        queries.push(std::mem::take(&mut capture.queries));
    }
    cache.restore(&mark)?;
    let importance = importance(cx, cache, &queries, tokens.len(), settings)?;
    Ok(Scores {
        importance,
        prefill_s,
        lookahead_s: start.elapsed().as_secs_f64(),
    })
}

fn feed(
    draft: &Model,
    cx: &Context,
    cache: &mut Cache,
    tokens: &[u32],
    wanted: Wanted,
    capture: Option<&mut Capture>,
) -> Result<Option<Tensor>> {
    let first = cache.next_position();
    let positions: Vec<u32> = (first..first + tokens.len() as u32).collect();
    let rows = Rows {
        cache,
        tokens,
        positions: &positions,
        keep: Keep::Commit,
    };
    match capture {
        Some(capture) => draft.forward_capturing(cx, rows, wanted, capture),
        None => draft.forward_wanted(cx, &mut [rows], wanted),
    }
}

/// `queries[step][layer]` is `[1, heads, head_dim]`. One layer's probabilities are held at a time.
fn importance(
    cx: &Context,
    cache: &Cache,
    queries: &[Vec<Tensor>],
    len: usize,
    settings: &Settings,
) -> Result<Vec<f32>> {
    let steps = queries.len();
    let layers = queries.first().map_or(0, Vec::len);
    if layers == 0 {
        return Err(Error::Draft(
            "it has no full-attention layer to score with".into(),
        ));
    }
    let mut best = vec![0f32; steps * len];
    for layer in 0..layers {
        let rows: Vec<&Tensor> = queries.iter().map(|q| &q[layer]).collect();
        let q = Tensor::cat(&rows, 0)?;
        let Some((keys, _)) = cache.keys(layer) else {
            return Err(Error::Draft("its cache lacks an attention layer".into()));
        };
        let (_, heads, dim) = q.dims3()?;
        let p = attention_probabilities(cx, &q, keys, len, (dim as f32).powf(-0.5))?;
        let p: Vec<f32> = p.flatten_all()?.to_vec1()?;
        best.par_chunks_exact_mut(len)
            .enumerate()
            .for_each(|(step, best)| {
                for head in 0..heads {
                    let row = &p[(head * steps + step) * len..][..len];
                    pool_max(row, settings.pool, best);
                }
            });
    }
    let mean = |i| (0..steps).map(|s| best[s * len + i]).sum::<f32>() / steps as f32;
    Ok((0..len).map(mean).collect())
}

/// `best[i] = max(best[i], mean of the pool around i)`; what lies past the ends counts as zero.
fn pool_max(row: &[f32], pool: usize, best: &mut [f32]) {
    if pool <= 1 {
        best.iter_mut().zip(row).for_each(|(b, v)| *b = b.max(*v));
        return;
    }
    let half = pool / 2;
    // Probabilities may be tiny beside their running sum, so the sum is f64.
    let mut sum: f64 = row.iter().take(half).map(|v| *v as f64).sum();
    for (i, best) in best.iter_mut().enumerate() {
        if let Some(v) = row.get(i + half) {
            sum += *v as f64;
        }
        if i > half {
            sum -= row[i - half - 1] as f64;
        }
        *best = best.max((sum / pool as f64) as f32);
    }
}
