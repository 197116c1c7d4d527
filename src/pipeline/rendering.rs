//! Conversations as text, text as tokens, and what each token is.

use std::ops::Range;

use super::guard::{self, Guarded};
use super::spans::{self, RenderedPrompt};
use super::{GenerateOptions, Message, Prompt, SpecPrefillPipeline, TemplateOptions};
use crate::specprefill::Role;
use crate::{Error, Result};

/// A conversation as text.
pub(super) struct Layout {
    pub text: String,
    /// Where each message's content stands, if the template shows it.
    pub contents: Option<Vec<Range<usize>>>,
    roles: Vec<(Role, Range<usize>)>,
    /// Where callers wrote what looks like special tokens and is text.
    pub literal: Vec<Range<usize>>,
}

impl SpecPrefillPipeline {
    /// The tokens of a conversation, and what each of them is.
    pub fn render(&self, messages: &[Message]) -> Result<RenderedPrompt> {
        self.render_with(messages, &TemplateOptions::default())
    }

    /// [`SpecPrefillPipeline::render`] with tools, thinking and other variables of the template.
    pub fn render_with(
        &self,
        messages: &[Message],
        options: &TemplateOptions,
    ) -> Result<RenderedPrompt> {
        self.tokens(messages, options, &self.layout(messages, options)?)
    }

    /// The tokens of a whole conversation.
    pub(super) fn tokens(
        &self,
        messages: &[Message],
        options: &TemplateOptions,
        layout: &Layout,
    ) -> Result<RenderedPrompt> {
        let mut prompt = self.tokens_from(layout, 0)?;
        if let Some([a, b]) = static_probes(messages) {
            let encode = |probe: Vec<Message>| {
                let probe = self.guarded(&probe, options)?;
                Ok::<_, Error>(
                    self.tokenizer()
                        .encode_prompt(&probe.text, &probe.literal)?
                        .0,
                )
            };
            let (a, b) = (encode(a)?, encode(b)?);
            prompt.fixed = common_prefix(&prompt.tokens, &a).min(common_prefix(&a, &b));
        }
        prompt.text.clone_from(&layout.text);
        Ok(prompt)
    }

    /// A conversation as text.
    pub(super) fn layout(&self, messages: &[Message], options: &TemplateOptions) -> Result<Layout> {
        if messages
            .iter()
            .all(|message| message.content.trim().is_empty())
        {
            return Err(Error::Prompt("empty; write a question".into()));
        }
        let Guarded { text, literal } = self.guarded(messages, options)?;
        let contents = spans::locate(self.template(), messages, options, &text);
        Ok(Layout {
            roles: spans::byte_spans(messages, &text, contents.clone()),
            text,
            contents,
            literal,
        })
    }

    fn guarded(&self, messages: &[Message], options: &TemplateOptions) -> Result<Guarded> {
        guard::render(self.template(), self.tokenizer(), messages, options)
    }

    /// The tokens of a conversation from byte `from` of its text on, where a token must begin.
    pub(super) fn tokens_from(&self, layout: &Layout, from: usize) -> Result<RenderedPrompt> {
        let text = layout.text.get(from..).unwrap_or_default();
        let after = |range: &Range<usize>| range.start.max(from) - from..range.end.max(from) - from;
        let literal: Vec<_> = layout.literal.iter().map(after).collect();
        let (tokens, offsets) = self.tokenizer().encode_prompt(text, &literal)?;
        let roles = layout
            .roles
            .iter()
            .map(|(role, range)| (*role, after(range)));
        let roles: Vec<_> = roles.filter(|(_, range)| !range.is_empty()).collect();
        Ok(RenderedPrompt {
            spans: spans::token_spans(&roles, &offsets),
            tokens,
            text: String::new(),
            offsets,
            fixed: 0,
        })
    }

    /// The tokens of a conversation, and how many of them at the start no user turn can change (the system block).
    pub fn tokenize(&self, messages: &[Message]) -> Result<(Vec<u32>, usize)> {
        let prompt = self.render(messages)?;
        Ok((prompt.tokens, prompt.fixed))
    }

    /// A prompt that can be read.
    pub(super) fn prompt(
        &self,
        prompt: Prompt,
        options: &GenerateOptions,
    ) -> Result<RenderedPrompt> {
        let prompt = match prompt {
            Prompt::Messages(messages) => self.render_with(&messages, &options.template)?,
            Prompt::Tokens(tokens) => RenderedPrompt {
                tokens,
                ..Default::default()
            },
        };
        self.check(&prompt.tokens, 0)?;
        Ok(prompt)
    }

    /// Refuses what cannot be read after `before` tokens.
    pub(super) fn check(&self, tokens: &[u32], before: usize) -> Result<()> {
        let config = self.target().config();
        let limit = self.target().longest();
        if tokens.is_empty() {
            return Err(Error::Prompt("empty: no tokens".into()));
        }
        if before + tokens.len() >= limit {
            return Err(Error::Prompt(format!(
                "{} tokens are too many: the model's context is {limit}, and the answer needs room in it",
                before + tokens.len()
            )));
        }
        if let Some(token) = tokens.iter().find(|&&id| id as usize >= config.vocab_size) {
            return Err(Error::Prompt(format!(
                "token {token} is outside the vocabulary of {}",
                config.vocab_size
            )));
        }
        Ok(())
    }
}

/// Two conversations that share exactly the leading system and developer messages, or `None` if there are no such messages or
/// no others. What a prompt has in common with both is the part that no user turn can change.
fn static_probes(messages: &[Message]) -> Option<[Vec<Message>; 2]> {
    let system = |m: &&Message| matches!(m.role.as_str(), "system" | "developer");
    let leading = messages.iter().take_while(system).count();
    if leading == 0 || leading == messages.len() {
        return None;
    }
    Some(["alpha", "0 omega"].map(|text| {
        let mut probe = messages[..leading].to_vec();
        probe.push(Message::user(text));
        probe
    }))
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
