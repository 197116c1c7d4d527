//! Conversations as text, text as tokens, and what each token is.

use std::ops::Range;

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
    /// Whether contents have special tokens, which are text.
    literal: bool,
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
        let tokenizer = self.tokenizer();
        if let Some([a, b]) = self.template().static_renderings(messages, options)? {
            let (a, b) = (tokenizer.encode(&a)?, tokenizer.encode(&b)?);
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
        let (template, tokenizer) = (self.template(), self.tokenizer());
        let text = template.render_with(messages, options)?;
        let contents = spans::locate(template, messages, options, &text);
        let special = match options.special_tokens {
            true => None,
            false => messages
                .iter()
                .find_map(|m| tokenizer.special_in(&m.content)),
        };
        match (&contents, &special) {
            (Some(contents), Some(_)) if self.told(messages, &text, contents) => {}
            (_, Some(token)) => {
                return Err(Error::Prompt(format!(
                    "a message contains the special token {token:?}, and this template does not show where that message begins and ends: remove it, or set TemplateOptions::special_tokens"
                )))
            }
            _ => {}
        }
        Ok(Layout {
            roles: spans::byte_spans(messages, &text, contents.clone()),
            text,
            contents,
            literal: special.is_some(),
        })
    }

    /// The tokens of a conversation from byte `from` of its text on, where a token must begin.
    pub(super) fn tokens_from(&self, layout: &Layout, from: usize) -> Result<RenderedPrompt> {
        let text = layout.text.get(from..).unwrap_or_default();
        let after = |range: &Range<usize>| range.start.max(from) - from..range.end.max(from) - from;
        let (tokens, offsets) = match (layout.literal, &layout.contents) {
            (true, Some(contents)) => {
                let contents: Vec<_> = contents.iter().map(after).collect();
                self.tokenizer().encode_prompt(text, &contents)?
            }
            _ => self.tokenizer().encode_with_offsets(text)?,
        };
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

    /// Whether every message with a special token in its text stands unchanged where it was found: of one that the template
    /// changed, the end is a guess that such a token could mislead.
    fn told(&self, messages: &[Message], text: &str, contents: &[Range<usize>]) -> bool {
        messages.iter().zip(contents).all(|(message, range)| {
            text[range.clone()].trim() == message.content.trim()
                || self.tokenizer().special_in(&message.content).is_none()
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

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
