//! What decoding did.

use serde::{Deserialize, Serialize};

/// Counts and times of one decoding.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DecodeStats {
    /// Drafts per cycle that were asked for; 0 is plain decoding.
    pub depth: usize,
    /// Passes of the trunk after the prompt.
    pub cycles: u64,
    /// Tokens that came out of those passes.
    pub tokens: u64,
    /// `tokens / cycles`.
    pub tokens_per_cycle: f64,
    /// Drafts made, by depth.
    pub drafted: Vec<u64>,
    /// Drafts accepted, by depth.
    pub accepted: Vec<u64>,
    /// Seconds in the draft head.
    pub draft_s: f64,
    /// Seconds in the trunk.
    pub verify_s: f64,
    /// Seconds in logits and sampling.
    pub sample_s: f64,
}

impl DecodeStats {
    pub(crate) fn cycle(&mut self, drafted: usize, accepted: usize, tokens: usize) {
        self.cycles += 1;
        self.tokens += tokens as u64;
        self.tokens_per_cycle = self.tokens as f64 / self.cycles as f64;
        let longest = self.drafted.len().max(drafted);
        self.drafted.resize(longest, 0);
        self.accepted.resize(longest, 0);
        self.drafted[..drafted].iter_mut().for_each(|d| *d += 1);
        self.accepted[..accepted].iter_mut().for_each(|a| *a += 1);
    }
}
