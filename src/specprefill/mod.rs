//! SpecPrefill: a small draft model reads the long prompt and picks the rows that the large one prefills.
//!
//! Lossy by design: the target never sees what is dropped, so what was dropped, and why, is always reported.

mod score;
mod select;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ops::Context;
use crate::qwen3_5::Model;

pub use score::{score, Scores};
pub use select::{kept_rows, select_chunks, Chunk, Kept};

/// How rows are chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Whether sparse prefill may be used at all.
    pub enabled: bool,
    /// Share of the prompt's chunks to keep; 1 keeps every row.
    pub keep: f64,
    /// Prompts must be longer than this.
    pub threshold: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Width of the average pool over scores; odd.
    pub pool: usize,
    /// Queries that score.
    pub lookahead: usize,
    /// Tokens at the end that are always kept.
    pub tail: usize,
    /// Rows per pass of the draft's prefill.
    pub prefill_chunk: usize,
    /// Whether the last prompt token's query is the first that scores, as in the paper's own code. Otherwise all queries
    /// come from look-ahead tokens.
    pub first_query_is_prompt_end: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            keep: 0.2,
            threshold: 8192,
            chunk: 32,
            pool: 13,
            lookahead: 8,
            tail: 512,
            prefill_chunk: 512,
            first_query_is_prompt_end: false,
        }
    }
}

impl Settings {
    /// Checks the ranges.
    pub fn validate(&self) -> Result<()> {
        let check = |name, ok: bool, what: String| match ok {
            true => Ok(()),
            false => Err(Error::Option { name, what }),
        };
        let k = self.keep;
        check(
            "keep",
            k > 0.0 && k <= 1.0,
            format!("{k} must be in (0, 1]"),
        )?;
        check(
            "pool",
            self.pool % 2 == 1,
            format!("{} must be odd: an even pool would shift scores", self.pool),
        )?;
        check(
            "prefill-chunk",
            self.prefill_chunk > 0,
            "0 must be at least 1".into(),
        )?;
        check("chunk", self.chunk > 0, "0 must be at least 1".into())?;
        check(
            "lookahead",
            self.lookahead > 0,
            "0 must be at least 1".into(),
        )
    }
}

/// Why a prompt is, or is not, prefilled sparsely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It is.
    Admitted,
    /// The settings say no.
    Disabled,
    /// There is no draft model.
    NoDraft,
    /// It is not longer than the threshold.
    TooShort,
    /// The share to keep is 1.
    KeepsAll,
    /// What must be kept is all there is.
    AllMandatory,
    /// The draft could not score it.
    ScoringFailed,
}

/// Whether a prompt of `tokens` tokens, of which the ranges `mandatory` must be kept, is prefilled sparsely.
pub fn admit(
    settings: &Settings,
    has_draft: bool,
    tokens: usize,
    mandatory: &[Range<usize>],
) -> Reason {
    // Ranges may overlap each other and the tail: what must be kept is their union.
    let mut ranges: Vec<&Range<usize>> = mandatory.iter().collect();
    ranges.sort_by_key(|r| r.start);
    let end = tokens.saturating_sub(settings.tail);
    let (mut must, mut upto) = (0, 0);
    for range in ranges {
        let (from, to) = (range.start.max(upto), range.end.min(end));
        must += to.saturating_sub(from);
        upto = upto.max(to);
    }
    match () {
        _ if !settings.enabled => Reason::Disabled,
        _ if !has_draft => Reason::NoDraft,
        _ if settings.keep >= 1.0 => Reason::KeepsAll,
        _ if tokens <= settings.threshold => Reason::TooShort,
        _ if must >= end => Reason::AllMandatory,
        _ => Reason::Admitted,
    }
}

/// What a scoring is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// The draft reads the prompt.
    Scoring {
        /// Rows read.
        done: usize,
        /// Rows in all.
        total: usize,
    },
    /// The draft looks ahead.
    Lookahead {
        /// Steps made.
        done: usize,
        /// Steps in all.
        total: usize,
    },
}

/// The rows to prefill, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Selection {
    /// Sorted indices of the kept rows.
    pub kept: Vec<u32>,
    /// Rows of the prompt.
    pub total: usize,
    /// Every chunk, with its score and why it was kept.
    pub chunks: Vec<Chunk>,
    /// Seconds that the draft took to read the prompt.
    pub scoring_s: f64,
    /// Seconds that looking ahead took.
    pub lookahead_s: f64,
}

/// Scores a prompt with the draft and selects its rows. `mandatory` ranges of tokens, and the tail, are always kept.
pub fn choose(
    draft: &Model,
    cx: &Context,
    tokens: &[u32],
    mandatory: &[Range<usize>],
    settings: &Settings,
    progress: &mut dyn FnMut(Progress),
) -> Result<Selection> {
    let mut cache = draft.new_cache()?;
    let scores = score(draft, cx, &mut cache, tokens, settings, progress)?;
    let mut chunks = select_chunks(&scores.importance, mandatory, settings);
    // The last row's hidden state gives the first token, whatever its chunk scored.
    if let Some(last) = chunks.last_mut() {
        last.kept.get_or_insert(Kept::Tail);
    }
    let kept = kept_rows(&chunks);
    Ok(Selection {
        kept,
        total: tokens.len(),
        chunks,
        scoring_s: scores.prefill_s,
        lookahead_s: scores.lookahead_s,
    })
}
