//! What decoding did.

use serde::{Deserialize, Serialize};

/// Where emitted tokens came from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenSources {
    /// Drawn from the prompt's last row.
    pub first: u64,
    /// Right drafts of the head.
    pub draft: u64,
    /// Right tokens that were copied from prompt or text.
    pub copy: u64,
    /// Drawn where a draft was wrong.
    pub correction: u64,
    /// Drawn after drafts that were all right; in plain decoding every token.
    pub bonus: u64,
}

/// Counts and times of one decoding. Times of passes that several sequences shared are those of the whole pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DecodeStats {
    /// The most drafts per cycle; 0 is plain decoding.
    pub depth: usize,
    /// Passes of the trunk after the prompt.
    pub cycles: u64,
    /// Tokens that came out of those passes.
    pub tokens: u64,
    /// `tokens / cycles`.
    pub tokens_per_cycle: f64,
    /// Cycles by the number of drafts that the head was asked for.
    pub depths: Vec<u64>,
    /// Drafts of the head made, by depth.
    pub drafted: Vec<u64>,
    /// Drafts of the head accepted, by depth.
    pub accepted: Vec<u64>,
    /// Accepted drafts of the head over made ones.
    pub acceptance: f64,
    /// Tokens copied from prompt or text that were judged.
    pub copied: u64,
    /// Where the tokens came from.
    pub sources: TokenSources,
    /// How often speculation went to rest because plain decoding was faster.
    pub parks: u64,
    /// Tokens decoded at rest.
    pub parked_tokens: u64,
    /// Seconds at rest.
    pub parked_s: f64,
    /// Rows that the draft head had seen when decoding began.
    pub primed_rows: u64,
    /// Seconds in the draft head.
    pub draft_s: f64,
    /// Seconds in the trunk.
    pub verify_s: f64,
    /// Seconds in logits and sampling.
    pub sample_s: f64,
    /// Seconds in accepting rows and keeping the draft head complete.
    pub accept_s: f64,
    /// Seconds in everything else of a cycle.
    pub other_s: f64,
}

impl DecodeStats {
    pub(crate) fn chose(&mut self, depth: usize) {
        if self.depths.len() <= depth {
            self.depths.resize(depth + 1, 0);
        }
        self.depths[depth] += 1;
    }

    /// A cycle with `drafted` judged drafts, the first `accepted` of them right, that emitted `tokens`; `whole` if the text did
    /// not end inside the right drafts.
    pub(crate) fn cycle(
        &mut self,
        drafted: usize,
        accepted: usize,
        tokens: usize,
        copied: bool,
        whole: bool,
    ) {
        self.cycles += 1;
        self.tokens += tokens as u64;
        self.tokens_per_cycle = self.tokens as f64 / self.cycles as f64;
        match (whole, accepted < drafted) {
            (false, _) => {}
            (true, true) => self.sources.correction += 1,
            (true, false) => self.sources.bonus += 1,
        }
        if copied {
            self.copied += drafted as u64;
            self.sources.copy += accepted as u64;
            return;
        }
        self.sources.draft += accepted as u64;
        let longest = self.drafted.len().max(drafted);
        self.drafted.resize(longest, 0);
        self.accepted.resize(longest, 0);
        self.drafted[..drafted].iter_mut().for_each(|d| *d += 1);
        self.accepted[..accepted].iter_mut().for_each(|a| *a += 1);
        let sum = |counts: &[u64]| counts.iter().sum::<u64>() as f64;
        self.acceptance = sum(&self.accepted) / sum(&self.drafted).max(1.0);
    }
}
