//! Which tokens of a rendered conversation are what.

use std::ops::Range;

use super::{ChatTemplate, Message, Offsets, SpecPrefillUsage, TemplateOptions};
use crate::specprefill::{Report, Role, Selection, Span};

/// A conversation as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// What they are: in order, gapless, then what messages marked. Empty for a prompt of tokens.
    pub spans: Vec<Span>,
    /// The rendered text; empty for a prompt of tokens.
    pub text: String,
    /// The bytes of the text that each token stands for.
    pub offsets: Offsets,
    /// How many tokens at the start no user turn can change: the leading system and developer messages as the template
    /// renders them.
    pub fixed: usize,
}

/// The role of every byte range of `text`, the rendering of `messages`; in order, gapless. Parts that callers marked come as
/// spans of their own after the rest.
pub(super) fn byte_spans(
    messages: &[Message],
    text: &str,
    contents: Option<Vec<Range<usize>>>,
) -> Vec<(Role, Range<usize>)> {
    let Some(contents) = contents else {
        tracing::debug!("the template's own text cannot be told from the messages'");
        return vec![(Role::Text, 0..text.len())];
    };
    let last_user = messages.iter().rposition(|m| m.role == "user");
    let (mut spans, mut marked, mut end) = (vec![], vec![], 0);
    for (i, (message, range)) in messages.iter().zip(contents).enumerate() {
        let role = match message.role.as_str() {
            "system" | "developer" => Role::System,
            "tool" | "function" => Role::ToolResult,
            "assistant" => Role::Assistant,
            "user" if Some(i) == last_user => Role::LastUser,
            "user" => Role::User,
            _ => Role::Text,
        };
        spans.push((Role::Template, end..range.start));
        // The rendering may have trimmed the content: marks are relative to what it kept.
        let cut = message.content.find(&text[range.clone()]).unwrap_or(0);
        for mark in &message.keep {
            let at = |offset: usize| (range.start + offset.saturating_sub(cut)).min(range.end);
            marked.push((Role::Marked, at(mark.start)..at(mark.end)));
        }
        end = range.end;
        spans.push((role, range));
    }
    spans.push((Role::Template, end..text.len()));
    spans.extend(marked);
    spans.retain(|(_, range)| !range.is_empty());
    spans
}

/// Where each message's content stands in `text`: between the template's own pieces, which a rendering of placeholders
/// shows. `None` when the template does not treat contents as plain text.
pub(super) fn locate(
    template: &ChatTemplate,
    messages: &[Message],
    options: &TemplateOptions,
    text: &str,
) -> Option<Vec<Range<usize>>> {
    // Private-use characters, which no prompt's template contains.
    let placeholder = |i: usize| format!("\u{F0000}{i}\u{F0001}");
    let stand_in = |(i, m): (usize, &Message)| Message {
        content: placeholder(i),
        ..m.clone()
    };
    let stand_ins: Vec<Message> = messages.iter().enumerate().map(stand_in).collect();
    let skeleton = template.render_with(&stand_ins, options).ok()?;
    let mut pieces = vec![];
    let mut rest = skeleton.as_str();
    for i in 0..messages.len() {
        let (piece, after) = rest.split_once(&placeholder(i))?;
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    let mut at = text.starts_with(pieces[0]).then_some(pieces[0].len())?;
    let mut found = vec![];
    for (message, next) in messages.iter().zip(&pieces[1..]) {
        // The content itself tells where it ends, even if it looks like a piece of the template.
        let whole = message.content.as_str();
        let fits = |content: &&str| {
            let after = text[at..].strip_prefix(*content);
            after.is_some_and(|after| after.starts_with(next))
        };
        let candidates = [whole, whole.trim(), whole.trim_start(), whole.trim_end()];
        let content = candidates.into_iter().find(fits);
        let len = match content {
            Some(content) => content.len(),
            None => text[at..].find(next)?,
        };
        found.push(at..at + len);
        at += len + next.len();
    }
    (at == text.len()).then_some(found)
}

/// The tokens of byte ranges, given every token's bytes: a token that touches a range belongs to it.
pub(super) fn token_spans(bytes: &[(Role, Range<usize>)], offsets: &[(usize, usize)]) -> Vec<Span> {
    let spans = bytes.iter().map(|(role, range)| {
        let start = offsets.partition_point(|(_, end)| *end <= range.start);
        let end = offsets.partition_point(|(start, _)| *start < range.end);
        Span {
            role: *role,
            tokens: start..end.max(start),
        }
    });
    spans.filter(|span| !span.tokens.is_empty()).collect()
}

/// What the draft chose of a prompt.
#[derive(Clone, Debug)]
pub struct Selected {
    /// The prompt.
    pub prompt: RenderedPrompt,
    /// The rows to read and why; `None` when all are read.
    pub selection: Option<Selection>,
    /// Why, and what it cost.
    pub usage: SpecPrefillUsage,
}

impl Selected {
    /// The selection as a page to look at; `None` when there is none or the prompt has no text.
    pub fn html(&self, title: &str, facts: &[(String, String)]) -> Option<String> {
        let selection = self.selection.as_ref()?;
        let prompt = &self.prompt;
        let report = Report {
            title,
            selection,
            spans: &prompt.spans,
            text: &prompt.text,
            offsets: &prompt.offsets,
            facts,
        };
        (!prompt.text.is_empty()).then(|| report.html())
    }
}
