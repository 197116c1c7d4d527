//! One answer: choose rows, prefill them, decode, report.

use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::builder::Parts;
use super::reading::{Read, Reading};
use super::spans::RenderedPrompt;
use super::{Event, FinishReason, GenerateOptions, MtpUsage, Stage, StreamDecoder, Usage};
use crate::mtp::{Depth, Drafter, NGram, Session, SessionOptions};
use crate::ops::Context;
use crate::{Error, Result};

/// The events of one answer, as they happen. Dropping it ends the work after the current step.
pub struct Generation {
    events: Receiver<Result<Event>>,
    over: bool,
}

impl Iterator for Generation {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let event = self.events.recv().unwrap_or_else(|_| {
            Err(Error::argument(
                "generate",
                "the generation's thread ended before its answer was complete",
            ))
        });
        self.over = matches!(event, Err(_) | Ok(Event::Finished(_)));
        Some(event)
    }
}

pub(super) fn start(
    parts: Arc<Parts>,
    prompt: RenderedPrompt,
    options: GenerateOptions,
    start: Instant,
) -> Result<Generation> {
    let (sender, events) = channel();
    let work = move || {
        let request = Request {
            parts: &parts,
            tokens: &prompt.tokens,
            prompt: &prompt,
            options: &options,
            start,
            events: &sender,
        };
        if let Err(error) = request.run() {
            // Nobody listens any more: nobody to tell.
            let _ = sender.send(Err(error));
        }
    };
    std::thread::Builder::new()
        .name("generate".into())
        .spawn(work)
        .map_err(|error| Error::argument("generate", format!("no thread: {error}")))?;
    Ok(Generation {
        events,
        over: false,
    })
}

struct Request<'a> {
    parts: &'a Parts,
    tokens: &'a [u32],
    prompt: &'a RenderedPrompt,
    options: &'a GenerateOptions,
    start: Instant,
    events: &'a Sender<Result<Event>>,
}

impl Request<'_> {
    /// Whether anybody still listens.
    fn send(&self, event: Event) -> bool {
        self.events.send(Ok(event)).is_ok()
    }

    fn progress(&self, stage: Stage, done: usize, total: usize) -> bool {
        self.send(Event::Progress { stage, done, total })
    }

    fn run(&self) -> Result<()> {
        let cx = Context::default();
        let target = &self.parts.target;
        let report = |stage, done, total| {
            self.progress(stage, done, total);
        };
        let depth = match &self.parts.head_fault {
            Some(_) => Depth::Off,
            None => self.options.mtp_depth,
        };
        let reading = Reading {
            parts: self.parts,
            prime: depth.max() > 0,
            prompt: self.prompt,
            options: self.options,
            progress: &report,
        };
        let (selection, mut specprefill) = reading.choose(&cx)?;
        let expected = selection
            .as_ref()
            .and_then(|s| s.lookahead.first().copied());
        let mut kept = reading.rows(selection);
        if !self.progress(Stage::Prefill, 0, kept.len()) {
            return Ok(());
        }
        let begun = Instant::now();
        let mut read = reading.read(&cx, &kept, &mut specprefill)?;
        let doubted = reading.doubt(&cx, &read.hidden, expected, &mut specprefill)?;
        if let (Some(more), true) = (doubted, self.progress(Stage::Prefill, 0, self.tokens.len())) {
            kept = more;
            read = reading.read(&cx, &kept, &mut specprefill)?;
        }
        let Read { cache, hidden } = read;
        specprefill.prefill_s = begun.elapsed().as_secs_f64();
        reading.learn(kept.len(), &specprefill);
        let copy = self.options.copy && self.options.mtp_depth != Depth::Off;
        let learned = self.parts.controller.lock();
        let session_options = SessionOptions {
            depth,
            controller: learned.unwrap_or_else(PoisonError::into_inner).clone(),
            acceptance: self.options.acceptance,
            sampling: self.options.sampling.clone(),
            draft_vocabulary: None,
            processor: self.options.processor.clone(),
            drafter: copy.then(|| Box::new(NGram::default()) as Box<dyn Drafter>),
            prompt: self.tokens.to_vec(),
            stop_tokens: self.parts.stop_tokens.clone(),
            max_tokens: self.options.max_tokens,
        };
        let mut session = Session::new(target, &cx, cache, &hidden, session_options)?;
        let mut answer = Answer::new(self);
        let mut first = None;
        let finish_reason = loop {
            let mut failed = None;
            // The answer's text decides where it ends before anything is committed.
            let mut ends = |tokens: &[u32]| match answer.push(tokens) {
                Ok(end) => end,
                Err(error) => {
                    failed = Some(error);
                    None
                }
            };
            let tokens = session.step_until(target, &cx, &mut ends)?;
            if let Some(error) = failed {
                return Err(error);
            }
            first.get_or_insert_with(Instant::now);
            if let Some(reason) = session.finished() {
                break reason;
            }
            if tokens.is_empty() {
                break FinishReason::Length;
            }
            if !self.send(answer.event()) {
                return Ok(());
            }
        };
        if let Some(learned) = session.controller() {
            let mut place = self
                .parts
                .controller
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *place = Some(learned.clone());
        }
        let end = Instant::now();
        let first = first.unwrap_or(end);
        answer.finish()?;
        self.send(answer.event());
        let ttft = (first - self.start).as_secs_f64();
        let stats = session.stats();
        let usage = Usage {
            prompt_tokens: self.tokens.len(),
            kept_tokens: kept.len(),
            completion_tokens: answer.tokens,
            finish_reason,
            time_to_first_token_s: ttft,
            prompt_tokens_per_second: per_second(self.tokens.len(), ttft),
            generation_tokens_per_second: per_second(
                answer.tokens.saturating_sub(1),
                (end - first).as_secs_f64(),
            ),
            specprefill,
            mtp: MtpUsage {
                stats: stats.clone(),
                note: self.parts.head_fault.clone(),
            },
            routes: cx.routes().snapshot(),
        };
        self.send(Event::Finished(Box::new(usage)));
        Ok(())
    }
}

fn per_second(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}

/// The answer's text, held back where a stop text may have begun.
struct Answer<'a> {
    decoder: StreamDecoder<'a>,
    stop_tokens: &'a [u32],
    stop: &'a [String],
    held: String,
    out: String,
    ids: Vec<u32>,
    tokens: usize,
    stopped: bool,
}

impl<'a> Answer<'a> {
    fn new(request: &Request<'a>) -> Self {
        Self {
            decoder: StreamDecoder::new(&request.parts.tokenizer),
            stop_tokens: &request.parts.stop_tokens,
            stop: &request.options.stop,
            held: String::new(),
            out: String::new(),
            ids: Vec::new(),
            tokens: 0,
            stopped: false,
        }
    }

    /// Adds tokens; after how many of them a stop text is complete, if one is (tokens after it are dropped).
    fn push(&mut self, tokens: &[u32]) -> Result<Option<usize>> {
        for (i, &id) in tokens.iter().enumerate() {
            self.ids.push(id);
            self.tokens += 1;
            if self.stop_tokens.contains(&id) {
                break;
            }
            let text = self.decoder.push(id)?;
            self.held.push_str(&text);
            self.release();
            if self.stopped {
                return Ok(Some(i + 1));
            }
        }
        Ok(None)
    }

    fn release(&mut self) {
        let found = self
            .stop
            .iter()
            .filter_map(|stop| self.held.find(stop))
            .min();
        if let Some(at) = found {
            self.out.push_str(&self.held[..at]);
            self.held.clear();
            self.stopped = true;
            return;
        }
        let begins = |at: usize| {
            self.stop
                .iter()
                .any(|stop| stop.starts_with(&self.held[at..]))
        };
        let cut = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| begins(at))
            .unwrap_or(self.held.len());
        self.out.extend(self.held.drain(..cut));
    }

    fn finish(&mut self) -> Result<()> {
        if !self.stopped {
            let rest = self.decoder.finish()?;
            self.held.push_str(&rest);
            self.release();
            self.out.push_str(&std::mem::take(&mut self.held));
        }
        Ok(())
    }

    fn event(&mut self) -> Event {
        Event::Text {
            text: std::mem::take(&mut self.out),
            token_ids: std::mem::take(&mut self.ids),
        }
    }
}
