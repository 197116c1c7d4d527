//! Conversations: turns that continue the cache of those before them.

use std::thread::JoinHandle;
use std::time::Instant;

use super::generation::{self, Completion, Generation, Job};
use super::past::Past;
use super::rendering::Layout;
use super::spans::RenderedPrompt;
use super::{Event, FinishReason, GenerateOptions, Message, SpecPrefillPipeline};
use crate::ops::CancelToken;
use crate::qwen3_5::{CacheLength, Mark, Position};
use crate::specprefill::{Role, Span};
use crate::{Error, Result};

/// A conversation whose turns continue one cache, dense or sparse: of every turn only the new text is tokenized, scored by the
/// draft (by itself, and admitted by its own length) and read. Positions go on at the text's true length, whatever was
/// dropped, and the answer is that of one prompt with the same rows.
///
/// The messages are what counts. When the template's rendering of them does not begin with what the cache has read
/// (a template that leaves out former reasoning, an edited history, an answer that ended at a stop text) the conversation goes back to the
/// last place that still fits and reads on from there; [`Usage::reused_tokens`](super::Usage::reused_tokens) and
/// [`Usage::reuse_note`](super::Usage::reuse_note) say so. A gated-delta state cannot be rewound, so the state is copied twice a turn, before the
/// template's turn of the assistant and at the end of the answer; older copies than [`Conversation::with_snapshots`] says are dropped, and
/// what lies before the oldest is read again.
///
/// A turn that fails, or is cancelled before any of its answer was given out, leaves the conversation as it was before it.
/// Cancelled later, what was given out stays as the assistant's message.
///
/// The draft head has seen what turns with MTP read; turning MTP on later changes no text, but the first drafts are worse.
pub struct Conversation {
    pipeline: SpecPrefillPipeline,
    messages: Vec<Message>,
    past: Past,
    snapshots: usize,
}

impl Conversation {
    pub(super) fn new(pipeline: SpecPrefillPipeline) -> Self {
        let snapshots = 4;
        Self {
            pipeline,
            messages: vec![],
            past: Past::new(snapshots),
            snapshots,
        }
    }

    /// How many copies of the gated-delta states are held to go back to: two a turn, 4 by default. Changing it forgets the cache.
    pub fn with_snapshots(mut self, snapshots: usize) -> Self {
        self.snapshots = snapshots;
        self.past = Past::new(snapshots);
        self
    }

    /// What was said.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The same, to be changed: the next turn reads from the first change on, or from the last copied state before it.
    pub fn messages_mut(&mut self) -> &mut Vec<Message> {
        &mut self.messages
    }

    /// Rows that the next turn finds in the cache if no message changes: after a sparse turn fewer than
    /// [`Conversation::next_position`].
    pub fn cache_length(&self) -> CacheLength {
        self.past.end().map(Mark::length).unwrap_or_default()
    }

    /// Where in the text the next row stands.
    pub fn next_position(&self) -> Position {
        self.past.end().map(Mark::next_position).unwrap_or_default()
    }

    /// Bytes of the cache and of the copied states.
    pub fn size_bytes(&self) -> usize {
        self.past.size_bytes()
    }

    /// Takes the last message of a user back, and all after it. The next turn goes on from the end of the answer before, if its
    /// state is still held, and reads what is left otherwise.
    pub fn undo(&mut self) -> Vec<Message> {
        let last = self.messages.iter().rposition(|m| m.role == "user");
        self.messages.split_off(last.unwrap_or(self.messages.len()))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.past = Past::new(self.snapshots);
    }

    /// Says something and starts the answer. [`GenerateOptions::keep`] counts tokens of the new text. A message that is refused
    /// is not part of the conversation.
    pub fn send(
        &mut self,
        message: impl Into<Message>,
        options: &GenerateOptions,
    ) -> Result<Turn<'_>> {
        let before = self.messages.len();
        self.messages.push(message.into());
        self.start(before, options)
    }

    /// Starts an answer to the messages as they are, for example after tool results were added.
    pub fn answer(&mut self, options: &GenerateOptions) -> Result<Turn<'_>> {
        self.start(self.messages.len(), options)
    }

    /// Starts an answer; should it fail, the first `before` messages are left.
    fn start(&mut self, before: usize, options: &GenerateOptions) -> Result<Turn<'_>> {
        match self.begin(options) {
            Ok((generation, worker)) => Ok(Turn {
                conversation: self,
                generation: Some(generation),
                worker: Some(worker),
                text: String::new(),
                given_out: false,
                before,
            }),
            Err(error) => {
                self.messages.truncate(before);
                Err(error)
            }
        }
    }

    fn begin(
        &mut self,
        options: &GenerateOptions,
    ) -> Result<(Generation, JoinHandle<Option<Past>>)> {
        let start = Instant::now();
        options.validate()?;
        if self.messages.last().is_some_and(|m| m.role == "assistant") {
            let what = "the assistant spoke last: add a message to answer";
            return Err(Error::Prompt(what.into()));
        }
        let (pipeline, messages) = (&self.pipeline, &self.messages);
        let tokenizer = pipeline.tokenizer();
        let layout = pipeline.layout(messages, &options.template)?;
        let known = self.past.tokens();
        let (before, unread, from) = self.past.resume(&layout, tokenizer);
        let mut prompt = match from {
            0 => pipeline.tokens(messages, &options.template, &layout)?,
            _ => pipeline.tokens_from(&layout, from)?,
        };
        let unread_len = unread.iter().count();
        pipeline.check(&prompt.tokens, before.len() + unread_len)?;
        let lost = known - before.len() - unread_len;
        let note = (lost > 0).then(|| {
            format!(
                "the last {lost} of {known} tokens were forgotten, because the conversation is no longer rendered as they were read: \
                 its history was changed, or the template renders former turns in another way"
            )
        });
        if let Some(note) = &note {
            tracing::info!("{note}");
        }
        let (split, split_text) = answer_begins(&layout, &prompt, from, &self.pipeline).unzip();
        self.past
            .begin_turn(&layout, &prompt.tokens, split_text.unwrap_or(0));
        let mut options = options.clone();
        if let Some(token) = unread {
            prompt.tokens.insert(0, token);
            for span in &mut prompt.spans {
                span.tokens = span.tokens.start + 1..span.tokens.end + 1;
            }
            let (role, tokens) = (Role::Template, 0..1);
            prompt.spans.insert(0, Span { role, tokens });
            for keep in &mut options.keep {
                *keep = keep.start.saturating_add(1)..keep.end.saturating_add(1);
            }
        }
        let job = Job {
            parts: pipeline.parts().clone(),
            prompt,
            before,
            split: split.map(|at| at + unread_len),
            note,
            options,
            start,
        };
        let past = std::mem::replace(&mut self.past, Past::new(self.snapshots));
        generation::start(job, Some(past))
    }
}

/// The token of the prompt, and the byte of the whole text, at which the last message ends: the template may render what comes
/// then in another way once there is an answer. `None` if no special token stands there.
fn answer_begins(
    layout: &Layout,
    prompt: &RenderedPrompt,
    from: usize,
    pipeline: &SpecPrefillPipeline,
) -> Option<(usize, usize)> {
    let end = layout.contents.as_ref()?.last()?.end;
    let at = end.checked_sub(from)?;
    let token = prompt.offsets.iter().position(|(start, _)| *start == at)?;
    let special = pipeline.tokenizer().is_special(*prompt.tokens.get(token)?);
    (special && token > 0).then_some((token, end))
}

/// A turn under way: the events of its answer. Dropping it ends the answer; the conversation can be used after that.
pub struct Turn<'a> {
    conversation: &'a mut Conversation,
    generation: Option<Generation>,
    worker: Option<JoinHandle<Option<Past>>>,
    text: String,
    /// Whether the answer counts: it ended, or some of it was given out.
    given_out: bool,
    before: usize,
}

impl Turn<'_> {
    /// Ends the answer from wherever it is kept, as [`Generation::cancel_token`] does.
    pub fn cancel_token(&self) -> CancelToken {
        let generation = self.generation.as_ref();
        generation.map(Generation::cancel_token).unwrap_or_default()
    }

    /// Waits for the whole answer.
    pub fn complete(mut self) -> Result<Completion> {
        generation::complete(&mut self)
    }
}

impl Iterator for Turn<'_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        let event = self.generation.as_mut()?.next()?;
        match &event {
            Ok(Event::Text { text, .. }) => {
                self.text.push_str(text);
                self.given_out |= !text.is_empty();
            }
            Ok(Event::Finished(usage)) => {
                self.given_out |= usage.finish_reason != FinishReason::Cancelled;
            }
            Ok(_) => {}
            Err(_) => self.given_out = false,
        }
        Some(event)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.generation = None;
        let past = self.worker.take().and_then(|worker| worker.join().ok());
        let conversation = &mut *self.conversation;
        // After a panic of the thread everything is read again.
        if let Some(past) = past.flatten() {
            conversation.past = past;
        }
        match self.given_out {
            true => {
                let text = std::mem::take(&mut self.text);
                conversation.messages.push(Message::new("assistant", text));
            }
            false => conversation.messages.truncate(self.before),
        }
    }
}
