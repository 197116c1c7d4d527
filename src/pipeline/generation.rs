//! One answer's events, and the thread that it is made on.

use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use super::builder::Parts;
use super::past::Past;
use super::request::Request;
use super::spans::RenderedPrompt;
use super::{Event, GenerateOptions, Usage};
use crate::ops::{CancelToken, Context};
use crate::{Error, Result};

/// The events of one answer, as they happen. Dropping it ends the work before the next pass.
pub struct Generation {
    events: Receiver<Result<Event>>,
    cancel: CancelToken,
    over: bool,
}

/// An answer that is complete.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Completion {
    /// Its text.
    pub text: String,
    /// Its tokens, a stop token included.
    pub token_ids: Vec<u32>,
    /// What it cost.
    #[serde(flatten)]
    pub usage: Usage,
}

impl Generation {
    /// Ends the answer from wherever it is kept: while the prompt is read the next event is [`Error::Cancelled`], later the
    /// answer ends where it is with [`FinishReason::Cancelled`](super::FinishReason::Cancelled).
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// Waits for the whole answer.
    pub fn complete(self) -> Result<Completion> {
        complete(self)
    }
}

/// Collects events.
pub(super) fn complete(events: impl Iterator<Item = Result<Event>>) -> Result<Completion> {
    let (mut text, mut token_ids) = (String::new(), vec![]);
    for event in events {
        match event? {
            Event::Text {
                text: more,
                token_ids: ids,
            } => {
                text.push_str(&more);
                token_ids.extend(ids);
            }
            Event::Finished(usage) => {
                return Ok(Completion {
                    text,
                    token_ids,
                    usage: *usage,
                })
            }
            Event::Progress { .. } => {}
        }
    }
    Err(broken_off())
}

fn broken_off() -> Error {
    let what = "the generation's thread ended before its answer was complete";
    Error::argument("generate", what)
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl Iterator for Generation {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let event = self.events.recv().unwrap_or_else(|_| Err(broken_off()));
        self.over = matches!(event, Err(_) | Ok(Event::Finished(_)));
        Some(event)
    }
}

/// What an answer is made of.
pub(super) struct Job {
    pub parts: Arc<Parts>,
    /// The rows to read.
    pub prompt: RenderedPrompt,
    /// The tokens before them, which a conversation's cache has.
    pub before: Vec<u32>,
    /// See [`Reading::split`](super::reading::Reading::split).
    pub split: Option<usize>,
    /// Why less of the cache was used than it had.
    pub note: Option<String>,
    pub options: GenerateOptions,
    pub start: Instant,
}

/// Starts an answer on a thread of its own, which returns the conversation's past with the answer in it.
pub(super) fn start(
    job: Job,
    mut past: Option<Past>,
) -> Result<(Generation, JoinHandle<Option<Past>>)> {
    let (sender, events) = channel();
    let cancel = CancelToken::default();
    let token = cancel.clone();
    let work = move || {
        let cx = Context::default().with_cancel(token);
        let request = Request {
            job: &job,
            cx: &cx,
            events: &sender,
        };
        if let Err(error) = request.run(past.as_mut()) {
            // Nobody listens any more: nobody to tell.
            let _ = sender.send(Err(error));
        }
        past
    };
    let worker = std::thread::Builder::new()
        .name("generate".into())
        .spawn(work)
        .map_err(|error| Error::argument("generate", format!("no thread: {error}")))?;
    let generation = Generation {
        events,
        cancel,
        over: false,
    };
    Ok((generation, worker))
}
