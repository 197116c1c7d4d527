//! What each part of a prompt is, and which of it may never be dropped. Pure.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What a part of a prompt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The template's own tokens: turn markers, role names, injected blocks such as tool definitions.
    Template,
    /// System and developer messages.
    System,
    /// What tools answered.
    ToolResult,
    /// Turns of the assistant.
    Assistant,
    /// The user's turns before the last.
    User,
    /// The user's last turn.
    LastUser,
    /// Text of which nothing is known, for example a prompt of plain tokens.
    Text,
    /// The first tokens: the sink that attention always looks at.
    First,
    /// The last tokens.
    Tail,
    /// What the caller asked to keep.
    Marked,
}

/// A run of tokens with one role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its role.
    pub role: Role,
    /// Its tokens, as indices into the prompt.
    pub tokens: Range<usize>,
}

/// What happens to a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// All of it is kept.
    Keep,
    /// Its chunks compete by score.
    Score,
    /// This many tokens at its ends are kept, the rest competes. A span that is no longer is kept whole.
    Ends {
        /// At the start.
        first: usize,
        /// At the end.
        last: usize,
    },
}

/// What must be kept, by role. The tail has its own setting, [`Settings::tail`](super::Settings::tail).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// The template's own tokens, so that turns stay whole.
    pub template: Rule,
    /// System and developer messages.
    pub system: Rule,
    /// Tool results.
    pub tool_result: Rule,
    /// The assistant's turns.
    pub assistant: Rule,
    /// The user's turns before the last.
    pub user: Rule,
    /// The user's last turn: often a long text with the question at one of its ends.
    pub last_user: Rule,
    /// Other text.
    pub text: Rule,
    /// Tokens at the start of the prompt that are kept.
    pub first: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            template: Rule::Keep,
            system: Rule::Keep,
            tool_result: Rule::Score,
            assistant: Rule::Score,
            user: Rule::Score,
            last_user: Rule::Ends {
                first: 64,
                last: 512,
            },
            text: Rule::Score,
            first: 32,
        }
    }
}

/// Tokens that are kept whatever they score, and on what ground.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Required {
    /// The ground.
    pub role: Role,
    /// The tokens.
    pub tokens: Range<usize>,
}

impl Policy {
    /// Nothing is required.
    pub fn score_everything() -> Self {
        Self {
            template: Rule::Score,
            system: Rule::Score,
            last_user: Rule::Score,
            first: 0,
            ..Self::default()
        }
    }

    /// The rule for a role.
    pub fn rule(&self, role: Role) -> Rule {
        match role {
            Role::Template => self.template,
            Role::System => self.system,
            Role::ToolResult => self.tool_result,
            Role::Assistant => self.assistant,
            Role::User => self.user,
            Role::LastUser => self.last_user,
            Role::Text => self.text,
            Role::First | Role::Tail | Role::Marked => Rule::Keep,
        }
    }

    /// What must be kept of a prompt of `total` tokens: what the rules say about `spans`, the first tokens, the last `tail` and
    /// the very last one. Ranges are within the prompt and not empty; they may overlap.
    pub fn required(&self, spans: &[Span], total: usize, tail: usize) -> Vec<Required> {
        let mut out = vec![];
        let mut add = |role, from: usize, to: usize| {
            let to = to.min(total);
            if from < to {
                let tokens = from..to;
                out.push(Required { role, tokens });
            }
        };
        add(Role::First, 0, self.first);
        for span in spans {
            let (from, to) = (span.tokens.start, span.tokens.end);
            match self.rule(span.role) {
                Rule::Keep => add(span.role, from, to),
                Rule::Score => {}
                Rule::Ends { first, last } if to.saturating_sub(from) <= first + last => {
                    add(span.role, from, to)
                }
                Rule::Ends { first, last } => {
                    add(span.role, from, from + first);
                    add(span.role, to - last, to);
                }
            }
        }
        // The last row's hidden state gives the first token.
        add(Role::Tail, total.saturating_sub(tail.max(1)), total);
        out
    }
}

/// The union of ranges within `0..total`: sorted, disjoint, not empty.
pub fn union(ranges: impl IntoIterator<Item = Range<usize>>, total: usize) -> Vec<Range<usize>> {
    let ranges = ranges.into_iter().map(|r| r.start..r.end.min(total));
    let mut ranges: Vec<_> = ranges.filter(|r| r.start < r.end).collect();
    ranges.sort_by_key(|r| r.start);
    let mut out: Vec<Range<usize>> = vec![];
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}
