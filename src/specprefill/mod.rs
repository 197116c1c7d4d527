//! SpecPrefill: a small draft model reads the long prompt and picks the rows that the large one prefills.
//!
//! Lossy by design: the target never sees what is dropped, so what was dropped, and why, is always reported.

mod admit;
mod attention;
mod draft;
mod draft_pass;
mod keep;
mod memo;
mod report;
mod scorer;
mod select;
mod settings;
mod spans;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ops::{memory, Context};
use crate::qwen3_5::Model;

pub use admit::{admit, OnFailure, Reason};
pub use attention::{AttentionScorer, Join};
pub use draft::check_draft;
pub use keep::{Costs, Keep};
pub use memo::ScoreMemo;
pub use report::Report;
pub use scorer::{Scorer, ScorerInput, Scores, Scoring};
pub use select::{kept_rows, select_chunks, Chunk, Kept};
pub use settings::{Gate, Settings};
pub use spans::{union, Policy, Required, Role, Rule, Span};

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
    /// Rows that the settings allowed; `None` where the scores decided.
    pub budget: Option<usize>,
    /// What was kept whatever it scored.
    pub required: Vec<Required>,
    /// Every chunk, with its score and why it was kept.
    pub chunks: Vec<Chunk>,
    /// What the draft would answer with, as far as the scorer looked ahead.
    #[serde(default)]
    pub lookahead: Vec<u32>,
    /// Seconds that the draft took to read the prompt.
    pub scoring_s: f64,
    /// Seconds that looking ahead took.
    pub lookahead_s: f64,
}

impl Selection {
    /// Share of the prompt that is kept.
    pub fn share(&self) -> f64 {
        self.kept.len() as f64 / self.total.max(1) as f64
    }

    /// Tokens that were kept whatever they scored.
    pub fn required_tokens(&self) -> usize {
        let ranges = self.required.iter().map(|r| r.tokens.clone());
        union(ranges, self.total).iter().map(|r| r.len()).sum()
    }

    /// Whether more had to be kept than the settings allowed.
    pub fn over_budget(&self) -> bool {
        self.budget
            .is_some_and(|budget| self.required_tokens() > budget)
    }
}

/// Scores a prompt with the draft and selects its rows; `required` ones are always kept, and so are the tail and the last.
pub fn choose(
    draft: &Model,
    cx: &Context,
    tokens: &[u32],
    required: &[Required],
    settings: &Settings,
    progress: &mut dyn FnMut(Progress),
) -> Result<Selection> {
    choose_by(
        settings.scorer.scorer(),
        draft,
        cx,
        tokens,
        required,
        settings,
        progress,
    )
}

/// [`choose`] by a scorer of one's own.
pub fn choose_by(
    scorer: &dyn Scorer,
    draft: &Model,
    cx: &Context,
    tokens: &[u32],
    required: &[Required],
    settings: &Settings,
    progress: &mut dyn FnMut(Progress),
) -> Result<Selection> {
    settings.validate()?;
    let input = ScorerInput {
        draft,
        cx,
        tokens,
        prefill_chunk: settings.prefill_chunk,
    };
    Ok(select(
        &score(scorer, &input, progress)?,
        required,
        settings,
    ))
}

/// Scores a prompt, and refuses scores that are not one per token, finite and not negative.
pub fn score(
    scorer: &dyn Scorer,
    input: &ScorerInput,
    progress: &mut dyn FnMut(Progress),
) -> Result<Scores> {
    scorer.validate()?;
    let scores = memory::pooled(|| scorer.score(input, progress))?;
    memory::settle(input.draft.device())?;
    let (found, tokens) = (scores.importance.len(), input.tokens.len());
    if found != tokens {
        let what = format!("the scorer gave {found} scores for {tokens} tokens");
        return Err(Error::Draft(what));
    }
    let bad = |s: &f32| !s.is_finite() || *s < 0.0;
    if let Some(at) = scores.importance.iter().position(bad) {
        let what = format!(
            "the scorer gave token {at} the score {}: scores must be finite and not negative",
            scores.importance[at]
        );
        return Err(Error::Draft(what));
    }
    Ok(scores)
}

/// Selects rows by scores. Pure.
pub fn select(scores: &Scores, required: &[Required], settings: &Settings) -> Selection {
    let total = scores.importance.len();
    let mut ranges: Vec<Range<usize>> = required.iter().map(|r| r.tokens.clone()).collect();
    // The last row's hidden state gives the first token.
    ranges.push(total.saturating_sub(1)..total);
    let chunks = select_chunks(&scores.importance, &ranges, settings);
    if settings.seam > 0 {
        let kept = chunks.iter().filter(|c| c.kept.is_some());
        let starts = kept.map(|c| c.start as usize).collect::<Vec<_>>();
        let starts = starts
            .into_iter()
            .chain(ranges.clone().into_iter().map(|r| r.start));
        let seams = starts.map(|s| s.saturating_sub(settings.seam)..s);
        ranges.extend(seams.collect::<Vec<_>>());
    }
    Selection {
        kept: kept_rows(&chunks, &ranges),
        total,
        budget: select::budget_tokens(settings, &chunks),
        required: required.to_vec(),
        chunks,
        lookahead: scores.lookahead.clone(),
        scoring_s: scores.prefill_s,
        lookahead_s: scores.lookahead_s,
    }
}
