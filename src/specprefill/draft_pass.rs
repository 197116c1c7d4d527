//! One pass of the draft over a prompt: its keys, in a cache, and the queries that score them.

use std::time::Instant;

use candle_core::Tensor;

use super::scorer::ScorerInput;
use super::Progress;
use crate::error::{Error, Result};
use crate::ops::argmax;
use crate::qwen3_5::{Cache, Capture, Keep, Rows, Wanted};

/// What a pass is to leave behind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    /// Prompt rows at the end whose queries are wanted.
    pub window: usize,
    /// Tokens to look ahead.
    pub lookahead: usize,
    /// Full-attention layers to run, if nothing looks ahead.
    pub layers: usize,
}

/// The queries of a pass. More of them do not change any: a row's result does not depend on its company.
pub(super) struct DraftPass {
    /// Per full-attention layer, the last prompt rows' queries, `[rows, heads, head_dim]`.
    window: Vec<Tensor>,
    /// Per look-ahead step and full-attention layer, `[1, heads, head_dim]`.
    steps: Vec<Vec<Tensor>>,
    /// The tokens that the draft answers with.
    pub lookahead: Vec<u32>,
    /// Seconds that reading the prompt took.
    pub prefill_s: f64,
    /// Seconds from then to the end of each step.
    pub step_s: Vec<f64>,
}

impl DraftPass {
    /// Reads the prompt into a cache that must be empty. With all layers run, it holds the prompt and nothing else afterwards.
    pub fn run(
        input: &ScorerInput,
        cache: &mut Cache,
        asked: Asked,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        if cache.length() != 0 {
            return Err(Error::Cache("scoring starts from an empty cache".into()));
        }
        let start = Instant::now();
        let total = input.tokens.len();
        if total == 0 {
            return Err(Error::Prompt("empty: there is nothing to score".into()));
        }
        // Of the body only caches are read, so its last layer computes no attention and no feed-forward.
        let (body_wants, end_wants) = match asked.lookahead {
            0 => (
                Wanted::Keys(asked.layers - 1),
                Wanted::Keys(asked.layers - 1),
            ),
            _ => (Wanted::Nothing, Wanted::All),
        };
        let window = asked.window.min(total);
        let (body, end) = input.tokens.split_at(total - window.max(1));
        let mut done = 0;
        for part in body.chunks(input.prefill_chunk.max(1)) {
            feed(input, cache, part, body_wants, None)?;
            done += part.len();
            progress(Progress::Scoring { done, total });
        }
        let mut capture = Capture::default();
        let mut hidden = feed(input, cache, end, end_wants, Some(&mut capture))?;
        progress(Progress::Scoring { done: total, total });
        let mut pass = Self {
            window: match window {
                0 => vec![],
                _ => std::mem::take(&mut capture.queries),
            },
            steps: vec![],
            lookahead: vec![],
            prefill_s: start.elapsed().as_secs_f64(),
            step_s: vec![],
        };
        if asked.lookahead == 0 {
            return Ok(pass);
        }
        let start = Instant::now();
        let mark = cache.mark()?;
        while pass.lookahead.len() < asked.lookahead {
            progress(Progress::Lookahead {
                done: pass.lookahead.len(),
                total: asked.lookahead,
            });
            let Some(rows) = &hidden else {
                return Err(Error::Draft("its pass gave no hidden state".into()));
            };
            let row = rows.narrow(0, rows.dim(0)? - 1, 1)?;
            let logits = input.draft.logits(input.cx, &row)?;
            let best = argmax::tokens(input.cx, &logits)?.into_iter().next();
            let next = best.ok_or_else(|| Error::Draft("its pass gave no logits".into()))??;
            capture.queries.clear();
            hidden = feed(input, cache, &[next], Wanted::Last, Some(&mut capture))?;
            pass.lookahead.push(next);
            pass.steps.push(std::mem::take(&mut capture.queries));
            pass.step_s.push(start.elapsed().as_secs_f64());
        }
        cache.restore(&mark)?;
        Ok(pass)
    }

    /// The queries of the last `rows` prompt rows, per layer.
    pub fn window(&self, rows: usize) -> Result<Vec<Tensor>> {
        let last = |q: &Tensor| -> Result<Tensor> {
            let all = q.dim(0)?;
            let rows = rows.min(all);
            Ok(q.narrow(0, all - rows, rows)?)
        };
        self.window.iter().map(last).collect()
    }

    /// The queries of the first `steps` look-ahead steps together, per layer.
    pub fn steps(&self, steps: usize) -> Result<Vec<Tensor>> {
        let steps = &self.steps[..steps.min(self.steps.len())];
        let layers = steps.first().map_or(0, Vec::len);
        (0..layers)
            .map(|layer| {
                let rows: Vec<&Tensor> = steps.iter().map(|q| &q[layer]).collect();
                Ok(Tensor::cat(&rows, 0)?)
            })
            .collect()
    }
}

fn feed(
    input: &ScorerInput,
    cache: &mut Cache,
    tokens: &[u32],
    wanted: Wanted,
    capture: Option<&mut Capture>,
) -> Result<Option<Tensor>> {
    let first = cache.next_position().get();
    let positions: Vec<u32> = (first..first + tokens.len() as u32).collect();
    let rows = Rows {
        cache,
        tokens,
        positions: &positions,
        keep: Keep::Commit,
    };
    match capture {
        Some(capture) => input
            .draft
            .forward_capturing(input.cx, rows, wanted, capture),
        None => input.draft.forward_wanted(input.cx, &mut [rows], wanted),
    }
}
