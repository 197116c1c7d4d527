//! What a caller asks.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or whatever else the model's template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// Parts of `content`, as byte ranges, that SpecPrefill may never drop.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<Range<usize>>,
    /// What else the template knows of a message: `tool_calls`, `reasoning_content`, `name`. Maps keep their order.
    #[cfg(feature = "chat")]
    #[serde(flatten)]
    pub extra: std::collections::BTreeMap<String, super::TemplateValue>,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            keep: Vec::new(),
            #[cfg(feature = "chat")]
            extra: Default::default(),
        }
    }

    /// The result of a tool call, for the template's role `tool`.
    pub fn tool(content: impl Into<String>) -> Self {
        Self::new("tool", content)
    }

    /// Adds a field for the template, such as `tool_calls`.
    #[cfg(feature = "chat")]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<super::TemplateValue>) -> Self {
        self.extra.insert(name.into(), value.into());
        self
    }

    /// Marks every occurrence of `text` in the message as never to be dropped.
    pub fn keep(mut self, text: &str) -> Self {
        let found = self
            .content
            .match_indices(text)
            .filter(|_| !text.is_empty());
        let found: Vec<_> = found.map(|(at, text)| at..at + text.len()).collect();
        self.keep.extend(found);
        self
    }

    /// A user's message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// A system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }
}

impl From<&str> for Message {
    fn from(text: &str) -> Self {
        Self::user(text)
    }
}

impl From<String> for Message {
    fn from(text: String) -> Self {
        Self::user(text)
    }
}

/// A prompt: a conversation, or tokens that are used as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Rendered with the model's chat template.
    Messages(Vec<Message>),
    /// Fed as they are, without a template.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Messages(vec![Message::user(text)])
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Messages(vec![Message::user(text)])
    }
}

impl From<Vec<Message>> for Prompt {
    fn from(messages: Vec<Message>) -> Self {
        Self::Messages(messages)
    }
}

impl From<&[Message]> for Prompt {
    fn from(messages: &[Message]) -> Self {
        Self::Messages(messages.to_vec())
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens)
    }
}
