//! The settings of sparse prefill.

use serde::{Deserialize, Serialize};

use super::{Keep, Policy};
use crate::error::{Error, Result};

/// How rows are chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Whether sparse prefill may be used at all.
    pub enabled: bool,
    /// How much of the prompt is kept.
    pub keep: Keep,
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
    /// Chunks on either side of a chunk kept for its score that are kept too, within the budget.
    pub neighbours: usize,
    /// What must be kept, by role.
    pub policy: Policy,
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
            keep: Keep::default(),
            threshold: 8192,
            chunk: 32,
            pool: 13,
            lookahead: 8,
            tail: 512,
            neighbours: 0,
            policy: Policy::default(),
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
        self.keep.validate()?;
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
