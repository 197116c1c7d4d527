//! The tokens before a row, and what they do to its logits: penalties, biases, masks.
//!
//! A verified row gets the history that it would have had in plain decoding, its predecessors' drafts included, so the filters
//! change no token.

use std::collections::HashMap;
use std::sync::Arc;

use super::Sampling;

/// Changes a row's logits by the tokens generated before it: to constrain decoding, set what is not allowed to `-inf`. Must
/// depend on its arguments alone.
#[derive(Clone)]
pub struct LogitsProcessor(Arc<Process>);

type Process = dyn Fn(&[u32], &mut [f32]) + Send + Sync;

impl LogitsProcessor {
    /// From a function of the generated tokens and a row's logits.
    pub fn new(process: impl Fn(&[u32], &mut [f32]) + Send + Sync + 'static) -> Self {
        Self(Arc::new(process))
    }
}

impl std::fmt::Debug for LogitsProcessor {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("LogitsProcessor")
    }
}

impl PartialEq for LogitsProcessor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Prompt and generated tokens, counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    tokens: Vec<u32>,
    prompt: usize,
    /// In the prompt, in the generated text.
    counts: HashMap<u32, [u32; 2]>,
}

impl History {
    pub(crate) fn new(prompt: &[u32]) -> Self {
        let mut history = Self {
            tokens: prompt.to_vec(),
            prompt: prompt.len(),
            counts: HashMap::new(),
        };
        for token in prompt {
            history.counts.entry(*token).or_default()[0] += 1;
        }
        history
    }

    /// Prompt and generated tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.counts.entry(token).or_default()[1] += 1;
    }

    /// Forgets the last `n` generated tokens.
    pub(crate) fn pop(&mut self, n: usize) {
        let keep = self.tokens.len().saturating_sub(n).max(self.prompt);
        for token in self.tokens.drain(keep..) {
            if let Some(counts) = self.counts.get_mut(&token) {
                counts[1] -= 1;
            }
        }
    }

    /// Whether [`adjust`](Self::adjust) would change anything.
    pub(crate) fn matters(sampling: &Sampling, processor: Option<&LogitsProcessor>) -> bool {
        sampling.repetition_penalty != 1.0
            || sampling.presence_penalty != 0.0
            || sampling.frequency_penalty != 0.0
            || !sampling.logit_bias.is_empty()
            || processor.is_some()
    }

    /// Applies penalties, biases and the processor, in this order.
    pub(crate) fn adjust(
        &self,
        sampling: &Sampling,
        processor: Option<&LogitsProcessor>,
        logits: &mut [f32],
    ) {
        let repetition = sampling.repetition_penalty;
        let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
        if repetition != 1.0 || presence != 0.0 || frequency != 0.0 {
            for (token, [prompt, generated]) in &self.counts {
                let Some(logit) = logits.get_mut(*token as usize) else {
                    continue;
                };
                if repetition != 1.0 && prompt + generated > 0 {
                    *logit = match *logit > 0.0 {
                        true => *logit / repetition,
                        false => *logit * repetition,
                    };
                }
                if *generated > 0 {
                    *logit -= presence + frequency * *generated as f32;
                }
            }
        }
        for (token, bias) in &sampling.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if let Some(processor) = processor {
            processor.0(&self.tokens[self.prompt..], logits);
        }
    }
}
