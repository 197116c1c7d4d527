//! What an answer cost.

use serde::{Deserialize, Serialize};

use crate::mtp::DecodeStats;
pub use crate::mtp::FinishReason;
use crate::ops::routes::RouteCounts;
use crate::specprefill::{Keep, Reason};

/// Counts, times (seconds) and speeds of one answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the rendered prompt, former turns included.
    pub prompt_tokens: usize,
    /// Prompt tokens that former turns of the [`Conversation`](super::Conversation) have read or dropped; the rest is new.
    #[serde(default)]
    pub reused_tokens: usize,
    /// Why those are fewer than the conversation had, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reuse_note: Option<String>,
    /// Of the new prompt tokens those that the target has read.
    pub kept_tokens: usize,
    /// Generated tokens, a stop token included.
    pub completion_tokens: usize,
    /// Why the answer ended.
    pub finish_reason: FinishReason,
    /// From the call to the first token.
    pub time_to_first_token_s: f64,
    /// New prompt tokens (dropped ones included) by time to first token.
    pub prompt_tokens_per_second: f64,
    /// Tokens after the first by the time since the first; 0 when there is only one.
    pub generation_tokens_per_second: f64,
    /// What SpecPrefill did.
    pub specprefill: SpecPrefillUsage,
    /// What MTP decoding did.
    pub mtp: MtpUsage,
    /// Kernel calls by route.
    pub routes: RouteCounts,
}

/// SpecPrefill's part of [`Usage`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpecPrefillUsage {
    /// Whether tokens could be left out.
    pub admitted: bool,
    /// Why, or why not.
    pub reason: Reason,
    /// The same in words, with numbers.
    pub explanation: String,
    /// How much was asked for.
    pub keep: Keep,
    /// Tokens that had to be kept whatever they scored.
    pub required_tokens: usize,
    /// Whether they were more than was asked for.
    pub over_budget: bool,
    /// The probability that the target, having read the selection, gave to the token which the draft would answer with first:
    /// low where something that matters may have been dropped. `None` without a selection or a look-ahead.
    pub agreement: Option<f64>,
    /// Whether the selection was doubted and more was read in its place.
    pub reread: bool,
    /// Whether the prompt had been scored before.
    pub memo: bool,
    /// Tokens at the start that an earlier request had read.
    pub prefix_tokens: usize,
    /// The draft's pass over the prompt, and scoring.
    pub scoring_s: f64,
    /// The draft's look-ahead.
    pub lookahead_s: f64,
    /// The target's pass over the kept tokens.
    pub prefill_s: f64,
}

/// MTP's part of [`Usage`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MtpUsage {
    /// Counts and times.
    #[serde(flatten)]
    pub stats: DecodeStats,
    /// Why the head was not used, if there is something to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}
