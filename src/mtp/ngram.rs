//! Drafts without a model: what followed the same words before.

use std::collections::HashMap;

/// Proposes tokens that may come next. Verification makes any proposal safe; a bad one costs time.
pub trait Drafter: Send {
    /// At most `max` tokens that may follow `tokens` (the prompt and everything generated); none when nothing is credible.
    fn propose(&mut self, tokens: &[u32], max: usize) -> Vec<u32>;

    /// How many of the last proposal's tokens were right.
    fn observe(&mut self, proposed: usize, accepted: usize);
}

/// Tokens that must agree before a place is looked at.
const KEY: usize = 3;
/// Tokens that must agree before a place is believed.
const NEEDED: usize = 8;
/// Agreement that is looked for at most.
const LONGEST: usize = 64;
/// Places that are looked at, newest first.
const CANDIDATES: usize = 16;
/// Proposals in a row without a right token, and the calls that it then stays quiet, doubling.
const PATIENCE: u32 = 2;
const QUIET: [u32; 2] = [16, 1024];

/// Prompt lookup: finds the longest earlier text that ends as the tokens end, and proposes what followed it (Saxena, 2023).
#[derive(Clone, Debug, Default)]
pub struct NGram {
    /// Where each run of `KEY` tokens ends, in order.
    places: HashMap<[u32; KEY], Vec<u32>>,
    indexed: usize,
    failures: u32,
    quiet: u32,
    rest: u32,
}

impl NGram {
    fn index(&mut self, tokens: &[u32]) {
        if tokens.len() < self.indexed {
            *self = Self::default();
        }
        // The run at the very end would find itself.
        for end in self.indexed.max(KEY)..tokens.len() {
            if let Ok(key) = tokens[end - KEY..end].try_into() {
                self.places.entry(key).or_default().push(end as u32);
            }
        }
        self.indexed = tokens.len().max(self.indexed);
    }
}

impl Drafter for NGram {
    fn propose(&mut self, tokens: &[u32], max: usize) -> Vec<u32> {
        self.index(tokens);
        if self.quiet > 0 {
            self.quiet -= 1;
            return vec![];
        }
        let Some(Ok(key)) = tokens
            .len()
            .checked_sub(KEY)
            .map(|at| <[u32; KEY]>::try_from(&tokens[at..]))
        else {
            return vec![];
        };
        let agreement = |end: usize| {
            let before = tokens[..end].iter().rev();
            before
                .zip(tokens.iter().rev())
                .take(LONGEST)
                .take_while(|(a, b)| a == b)
                .count()
        };
        let places = self.places.get(&key).map_or(&[][..], Vec::as_slice);
        let best = places
            .iter()
            .rev()
            .take(CANDIDATES)
            .map(|end| *end as usize)
            .filter(|end| *end < tokens.len())
            .map(|end| (agreement(end), end))
            .max();
        match best {
            Some((agreement, end)) if agreement >= NEEDED => {
                tokens[end..].iter().take(max).copied().collect()
            }
            _ => vec![],
        }
    }

    fn observe(&mut self, proposed: usize, accepted: usize) {
        if proposed == 0 {
            return;
        }
        if accepted > 0 {
            (self.failures, self.rest) = (0, 0);
            return;
        }
        self.failures += 1;
        if self.failures >= PATIENCE {
            self.rest = (self.rest * 2).clamp(QUIET[0], QUIET[1]);
            (self.failures, self.quiet) = (0, self.rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposes_what_followed_the_longest_match() {
        let text: Vec<u32> = (100..140).collect();
        let mut tokens = text.clone();
        tokens.extend([1, 2, 3]);
        tokens.extend(&text[..12]);
        let mut drafter = NGram::default();
        assert_eq!(drafter.propose(&tokens, 5), text[12..17]);
        // It goes on from where it is, and never past the end.
        tokens.extend(&text[12..39]);
        assert_eq!(drafter.propose(&tokens, 5), [139, 1, 2, 3, 100]);
        // Too short an agreement is not believed.
        tokens.extend([7, 100, 101, 102, 103]);
        assert_eq!(drafter.propose(&tokens, 5), [0u32; 0]);
        assert_eq!(NGram::default().propose(&[1, 2], 5), [0u32; 0]);
        assert_eq!(NGram::default().propose(&[], 5), [0u32; 0]);
    }

    #[test]
    fn rests_after_failures() {
        let tokens: Vec<u32> = (0..20).chain(0..10).collect();
        let mut drafter = NGram::default();
        let mut proposals = 0;
        for _ in 0..200 {
            let n = drafter.propose(&tokens, 4).len();
            proposals += (n > 0) as u32;
            drafter.observe(n, 0);
        }
        assert!(proposals < 12, "{proposals}");
    }
}
