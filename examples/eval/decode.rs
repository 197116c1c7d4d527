//! Decode speed after a sparse prefill beside that after a dense one of as many rows: nothing of decoding may depend on how
//! the prompt was read.

use std::time::Instant;

use anyhow::{Context as _, Result};
use candle_specprefill::mtp::{prefill, PrefillOptions};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::{GenerateOptions, SpecPrefillPipeline};
use candle_specprefill::qwen3_5::{Cache, Keep, Model, Rows};
use serde::Serialize;

/// Tokens decoded after either.
const TOKENS: usize = 48;

/// Medians of one run, the two taking turns token by token.
#[derive(Clone, Debug, Serialize)]
pub struct Decode {
    /// Rows in either cache after the prompt.
    pub rows: usize,
    /// Tokens of the prompt that was read sparsely.
    pub prompt_tokens: usize,
    /// Median seconds per token after the sparse prefill.
    pub sparse_s: f64,
    /// Median seconds per token after the dense one.
    pub dense_s: f64,
    /// Whether both took the same kernels as often.
    pub same_routes: bool,
}

/// Measures it on a prompt of plain text; nothing without a draft.
pub fn measure(
    pipeline: &SpecPrefillPipeline,
    tokens: &[u32],
    options: &GenerateOptions,
) -> Result<Option<Decode>> {
    let Some(selection) = pipeline.select(tokens.to_vec(), options)?.selection else {
        return Ok(None);
    };
    let (model, rows) = (pipeline.target(), selection.kept.len());
    let read = |tokens: &[u32], kept: Option<&[u32]>| -> Result<Cache> {
        let (mut cache, cx) = (model.new_cache()?, Context::default());
        let options = PrefillOptions {
            prime: false,
            ..Default::default()
        };
        prefill(model, &cx, &mut cache, tokens, kept, &options, &mut |_| {})?;
        Ok(cache)
    };
    let mut caches = [
        read(tokens, Some(&selection.kept))?,
        read(&tokens[..rows], None)?,
    ];
    let contexts = [Context::default(), Context::default()];
    let mut times = [vec![], vec![]];
    for token in tokens.iter().take(TOKENS) {
        for (i, cache) in caches.iter_mut().enumerate() {
            let start = Instant::now();
            step(model, &contexts[i], cache, *token)?;
            times[i].push(start.elapsed().as_secs_f64());
        }
    }
    let [sparse_s, dense_s] = times.map(|mut t| {
        t.sort_by(f64::total_cmp);
        t[t.len() / 2]
    });
    Ok(Some(Decode {
        rows,
        prompt_tokens: tokens.len(),
        sparse_s,
        dense_s,
        same_routes: contexts[0].routes().snapshot() == contexts[1].routes().snapshot(),
    }))
}

fn step(model: &Model, cx: &Context, cache: &mut Cache, token: u32) -> Result<()> {
    let position = cache.next_position().get();
    let rows = Rows {
        cache,
        tokens: &[token],
        positions: &[position],
        keep: Keep::Commit,
    };
    let hidden = model.forward(cx, &mut [rows])?;
    let logits = model.logits(cx, &hidden)?;
    // On a device the work ends with the read.
    let read: Vec<f32> = logits
        .to_dtype(candle_core::DType::F32)?
        .flatten_all()?
        .to_vec1()?;
    read.first().map(drop).context("no logits")
}
