//! Special tokens in what callers write: text, wherever the template puts it.

use std::ops::Range;

use minijinja::value::ValueKind;

use super::{ChatTemplate, Message, TemplateOptions, TemplateValue, TextTokenizer};
use crate::{Error, Result};

/// A rendered conversation, and where callers wrote what looks like special tokens: in contents, tool definitions, tool calls
/// or any other field. Bytes, in order.
pub(super) struct Guarded {
    pub text: String,
    pub literal: Vec<Range<usize>>,
}

/// Renders a conversation. Special tokens in callers' text go through the template between two characters that occur nowhere
/// else, which tell where they end up.
pub(super) fn render(
    template: &ChatTemplate,
    tokenizer: &TextTokenizer,
    messages: &[Message],
    options: &TemplateOptions,
) -> Result<Guarded> {
    let text = template.render_with(messages, options)?;
    let plain = |text| Guarded {
        text,
        literal: vec![],
    };
    if options.special_tokens {
        return Ok(plain(text));
    }
    let marks = Marks::absent_from(&text)?;
    let mut found = false;
    let mut mark = |text: &str| {
        let ranges = tokenizer.special_ranges(text);
        found |= !ranges.is_empty();
        marks.surround(text, &ranges)
    };
    let message = |message: &Message| Message {
        content: mark(&message.content).unwrap_or_else(|| message.content.clone()),
        extra: (message.extra.iter())
            .map(|(name, value)| (name.clone(), map_texts(value, &mut mark)))
            .collect(),
        ..message.clone()
    };
    let marked: Vec<Message> = messages.iter().map(message).collect();
    let tools = options.tools.iter();
    let options = TemplateOptions {
        tools: tools.map(|tool| map_texts(tool, &mut mark)).collect(),
        ..options.clone()
    };
    match found {
        false => Ok(plain(text)),
        true => Ok(marks.take_out(&template.render_with(&marked, &options)?)),
    }
}

/// `value` with every text in it changed where `change` says so, keys too.
fn map_texts(
    value: &TemplateValue,
    change: &mut impl FnMut(&str) -> Option<String>,
) -> TemplateValue {
    match value.kind() {
        ValueKind::String => match value.as_str().and_then(change) {
            Some(text) => text.into(),
            None => value.clone(),
        },
        ValueKind::Seq => match value.try_iter() {
            Ok(items) => items.map(|item| map_texts(&item, change)).collect(),
            Err(_) => value.clone(),
        },
        ValueKind::Map => match value.try_iter() {
            Ok(keys) => TemplateValue::from_pairs(keys.map(|key| {
                let item = value.get_item(&key).unwrap_or_default();
                (map_texts(&key, change), map_texts(&item, change))
            })),
            Err(_) => value.clone(),
        },
        _ => value.clone(),
    }
}

/// Two private-use characters.
struct Marks {
    open: char,
    close: char,
}

impl Marks {
    fn absent_from(text: &str) -> Result<Self> {
        let mut free = ('\u{F0002}'..='\u{FFFFD}').filter(|c| !text.contains(*c));
        match (free.next(), free.next()) {
            (Some(open), Some(close)) => Ok(Self { open, close }),
            _ => Err(Error::Prompt(
                "it contains every private-use character, and none is left to tell special tokens by".into(),
            )),
        }
    }

    /// `None` if there is nothing to mark.
    fn surround(&self, text: &str, ranges: &[Range<usize>]) -> Option<String> {
        let (mut out, mut at) = (String::new(), 0);
        for range in ranges {
            out.push_str(&text[at..range.start]);
            out.push(self.open);
            out.push_str(&text[range.clone()]);
            out.push(self.close);
            at = range.end;
        }
        out.push_str(&text[at..]);
        (!ranges.is_empty()).then_some(out)
    }

    fn take_out(&self, marked: &str) -> Guarded {
        let (mut text, mut literal, mut open) = (String::new(), vec![], None);
        for c in marked.chars() {
            match c {
                _ if c == self.open => open = Some(text.len()),
                _ if c == self.close => {
                    literal.extend(open.take().map(|start| start..text.len()));
                }
                _ => text.push(c),
            }
        }
        Guarded { text, literal }
    }
}
