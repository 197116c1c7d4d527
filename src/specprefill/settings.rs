//! The settings of sparse prefill.

use serde::{Deserialize, Serialize};

use super::{Keep, OnFailure, Policy, Scorer, Scoring};
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
    /// What scores.
    pub scorer: Scoring,
    /// Tokens at the end that are always kept.
    pub tail: usize,
    /// Chunks on either side of a chunk kept for its score that are kept too, within the budget.
    pub neighbours: usize,
    /// Tokens before every kept run that are kept too, beyond the budget: the convolution of a gated-delta layer reads three
    /// rows back and would see false neighbours.
    pub seam: usize,
    /// What must be kept, by role.
    pub policy: Policy,
    /// What happens when the draft cannot score a prompt.
    pub on_failure: OnFailure,
    /// Whether, and when, a selection is doubted after the target has read it.
    pub gate: Gate,
    /// Rows per pass of the draft's prefill.
    pub prefill_chunk: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            keep: Keep::default(),
            threshold: 8192,
            chunk: 32,
            scorer: Scoring::default(),
            tail: 512,
            neighbours: 0,
            seam: 0,
            policy: Policy::default(),
            on_failure: OnFailure::default(),
            gate: Gate::default(),
            prefill_chunk: 512,
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
        let p = self.gate.min_probability;
        check(
            "gate",
            (0.0..=1.0).contains(&p),
            format!("{p} must be from 0 (off) to 1"),
        )?;
        if let Some(keep) = self.gate.reread {
            keep.validate()?;
        }
        self.scorer.validate()?;
        check(
            "prefill-chunk",
            self.prefill_chunk > 0,
            "0 must be at least 1".into(),
        )?;
        check("chunk", self.chunk > 0, "0 must be at least 1".into())
    }
}

/// Doubts a selection when the target, having read it, finds the draft's first token unlikely. The draft has read the whole
/// prompt, so the two disagree where what matters was dropped; they also disagree where the draft is weak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gate {
    /// The least probability that the target must give to the token which the draft would answer with first; 0 is off. Needs
    /// a scorer that looks ahead.
    pub min_probability: f64,
    /// How much is read then, in place of the doubted selection; `None` is everything.
    pub reread: Option<Keep>,
}
