//! How one answer is generated. Every setting is resolved here and nowhere else.

use std::ops::Range;

use crate::mtp::Sampling;
use crate::specprefill::Settings;
use crate::{Error, Result};

/// Settings of one [`generate`](super::SpecPrefillPipeline::generate) call.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to generate; the model's context may end the answer earlier.
    pub max_tokens: usize,
    /// How tokens are drawn; greedy by default.
    pub sampling: Sampling,
    /// Whether and how SpecPrefill leaves prompt tokens out.
    pub specprefill: Settings,
    /// Tokens of the prompt, as indices, that SpecPrefill may never drop. [`Message::keep`](super::Message::keep) marks text.
    pub keep: Vec<Range<usize>>,
    /// Tokens drafted per cycle by the MTP head, at most 8; 0 is plain decoding.
    pub mtp_depth: usize,
    /// Texts that end the answer (they are not part of it).
    pub stop: Vec<String>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: Sampling::default(),
            specprefill: Settings::default(),
            keep: Vec::new(),
            mtp_depth: 3,
            stop: Vec::new(),
        }
    }
}

impl GenerateOptions {
    /// Refuses values out of range.
    pub fn validate(&self) -> Result<()> {
        self.sampling.validate()?;
        self.specprefill.validate()?;
        let refuse = |name, what: &str| {
            Err(Error::Option {
                name,
                what: what.into(),
            })
        };
        if self.max_tokens == 0 {
            return refuse("max-tokens", "0 tokens is no answer; ask for 1 or more");
        }
        if self.mtp_depth > 8 {
            return refuse("mtp-depth", "must be from 0 (off) to 8");
        }
        if self.stop.iter().any(String::is_empty) {
            return refuse("stop", "an empty text would end every answer at once");
        }
        Ok(())
    }
}
