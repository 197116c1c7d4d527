//! How one answer is generated. Every setting is resolved here and nowhere else.

use std::ops::Range;

use crate::mtp::{Acceptance, Depth, LogitsProcessor, Sampling};
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
    /// Tokens drafted per cycle by the MTP head: as many as pay by default.
    pub mtp_depth: Depth,
    /// How drafts are judged; by default the text is plain decoding's.
    pub acceptance: Acceptance,
    /// Whether drafts are also copied from prompt and text where those repeat.
    pub copy: bool,
    /// Changes logits by what was generated, for constrained decoding.
    pub processor: Option<LogitsProcessor>,
    /// Texts that end the answer (they are not part of it).
    pub stop: Vec<String>,
    /// Tools, thinking and other variables of the chat template.
    #[cfg(feature = "chat")]
    pub template: super::TemplateOptions,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: Sampling::default(),
            specprefill: Settings::default(),
            keep: Vec::new(),
            mtp_depth: Depth::default(),
            acceptance: Acceptance::default(),
            copy: true,
            processor: None,
            stop: Vec::new(),
            #[cfg(feature = "chat")]
            template: Default::default(),
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
        self.mtp_depth.validate()?;
        if self.stop.iter().any(String::is_empty) {
            return refuse("stop", "an empty text would end every answer at once");
        }
        Ok(())
    }
}
