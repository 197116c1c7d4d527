//! Prefilling a prompt's rows at their positions, and priming the draft head on the way.

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::ops::Context;
use crate::qwen3_5::{Cache, DraftRows, Keep, Model, Position, Rows, Wanted};

/// How a prompt is prefilled.
#[derive(Clone, Copy, Debug)]
pub struct PrefillOptions {
    /// Rows per pass.
    pub chunk: usize,
    /// Whether the draft head's cache is primed, where there is a head.
    pub prime: bool,
}

impl Default for PrefillOptions {
    fn default() -> Self {
        Self {
            chunk: 512,
            prime: true,
        }
    }
}

/// Prefills the rows `kept` (sorted indices into `tokens`; `None` is all of them) at the positions that their tokens have
/// after what the cache holds, and returns the hidden state of the last row, `[1, hidden]`. The last token must be
/// kept. The next position becomes the true one, as if no row had been dropped.
///
/// The draft head is primed with each row's hidden state and the prompt's true next token, which may itself be dropped.
/// `progress` hears how many rows are done.
pub fn prefill(
    model: &Model,
    cx: &Context,
    cache: &mut Cache,
    tokens: &[u32],
    kept: Option<&[u32]>,
    options: &PrefillOptions,
    progress: &mut dyn FnMut(usize),
) -> Result<Tensor> {
    let all: Vec<u32>;
    let kept = match kept {
        Some(kept) => kept,
        None => {
            all = (0..tokens.len() as u32).collect();
            &all
        }
    };
    check(tokens, kept, cache, model)?;
    let chunk = options.chunk;
    if chunk == 0 {
        return Err(Error::Option {
            name: "prefill-chunk",
            what: "must be at least 1".into(),
        });
    }
    let base = cache.next_position().get();
    let prime = options.prime && model.has_mtp();
    let (rows_before, primed_before) = (cache.length().get(), cache.draft_rows());
    let mut last = None;
    for (i, part) in kept.chunks(chunk).enumerate() {
        let part_tokens: Vec<u32> = part.iter().map(|k| tokens[*k as usize]).collect();
        let positions: Vec<u32> = part.iter().map(|k| base + k).collect();
        let done = (i * chunk + part.len()).min(kept.len());
        // The draft head reads every row's hidden state; without it only the last row's is wanted.
        let wanted = match done == kept.len() {
            _ if prime => Wanted::All,
            true => Wanted::Last,
            false => Wanted::Nothing,
        };
        let rows = Rows {
            cache: &mut *cache,
            tokens: &part_tokens,
            positions: &positions,
            keep: Keep::Commit,
        };
        let Some(hidden) = model.forward_wanted(cx, &mut [rows], wanted)? else {
            progress(done);
            continue;
        };
        // The prompt's last row waits for the token that will be drawn from it.
        let next = part.iter().map_while(|k| tokens.get(*k as usize + 1));
        let next: Vec<u32> = next.copied().collect();
        if prime && !next.is_empty() {
            let rows = DraftRows {
                cache: &mut *cache,
                tokens: &next,
                hidden: &hidden.narrow(0, 0, next.len())?,
                positions: &positions[..next.len()],
            };
            model.prime(cx, &mut [rows])?;
        }
        last = Some(hidden.narrow(0, hidden.dim(0)? - 1, 1)?);
        progress(done);
    }
    if prime {
        let (rows, primed) = (
            cache.length().get() - rows_before,
            cache.draft_rows() - primed_before,
        );
        if primed + 1 != rows {
            return Err(Error::Cache(format!(
                "{primed} rows of the draft head were primed for {rows} rows"
            )));
        }
    }
    cache.set_next_position(Position::new(base + tokens.len() as u32));
    last.ok_or_else(|| Error::Prompt("empty".into()))
}

fn check(tokens: &[u32], kept: &[u32], cache: &Cache, model: &Model) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::Prompt("empty: there is nothing to answer".into()));
    }
    let limit = model.longest();
    let end = cache.next_position().get() as usize + tokens.len();
    if end > limit {
        return Err(Error::Prompt(format!(
            "{end} tokens are more than the model's {limit} positions (max_position_embeddings, or the context asked for): shorten the prompt"
        )));
    }
    let vocab = model.config().vocab_size;
    if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
        return Err(Error::Prompt(format!(
            "token id {id} is outside the vocabulary of {vocab}"
        )));
    }
    let sorted = kept.windows(2).all(|w| w[0] < w[1]);
    if !sorted || kept.last().map(|k| *k as usize) != Some(tokens.len() - 1) {
        return Err(Error::argument(
            "prefill",
            "kept rows must be sorted, without repeats, and end with the prompt's last row",
        ));
    }
    Ok(())
}
