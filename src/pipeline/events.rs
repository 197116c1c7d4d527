//! What a running generation reports.

use super::Usage;

/// A stage of the work before the first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// The draft reads the prompt and scores its tokens.
    Scoring,
    /// The target reads the kept tokens.
    Prefill,
}

/// One event of a [`Generation`](super::Generation).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// `done` of `total` tokens of a stage are through.
    Progress {
        /// The stage.
        stage: Stage,
        /// Tokens done.
        done: usize,
        /// Tokens to do.
        total: usize,
    },
    /// The answer goes on. `text` may be empty while a character is incomplete.
    Text {
        /// New text, whole characters only.
        text: String,
        /// The new tokens, a stop token included.
        token_ids: Vec<u32>,
    },
    /// The answer is complete; nothing comes after this.
    Finished(Box<Usage>),
}
