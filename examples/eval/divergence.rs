//! How far the target's predictions move when tokens are dropped: on plain text, over the last rows, which are always kept.

use anyhow::Result;
use candle_core::{DType, Tensor, D};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::{GenerateOptions, SpecPrefillPipeline};
use candle_specprefill::qwen3_5::{Keep as Commit, Model, Rows, Wanted};
use candle_specprefill::specprefill::{Keep, Scoring, Selection};
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

/// Compares every scorer and share with full prefill; then, for the first of each, rows kept before every run (`seam`) with the
/// same rows spent on the next best chunks.
pub fn measure(
    pipeline: &SpecPrefillPipeline,
    texts: &[Vec<u32>],
    scorers: &[(String, Scoring)],
    keeps: &[Keep],
    options: &GenerateOptions,
) -> Result<Vec<Divergence>> {
    let target = pipeline.target();
    let threshold = options.specprefill.threshold;
    let mut sums: Vec<Divergence> = vec![];
    if pipeline.draft().is_none() || texts.iter().any(|t| t.len() <= threshold) {
        return Ok(sums);
    }
    for tokens in texts {
        let all: Vec<u32> = (0..tokens.len() as u32).collect();
        let full = log_probabilities(target, tokens, &all)?;
        let mut found = vec![];
        let mut compare = |name: &str, keep: Keep, kept: &[u32]| -> Result<()> {
            let sparse = log_probabilities(target, tokens, kept)?;
            let kl = ((full.exp()? * (&full - &sparse)?)?.sum(1)?).mean(0)?;
            let top = |t: &Tensor| -> Result<Vec<u32>> { Ok(t.argmax(D::Minus1)?.to_vec1()?) };
            let (a, b) = (top(&full)?, top(&sparse)?);
            let same = a.iter().zip(&b).filter(|(a, b)| a == b).count();
            found.push(Divergence {
                scorer: name.into(),
                keep,
                share: kept.len() as f64 / tokens.len() as f64,
                kl: kl.to_scalar::<f32>()? as f64,
                same_top: same as f64 / a.len() as f64,
            });
            Ok(())
        };
        let select = |scoring: &Scoring, keep, seam| -> Result<Option<Selection>> {
            let mut options = options.clone();
            options.specprefill.scorer = scoring.clone();
            options.specprefill.keep = keep;
            options.specprefill.seam = seam;
            Ok(pipeline.select(tokens.clone(), &options)?.selection)
        };
        for (name, scoring) in scorers {
            for keep in keeps {
                if let Some(selection) = select(scoring, *keep, options.specprefill.seam)? {
                    compare(name, *keep, &selection.kept)?;
                }
            }
        }
        let (Some((name, scoring)), Some(keep)) = (scorers.first(), keeps.first()) else {
            continue;
        };
        let Some(plain) = select(scoring, *keep, 0)? else {
            continue;
        };
        compare(&format!("{name}, seam 0"), *keep, &plain.kept)?;
        for seam in [3, 8] {
            let Some(selection) = select(scoring, *keep, seam)? else {
                continue;
            };
            compare(&format!("{name}, seam {seam}"), *keep, &selection.kept)?;
            let rows = with_rows(&plain, selection.kept.len());
            let same = format!("{name}, seam 0 with the rows of seam {seam}");
            compare(&same, *keep, &rows)?;
        }
        match sums.is_empty() {
            true => sums = found,
            false => {
                for (sum, more) in sums.iter_mut().zip(found) {
                    sum.share += more.share;
                    sum.kl += more.kl;
                    sum.same_top += more.same_top;
                }
            }
        }
    }
    let n = texts.len().max(1) as f64;
    for sum in &mut sums {
        (sum.share, sum.kl, sum.same_top) = (sum.share / n, sum.kl / n, sum.same_top / n);
    }
    Ok(sums)
}

/// A selection grown to so many rows by the dropped chunks that scored best, the last of them in part.
fn with_rows(selection: &Selection, rows: usize) -> Vec<u32> {
    let mut dropped: Vec<_> = selection
        .chunks
        .iter()
        .filter(|c| c.kept.is_none())
        .collect();
    dropped.sort_by(|a, b| b.score.total_cmp(&a.score));
    let mut kept = selection.kept.clone();
    let next = dropped.iter().flat_map(|c| c.start..c.end);
    let next = next.filter(|i| selection.kept.binary_search(i).is_err());
    kept.extend(next.take(rows.saturating_sub(selection.kept.len())));
    kept.sort_unstable();
    kept
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
