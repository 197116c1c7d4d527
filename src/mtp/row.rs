//! What a row's logits say, read from the device as its session needs it.

use candle_core::{DType, Tensor};

use super::block::Distribution;
use super::history::History;
use super::session::SessionOptions;
use crate::error::Result;
use crate::ops::{argmax, Context};
use crate::qwen3_5::{DraftVocabulary, Model};

/// A row of a pass.
pub(super) enum Row {
    /// The most likely token, where nothing else counts: the logits stayed where they were.
    Best(Result<u32>),
    /// All of them.
    Logits(Vec<f32>),
}

/// Whether the most likely token is all that a row's logits have to say.
pub(super) fn is_greedy(options: &SessionOptions) -> bool {
    options.sampling.is_greedy() && !History::matters(&options.sampling, options.processor.as_ref())
}

/// The rows of `hidden`; `greedy` says of each whether its most likely token is enough.
pub(super) fn rows(
    model: &Model,
    cx: &Context,
    hidden: &Tensor,
    greedy: &[bool],
) -> Result<Vec<Row>> {
    let logits = model.logits(cx, hidden)?;
    if greedy.iter().all(|g| *g) {
        return best(cx, &logits);
    }
    let others = (0u32..)
        .zip(greedy)
        .filter(|(_, g)| !**g)
        .map(|(row, _)| row);
    let others: Vec<u32> = others.collect();
    if others.len() == greedy.len() {
        return all(&logits);
    }
    let mut others =
        all(&logits.index_select(&Tensor::new(others, logits.device())?, 0)?)?.into_iter();
    let best = best(cx, &logits)?.into_iter().zip(greedy);
    Ok(best
        .filter_map(|(best, greedy)| if *greedy { Some(best) } else { others.next() })
        .collect())
}

/// The row of `hidden`, `[1, hidden]`, over a draft's own vocabulary.
pub(super) fn of_vocabulary(
    model: &Model,
    cx: &Context,
    hidden: &Tensor,
    vocabulary: &DraftVocabulary,
    greedy: bool,
) -> Result<Vec<Row>> {
    if greedy {
        let tokens = model.draft_tokens(cx, hidden, vocabulary)?;
        return Ok(tokens.into_iter().map(Row::Best).collect());
    }
    let logits = model.draft_logits(cx, hidden, vocabulary)?;
    Ok(logits.into_iter().map(Row::Logits).collect())
}

fn best(cx: &Context, logits: &Tensor) -> Result<Vec<Row>> {
    let tokens = argmax::tokens(cx, logits)?;
    Ok(tokens.into_iter().map(Row::Best).collect())
}

fn all(logits: &Tensor) -> Result<Vec<Row>> {
    let logits = logits.to_dtype(DType::F32)?.to_vec2()?;
    Ok(logits.into_iter().map(Row::Logits).collect())
}

impl Row {
    /// The token at `position` after `history`.
    pub fn draw(self, options: &SessionOptions, history: &History, position: u32) -> Result<u32> {
        match self {
            Self::Best(token) => token,
            Self::Logits(mut logits) => {
                adjust(options, history, &mut logits);
                options.sampling.draw(&logits, position)
            }
        }
    }

    /// The filtered distribution after `history`.
    pub fn distribution(self, options: &SessionOptions, history: &History) -> Result<Distribution> {
        match self {
            Self::Best(token) => Ok(vec![(token?, 1.0)]),
            Self::Logits(mut logits) => {
                adjust(options, history, &mut logits);
                options.sampling.distribution(&logits)
            }
        }
    }
}

fn adjust(options: &SessionOptions, history: &History, logits: &mut [f32]) {
    if History::matters(&options.sampling, options.processor.as_ref()) {
        history.adjust(&options.sampling, options.processor.as_ref(), logits);
    }
}
