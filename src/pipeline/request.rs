//! One answer: choose rows, prefill them, decode, report.

use std::sync::mpsc::Sender;
use std::sync::PoisonError;
use std::time::Instant;

use candle_core::Tensor;

use super::answer::Answer;
use super::generation::Job;
use super::past::Past;
use super::reading::Reading;
use super::{Event, FinishReason, MtpUsage, SpecPrefillUsage, Stage, Usage};
use crate::mtp::{Depth, Drafter, NGram, Session, SessionOptions};
use crate::ops::{memory, Context};
use crate::qwen3_5::Cache;
use crate::{Error, Result};

pub(super) struct Request<'a> {
    pub job: &'a Job,
    pub cx: &'a Context,
    pub events: &'a Sender<Result<Event>>,
}

/// A prompt that was read.
pub(super) struct Prepared {
    cache: Cache,
    /// The last row's hidden state.
    hidden: Tensor,
    kept: usize,
    pub specprefill: SpecPrefillUsage,
}

impl Prepared {
    /// Rows that the target read.
    pub fn kept(&self) -> usize {
        self.kept
    }
}

impl Request<'_> {
    /// Whether anybody still listens.
    fn send(&self, event: Event) -> bool {
        self.events.send(Ok(event)).is_ok()
    }

    fn progress(&self, stage: Stage, done: usize, total: usize) -> bool {
        self.send(Event::Progress { stage, done, total })
    }

    /// Makes the answer. A conversation's past has it at the end, or is as it was, or empty.
    pub fn run(&self, mut past: Option<&mut Past>) -> Result<()> {
        let target = &self.job.parts.target;
        let prepared = self.prepare(past.as_deref_mut())?;
        let (kept, specprefill) = (prepared.kept, prepared.specprefill.clone());
        let mut session = self.session(prepared)?;
        let mut answer = Answer::new(&self.job.parts, &self.job.options);
        let mut first = None;
        let reason = self.decode(&mut session, &mut answer, &mut first)?;
        let end = Instant::now();
        let cancelled = reason == FinishReason::Cancelled;
        if cancelled {
            memory::settle(target.device())?;
        } else {
            self.learn(&session);
            answer.finish()?;
        }
        self.send(answer.event());
        let usage = self.usage(
            kept,
            specprefill,
            &session,
            answer.ids.len(),
            reason,
            [first.unwrap_or(end), end],
        );
        if let Some(past) = past {
            let ids = &answer.ids;
            let stop = |id: &&u32| self.job.parts.stop_tokens.contains(id);
            let stop = ids.len() - ids.last().filter(stop).iter().count();
            let tokenizer = &self.job.parts.tokenizer;
            let text = tokenizer.decode_all(&ids[..stop])?;
            let stop = tokenizer.decode_all(&ids[stop..])?;
            let (cache, _) = session.into_parts(target, self.cx)?;
            past.answered(cache, ids, (&text, &stop), tokenizer)?;
        }
        self.send(Event::Finished(Box::new(usage)));
        Ok(())
    }

    /// Whether, and how deep, the target's head drafts.
    fn depth(&self) -> Depth {
        match self.job.parts.head_fault {
            Some(_) => Depth::Off,
            None => self.job.options.mtp_depth,
        }
    }

    /// Reads the prompt, after a conversation's past.
    pub fn prepare(&self, past: Option<&mut Past>) -> Result<Prepared> {
        let (job, cx) = (self.job, self.cx);
        let report = |stage, done, total| {
            self.progress(stage, done, total);
        };
        let reading = Reading {
            parts: &job.parts,
            prime: self.depth().max() > 0,
            prompt: &job.prompt,
            options: &job.options,
            split: job.split,
            progress: &report,
        };
        let (selection, mut specprefill) = reading.choose(cx)?;
        let lookahead = selection.as_ref().map(|s| s.lookahead.first().copied());
        let expected = lookahead.flatten();
        let mut kept = reading.rows(selection);
        self.progress(Stage::Prefill, 0, kept.len());
        let begun = Instant::now();
        let mut none = Past::default();
        let past = past.unwrap_or(&mut none);
        let mut read = past.read(&reading, cx, &kept, &mut specprefill)?;
        if let Some(more) = reading.doubt(cx, &read.hidden, expected, &mut specprefill)? {
            self.progress(Stage::Prefill, 0, more.len());
            kept = more;
            read = past.read(&reading, cx, &kept, &mut specprefill)?;
        }
        let nothing = || Error::Cache("the prompt left none".into());
        let cache = past.begin_answer(read.split).ok_or_else(nothing)?;
        specprefill.prefill_s = begun.elapsed().as_secs_f64();
        reading.learn(kept.len(), &specprefill);
        Ok(Prepared {
            cache,
            hidden: read.hidden,
            kept: kept.len(),
            specprefill,
        })
    }

    /// Begins to decode.
    pub fn session(&self, prepared: Prepared) -> Result<Session> {
        let (job, parts) = (self.job, &self.job.parts);
        let copy = job.options.copy && job.options.mtp_depth != Depth::Off;
        let learned = parts.controller.lock();
        let controller = learned.unwrap_or_else(PoisonError::into_inner).clone();
        let options = SessionOptions {
            depth: self.depth(),
            controller,
            acceptance: job.options.acceptance,
            sampling: job.options.sampling.clone(),
            draft_vocabulary: None,
            processor: job.options.processor.clone(),
            drafter: copy.then(|| Box::new(NGram::default()) as Box<dyn Drafter>),
            prompt: [job.before.as_slice(), &job.prompt.tokens].concat(),
            stop_tokens: parts.stop_tokens.clone(),
            max_tokens: job.options.max_tokens,
        };
        let Prepared { cache, hidden, .. } = prepared;
        Session::new(&parts.target, self.cx, cache, &hidden, options)
    }

    /// Decodes to the end; `first` becomes the time of the first token.
    fn decode(
        &self,
        session: &mut Session,
        answer: &mut Answer,
        first: &mut Option<Instant>,
    ) -> Result<FinishReason> {
        let target = &self.job.parts.target;
        loop {
            if self.cx.cancel_token().is_cancelled() {
                return Ok(FinishReason::Cancelled);
            }
            let mut failed = None;
            // The answer's text decides where it ends before anything is committed.
            let mut ends = |tokens: &[u32]| match answer.push(tokens) {
                Ok(end) => end,
                Err(error) => {
                    failed = Some(error);
                    None
                }
            };
            let tokens = match session.step_until(target, self.cx, &mut ends) {
                Err(Error::Cancelled) => return Ok(FinishReason::Cancelled),
                tokens => tokens?,
            };
            if let Some(error) = failed {
                return Err(error);
            }
            first.get_or_insert_with(Instant::now);
            if let Some(reason) = session.finished() {
                return Ok(reason);
            }
            if tokens.is_empty() {
                return Ok(FinishReason::Length);
            }
            if !self.send(answer.event()) {
                return Ok(FinishReason::Cancelled);
            }
        }
    }

    /// Keeps what the session learned about depth for the next one.
    pub fn learn(&self, session: &Session) {
        if let Some(learned) = session.controller() {
            let place = self.job.parts.controller.lock();
            *place.unwrap_or_else(PoisonError::into_inner) = Some(learned.clone());
        }
    }

    /// What an answer cost, whose first token and end came at `times`.
    pub fn usage(
        &self,
        kept: usize,
        specprefill: SpecPrefillUsage,
        session: &Session,
        tokens: usize,
        finish_reason: FinishReason,
        [first, end]: [Instant; 2],
    ) -> Usage {
        let job = self.job;
        let ttft = (first - job.start).as_secs_f64();
        let prompt = job.before.len() + job.prompt.tokens.len();
        Usage {
            prompt_tokens: prompt,
            reused_tokens: job.before.len(),
            kept_tokens: kept,
            completion_tokens: tokens,
            finish_reason,
            time_to_first_token_s: ttft,
            prompt_tokens_per_second: per_second(job.prompt.tokens.len(), ttft),
            generation_tokens_per_second: per_second(
                tokens.saturating_sub(1),
                (end - first).as_secs_f64(),
            ),
            reuse_note: job.note.clone(),
            specprefill,
            mtp: MtpUsage {
                stats: session.stats().clone(),
                note: job.parts.head_fault.clone(),
            },
            routes: self.cx.routes().snapshot(),
        }
    }
}

fn per_second(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}
