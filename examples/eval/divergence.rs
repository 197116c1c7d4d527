//! How far the target's predictions move when tokens are dropped: on plain text, over the last rows, which are always kept.

use anyhow::Result;
use candle_core::{DType, Tensor, D};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::{GenerateOptions, SpecPrefillPipeline};
use candle_specprefill::qwen3_5::{Keep as Commit, Model, Rows, Wanted};
use candle_specprefill::specprefill::{Keep, Scoring};
use serde::Serialize;

/// Rows whose predictions are compared.
const ROWS: usize = 64;

/// The divergence of one choice.
#[derive(Clone, Debug, Serialize)]
pub struct Divergence {
    pub scorer: String,
    pub keep: Keep,
    /// Share of the prompt that was kept.
    pub share: f64,
    /// Mean Kullback-Leibler divergence from full prefill, nats.
    pub kl: f64,
    /// Share of rows with the same most likely token.
    pub same_top: f64,
}

/// Compares every scorer and share with full prefill.
pub fn measure(
    pipeline: &SpecPrefillPipeline,
    tokens: &[u32],
    scorers: &[(String, Scoring)],
    keeps: &[Keep],
    options: &GenerateOptions,
) -> Result<Vec<Divergence>> {
    let target = pipeline.target();
    let all: Vec<u32> = (0..tokens.len() as u32).collect();
    let full = log_probabilities(target, tokens, &all)?;
    let mut out = vec![];
    if pipeline.draft().is_none() || tokens.len() <= options.specprefill.threshold {
        return Ok(out);
    }
    for (name, scoring) in scorers {
        for keep in keeps {
            let mut options = options.clone();
            options.specprefill.scorer = scoring.clone();
            options.specprefill.keep = *keep;
            let selected = pipeline.select(tokens.to_vec(), &options)?;
            let Some(selection) = selected.selection else {
                continue;
            };
            let sparse = log_probabilities(target, tokens, &selection.kept)?;
            let kl = ((full.exp()? * (&full - &sparse)?)?.sum(1)?).mean(0)?;
            let top = |t: &Tensor| -> Result<Vec<u32>> { Ok(t.argmax(D::Minus1)?.to_vec1()?) };
            let (a, b) = (top(&full)?, top(&sparse)?);
            let same = a.iter().zip(&b).filter(|(a, b)| a == b).count();
            out.push(Divergence {
                scorer: name.clone(),
                keep: *keep,
                share: selection.share(),
                kl: kl.to_scalar::<f32>()? as f64,
                same_top: same as f64 / a.len() as f64,
            });
        }
    }
    Ok(out)
}

/// `[ROWS, vocab]` of the last rows.
fn log_probabilities(model: &Model, tokens: &[u32], kept: &[u32]) -> Result<Tensor> {
    let cx = Context::default();
    let mut cache = model.new_cache()?;
    let (body, end) = kept.split_at(kept.len().saturating_sub(ROWS));
    let mut pass = |rows: &[u32], wanted| {
        let part: Vec<u32> = rows.iter().map(|i| tokens[*i as usize]).collect();
        let rows = Rows {
            cache: &mut cache,
            tokens: &part,
            positions: rows,
            keep: Commit::Commit,
        };
        model.forward_wanted(&cx, &mut [rows], wanted)
    };
    for part in body.chunks(512) {
        pass(part, Wanted::Nothing)?;
    }
    let hidden = pass(end, Wanted::All)?;
    let hidden = hidden.ok_or_else(|| anyhow::anyhow!("no rows"))?;
    let logits = model.logits(&cx, &hidden)?.to_dtype(DType::F32)?;
    Ok(candle_nn::ops::log_softmax(&logits, D::Minus1)?)
}
