//! What can score a prompt's tokens: the trait, the built-in choices, and two controls that read nothing.

use std::fmt::Debug;
use std::str::FromStr;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{AttentionScorer, Progress};
use crate::error::{Error, Result};
use crate::ops::Context;
use crate::qwen3_5::Model;

/// What a scorer reads.
pub struct ScorerInput<'a> {
    /// The draft model.
    pub draft: &'a Model,
    /// For its ops.
    pub cx: &'a Context,
    /// The prompt.
    pub tokens: &'a [u32],
    /// Rows per pass of the draft.
    pub prefill_chunk: usize,
}

/// What scoring found and what it cost.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Per prompt token, finite and not negative; only the order and the proportions matter.
    pub importance: Vec<f32>,
    /// The tokens that the draft would answer with, as far as it looked ahead.
    pub lookahead: Vec<u32>,
    /// Seconds that the draft took to read the prompt.
    pub prefill_s: f64,
    /// Seconds that looking ahead and scoring took.
    pub lookahead_s: f64,
}

/// Says how much each token of a prompt matters. The same input must give the same scores: whatever is random takes a seed.
pub trait Scorer: Debug + Send + Sync {
    /// Names the scorer and every parameter that changes its scores; memos tell selections apart by it.
    fn id(&self) -> String;

    /// Refuses parameters out of range.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// Scores every token; `progress` hears how far it is.
    fn score(&self, input: &ScorerInput, progress: &mut dyn FnMut(Progress)) -> Result<Scores>;
}

/// The built-in scorers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// By the draft's attention; the default is [`AttentionScorer::look_ahead_wide`].
    Attention(AttentionScorer),
    /// At random: a control, which shows what a task is worth as a test.
    Random {
        /// Seed of the scores.
        seed: u64,
    },
    /// Spread evenly over the prompt: the other control.
    Uniform,
}

impl Default for Scoring {
    fn default() -> Self {
        Self::Attention(AttentionScorer::default())
    }
}

impl Scoring {
    /// The scorer.
    pub fn scorer(&self) -> &dyn Scorer {
        match self {
            Self::Attention(scorer) => scorer,
            Self::Random { .. } | Self::Uniform => self,
        }
    }
}

impl Scorer for Scoring {
    fn id(&self) -> String {
        match self {
            Self::Attention(scorer) => scorer.id(),
            Self::Random { seed } => format!("random:{seed}"),
            Self::Uniform => "uniform".into(),
        }
    }

    fn validate(&self) -> Result<()> {
        match self {
            Self::Attention(scorer) => scorer.validate(),
            _ => Ok(()),
        }
    }

    fn score(&self, input: &ScorerInput, progress: &mut dyn FnMut(Progress)) -> Result<Scores> {
        let start = Instant::now();
        let n = input.tokens.len();
        let importance = match self {
            Self::Attention(scorer) => return scorer.score(input, progress),
            Self::Random { seed } => (0..n as u64).map(|i| unit(mix(seed ^ mix(i)))).collect(),
            // Halves, then quarters, then eighths …: however many chunks are kept, they are spread.
            Self::Uniform => (0..n as u32).map(|i| 1.0 - spread(i / SPREAD)).collect(),
        };
        Ok(Scores {
            importance,
            prefill_s: start.elapsed().as_secs_f64(),
            ..Default::default()
        })
    }
}

/// Tokens that get one score when they are spread evenly: a chunk of the default size.
const SPREAD: u32 = 32;

/// Radical inverse in base 2, in [0, 1).
fn spread(i: u32) -> f32 {
    (i.reverse_bits() >> 8) as f32 / (1 << 24) as f32
}

/// SplitMix64's finalizer.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn unit(x: u64) -> f32 {
    (x >> 40) as f32 / (1 << 24) as f32
}

impl FromStr for Scoring {
    type Err = Error;

    /// `look-ahead-wide` (the default), `look-ahead` (as published), `tail-window`, `spec-pc`, `random` (or `random:SEED`) or `uniform`.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::Option {
            name: "scorer",
            what: format!("{text:?} is none of look-ahead-wide, look-ahead, tail-window, spec-pc, random, random:SEED, uniform"),
        }
        };
        Ok(match text {
            "look-ahead-wide" => Self::Attention(AttentionScorer::look_ahead_wide()),
            "look-ahead" => Self::Attention(AttentionScorer::look_ahead()),
            "tail-window" => Self::Attention(AttentionScorer::tail_window()),
            "spec-pc" => Self::Attention(AttentionScorer::spec_pc()),
            "random" => Self::Random { seed: 0 },
            "uniform" => Self::Uniform,
            _ => {
                let seed = text.strip_prefix("random:").ok_or_else(bad)?;
                let seed = seed.parse().map_err(|_| bad())?;
                Self::Random { seed }
            }
        })
    }
}
