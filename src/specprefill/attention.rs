//! How much each prompt token matters, by the attention of a draft model.
//!
//! The recipe of Speculative Prefill (arXiv 2502.02789): the draft reads the prompt and decodes a few tokens; per full-attention
//! layer and head the softmax of their queries over the prompt's keys, average-pooled along the prompt; then the maximum over
//! layers and heads and the mean over the queries. The default is the same with a wide maximum as the pool.

use std::ops::Range;
use std::time::Instant;

use candle_core::Tensor;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::draft_pass::{Asked, DraftPass};
use super::scorer::{Scorer, ScorerInput, Scores};
use super::Progress;
use crate::error::{Error, Result};
use crate::ops::attention::attention_probabilities;
use crate::qwen3_5::Cache;

/// Queries that are scored together: what scoring holds in memory is this times the prompt, whatever the layers and heads.
const QUERIES: usize = 8;

/// How values are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Join {
    /// Their mean.
    Mean,
    /// The largest.
    Max,
}

/// Scores by the draft's attention: some queries' softmax over the prompt's keys, pooled along the prompt, the maximum over
/// layers and heads, joined over queries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionScorer {
    /// Prompt rows at the end whose queries score, each over the keys up to its own.
    pub window: usize,
    /// Tokens that the draft decodes (greedily) and whose queries score, over the prompt's keys.
    pub lookahead: usize,
    /// Width of the pool along the prompt; odd, 1 is none.
    pub pool: usize,
    /// How the pool joins. A mean counts what lies past the prompt's ends as zero.
    pub pooling: Join,
    /// How queries are joined.
    pub queries: Join,
    /// Whether the `i`-th of `n` queries weighs `i / n`.
    pub late_queries_weigh_more: bool,
    /// Share of the full-attention layers, from the first, whose attention is not looked at.
    pub skip_layers: f64,
    /// Full-attention layers to run at most; later layers are not computed at all. Needs a look-ahead of 0.
    pub layers: Option<usize>,
}

impl Default for AttentionScorer {
    fn default() -> Self {
        Self::look_ahead_wide()
    }
}

impl AttentionScorer {
    /// Speculative Prefill as published: 8 look-ahead queries, mean pool of 13.
    pub fn look_ahead() -> Self {
        Self {
            window: 0,
            lookahead: 8,
            pool: 13,
            pooling: Join::Mean,
            queries: Join::Mean,
            late_queries_weigh_more: false,
            skip_layers: 0.0,
            layers: None,
        }
    }

    /// The default: look-ahead, pooled by the maximum over 32 tokens on either side. An answer's token looks at the value and
    /// hardly at the words before it, so that of a sentence across two chunks (of 32 tokens) the published pool keeps the
    /// second only, and the target no longer knows what the value is of.
    pub fn look_ahead_wide() -> Self {
        Self {
            pool: 65,
            pooling: Join::Max,
            ..Self::look_ahead()
        }
    }

    /// No look-ahead: the queries of the last 64 prompt rows.
    pub fn tail_window() -> Self {
        Self {
            window: 64,
            lookahead: 0,
            ..Self::look_ahead()
        }
    }

    /// After SpecPC (arXiv 2506.08373): window 64 and one look-ahead token, late queries weigh more, maxima throughout, the
    /// first third of the layers skipped. The wide maximum pool does what its neighbour expansion does.
    pub fn spec_pc() -> Self {
        Self {
            window: 64,
            lookahead: 1,
            pool: 65,
            pooling: Join::Max,
            queries: Join::Max,
            late_queries_weigh_more: true,
            skip_layers: 0.34,
            layers: None,
        }
    }

    /// [`Scorer::score`] into a cache that must be empty. With all layers run, it holds the prompt and nothing else afterwards.
    pub fn score_into(
        &self,
        input: &ScorerInput,
        cache: &mut Cache,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Scores> {
        self.validate()?;
        let pass = DraftPass::run(input, cache, self.asks(cache)?, progress)?;
        self.scores(input, cache, &pass)
    }

    /// Scores by several scorers with one pass of the draft. Each gives the importance and the tokens that it gives alone, to
    /// the bit; its times are those of its share of the pass.
    pub fn score_all(
        scorers: &[Self],
        input: &ScorerInput,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Vec<Scores>> {
        let mut cache = input.draft.new_cache()?;
        let mut asked = Asked::default();
        for scorer in scorers {
            scorer.validate()?;
            let asks = scorer.asks(&cache)?;
            asked.window = asked.window.max(asks.window);
            asked.lookahead = asked.lookahead.max(asks.lookahead);
            asked.layers = asked.layers.max(asks.layers);
        }
        if scorers.is_empty() {
            return Ok(vec![]);
        }
        let pass = DraftPass::run(input, &mut cache, asked, progress)?;
        let scores = scorers.iter().map(|s| s.scores(input, &cache, &pass));
        scores.collect()
    }

    fn asks(&self, cache: &Cache) -> Result<Asked> {
        Ok(Asked {
            window: self.window,
            lookahead: self.lookahead,
            layers: self.layers(cache)?.end,
        })
    }

    /// The full-attention layers that are looked at.
    fn layers(&self, cache: &Cache) -> Result<Range<usize>> {
        let all = (0..).take_while(|i| cache.keys(*i).is_some()).count();
        if all == 0 {
            let what = "it has no full-attention layer to score with";
            return Err(Error::Draft(what.into()));
        }
        let end = self.layers.unwrap_or(all).min(all);
        Ok(((end as f64 * self.skip_layers) as usize).min(end - 1)..end)
    }

    /// By the queries of a pass that left at least those that this scorer asks for.
    fn scores(&self, input: &ScorerInput, cache: &Cache, pass: &DraftPass) -> Result<Scores> {
        let start = Instant::now();
        let len = input.tokens.len();
        let layers = self.layers(cache)?;
        let window = self.window.min(len);
        let count = window + self.lookahead;
        let mut out = vec![0f32; len];
        let mut done = 0;
        // Window rows see the keys up to their own, look-ahead rows all.
        let blocks = [
            (window, pass.window(window)?, Some(len - window)),
            (self.lookahead, pass.steps(self.lookahead)?, None),
        ];
        for (rows, queries, first) in blocks {
            for from in (0..rows).step_by(QUERIES) {
                let n = QUERIES.min(rows - from);
                let seen: Vec<usize> = (from..from + n)
                    .map(|r| first.map_or(len, |first| first + r + 1))
                    .collect();
                let mut best = vec![0f32; n * len];
                for layer in layers.clone() {
                    let q = queries[layer].narrow(0, from, n)?;
                    self.layer(input, cache, layer, &q, &seen, &mut best)?;
                }
                for row in best.chunks_exact(len) {
                    done += 1;
                    let weight = match self.late_queries_weigh_more {
                        true => done as f32 / count as f32,
                        false => 1.0,
                    };
                    for (out, value) in out.iter_mut().zip(row) {
                        *out = match self.queries {
                            Join::Mean => *out + value * weight,
                            Join::Max => out.max(value * weight),
                        };
                    }
                }
            }
        }
        if self.queries == Join::Mean {
            out.iter_mut().for_each(|v| *v /= count as f32);
        }
        let lookahead = &pass.lookahead[..self.lookahead.min(pass.lookahead.len())];
        let steps_s = lookahead
            .len()
            .checked_sub(1)
            .map_or(0.0, |i| pass.step_s[i]);
        Ok(Scores {
            importance: out,
            lookahead: lookahead.to_vec(),
            prefill_s: pass.prefill_s,
            lookahead_s: steps_s + start.elapsed().as_secs_f64(),
        })
    }

    /// One layer's pooled probabilities of `q` `[rows, heads, head_dim]`, joined by the maximum into `best` `[rows, len]`. One
    /// key head's probabilities are held at a time.
    fn layer(
        &self,
        input: &ScorerInput,
        cache: &Cache,
        layer: usize,
        q: &Tensor,
        seen: &[usize],
        best: &mut [f32],
    ) -> Result<()> {
        let Some((keys, _)) = cache.keys(layer) else {
            return Err(Error::Draft("its cache lacks an attention layer".into()));
        };
        let len = input.tokens.len();
        let (rows, heads, dim) = q.dims3()?;
        let kv_heads = keys.dim(0)?;
        let group = heads / kv_heads;
        let scale = (dim as f32).powf(-0.5);
        for head in 0..kv_heads {
            let q = q.narrow(1, head * group, group)?.contiguous()?;
            let keys = keys.narrow(0, head, 1)?;
            let p = attention_probabilities(input.cx, &q, &keys, len, scale)?;
            let mut p: Vec<f32> = p.flatten_all()?.to_vec1()?;
            p.par_chunks_exact_mut(len)
                .enumerate()
                .for_each(|(i, p)| causal(p, seen[i % rows]));
            best.par_chunks_exact_mut(len)
                .enumerate()
                .for_each(|(row, best)| {
                    for g in 0..group {
                        let p = &p[(g * rows + row) * len..][..len];
                        pool_into(p, self.pool, self.pooling, best);
                    }
                });
        }
        Ok(())
    }
}

impl Scorer for AttentionScorer {
    fn id(&self) -> String {
        format!("{self:?}")
    }

    fn validate(&self) -> Result<()> {
        let refuse = |name, what: String| Err(Error::Option { name, what });
        if self.pool.is_multiple_of(2) {
            let what = format!("{} must be odd: an even pool would shift scores", self.pool);
            return refuse("pool", what);
        }
        if self.window + self.lookahead == 0 {
            let what = "0, and so is the window: nothing would score".into();
            return refuse("lookahead", what);
        }
        if !(0.0..1.0).contains(&self.skip_layers) {
            return refuse(
                "skip-layers",
                format!("{} must be in [0, 1)", self.skip_layers),
            );
        }
        if self.layers == Some(0) {
            return refuse("layers", "0 layers cannot score".into());
        }
        if self.layers.is_some() && self.lookahead > 0 {
            let what = "needs a look-ahead of 0: only a whole model can look ahead".into();
            return refuse("layers", what);
        }
        Ok(())
    }

    fn score(&self, input: &ScorerInput, progress: &mut dyn FnMut(Progress)) -> Result<Scores> {
        self.score_into(input, &mut input.draft.new_cache()?, progress)
    }
}

/// Turns a softmax over all keys into one over the first `seen`.
fn causal(p: &mut [f32], seen: usize) {
    if seen >= p.len() {
        return;
    }
    let (visible, hidden) = p.split_at_mut(seen);
    hidden.fill(0.0);
    let sum: f64 = visible.iter().map(|p| *p as f64).sum();
    let scale = if sum > 1e-30 { (1.0 / sum) as f32 } else { 0.0 };
    visible.iter_mut().for_each(|p| *p *= scale);
}

/// `best[i] = max(best[i], the pool around i)`.
fn pool_into(row: &[f32], pool: usize, pooling: Join, best: &mut [f32]) {
    let half = pool / 2;
    match pooling {
        _ if pool <= 1 => best.iter_mut().zip(row).for_each(|(b, v)| *b = b.max(*v)),
        Join::Mean => {
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
        Join::Max => {
            // The largest of a sliding window: falling values with their places.
            let mut falling = std::collections::VecDeque::new();
            for i in 0..row.len() + half {
                if let Some(v) = row.get(i) {
                    while falling.back().is_some_and(|(_, last)| last <= v) {
                        falling.pop_back();
                    }
                    falling.push_back((i, *v));
                }
                let Some(at) = i.checked_sub(half) else {
                    continue;
                };
                while falling.front().is_some_and(|(place, _)| place + half < at) {
                    falling.pop_front();
                }
                if let Some((_, v)) = falling.front() {
                    best[at] = best[at].max(*v);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_equal_their_definitions() {
        let row: Vec<f32> = (0..50u32).map(|i| ((i * 37) % 23) as f32).collect();
        for pool in [1, 3, 13, 65, 121] {
            let (mut mean, mut max) = (vec![0.0; 50], vec![0.0; 50]);
            pool_into(&row, pool, Join::Mean, &mut mean);
            pool_into(&row, pool, Join::Max, &mut max);
            for i in 0..50usize {
                let around = &row[i.saturating_sub(pool / 2)..(i + pool / 2 + 1).min(50)];
                assert_eq!(
                    max[i],
                    around.iter().copied().fold(0.0, f32::max),
                    "{pool} {i}"
                );
                let want = around.iter().sum::<f32>() / pool as f32;
                assert!((mean[i] - want).abs() < 1e-5, "{pool} {i}");
            }
        }
    }

    #[test]
    fn hidden_keys_get_nothing_and_the_rest_adds_up() {
        let mut p = [0.1, 0.3, 0.2, 0.4];
        causal(&mut p, 3);
        assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-6 && p[3] == 0.0);
        let mut p = [0.0, 1.0];
        causal(&mut p, 1);
        assert_eq!(p, [0.0, 0.0]);
    }
}
