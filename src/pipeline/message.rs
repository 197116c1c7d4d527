//! What a caller asks.

use serde::{Deserialize, Serialize};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or whatever else the model's template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
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
