//! Several answers at once: each prompt is read by itself, sparsely or whole, and all are decoded in the same passes.

use std::sync::mpsc::channel;
use std::time::Instant;

use super::answer::Answer;
use super::generation::Job;
use super::request::{Prepared, Request};
use super::{Completion, Event, FinishReason, GenerateOptions, Prompt, SpecPrefillPipeline};
use crate::mtp::{step_all, Session, Step};
use crate::ops::{memory, CancelToken, Context};
use crate::{Error, Result};

/// An answer under way.
struct Running<'a> {
    /// Which request it answers.
    index: usize,
    session: Session,
    answer: Answer<'a>,
    failed: Option<Error>,
    kept: usize,
    specprefill: super::SpecPrefillUsage,
    first: Option<Instant>,
}

impl SpecPrefillPipeline {
    /// Answers several prompts, each with its own options. The weights are read once for all answers that are still under way, and
    /// every answer is that which [`generate`](Self::generate) gives alone, to the bit on the CPU. A request that fails has an
    /// error of its own. `Usage::routes` counts the calls of all requests together.
    ///
    /// `cancel` ends all of them: answers that have begun are [`FinishReason::Cancelled`] where they are, the others are
    /// [`Error::Cancelled`].
    pub fn generate_all(
        &self,
        requests: impl IntoIterator<Item = (Prompt, GenerateOptions)>,
        cancel: &CancelToken,
    ) -> Vec<Result<Completion>> {
        let cx = Context::default().with_cancel(cancel.clone());
        // Nobody hears of the progress of one among many.
        let (events, _) = channel();
        let jobs = requests.into_iter().map(|(prompt, options)| {
            options.validate()?;
            Ok(Job {
                parts: self.parts().clone(),
                prompt: self.prompt(prompt, &options)?,
                before: vec![],
                split: None,
                note: None,
                options,
                start: Instant::now(),
            })
        });
        let jobs: Vec<Result<Job>> = jobs.collect();
        let request = |job| Request {
            job,
            cx: &cx,
            events: &events,
        };
        let mut done: Vec<Option<Result<Completion>>> = vec![];
        let mut running: Vec<Running> = vec![];
        for (index, job) in jobs.iter().enumerate() {
            done.push(None);
            let job = match job {
                Ok(job) => job,
                Err(_) => continue,
            };
            let begun = request(job).prepare(None).and_then(|prepared| {
                let Prepared { specprefill, .. } = &prepared;
                let (kept, specprefill) = (prepared.kept(), specprefill.clone());
                Ok(Running {
                    index,
                    session: request(job).session(prepared)?,
                    answer: Answer::new(&job.parts, &job.options),
                    failed: None,
                    kept,
                    specprefill,
                    first: None,
                })
            });
            match begun {
                Ok(begun) => running.push(begun),
                Err(error) => done[index] = Some(Err(error)),
            }
        }
        while !running.is_empty() {
            let outs = self.cycle(&cx, &mut running);
            let mut on = vec![];
            for (mut one, out) in running.into_iter().zip(outs) {
                let end = match (one.failed.take(), out) {
                    (Some(error), _) => Err(error),
                    (None, Err(Error::Cancelled)) => Ok(Some(FinishReason::Cancelled)),
                    (None, Err(error)) => Err(error),
                    (None, Ok(tokens)) => {
                        one.first.get_or_insert_with(Instant::now);
                        let over = tokens.is_empty().then_some(FinishReason::Length);
                        Ok(one.session.finished().or(over))
                    }
                };
                match (end, &jobs[one.index]) {
                    (Ok(None), _) => on.push(one),
                    (Ok(Some(reason)), Ok(job)) => {
                        let index = one.index;
                        done[index] = Some(one.complete(&request(job), reason));
                    }
                    (Err(error), _) => done[one.index] = Some(Err(error)),
                    (Ok(Some(_)), Err(_)) => {}
                }
            }
            running = on;
        }
        let results = jobs.into_iter().zip(done).map(|(job, done)| {
            job?;
            done.unwrap_or(Err(Error::Cancelled))
        });
        results.collect()
    }

    /// A cycle of all answers: tokens, or what went wrong.
    fn cycle(&self, cx: &Context, running: &mut [Running]) -> Vec<Result<Vec<u32>>> {
        if cx.cancel_token().is_cancelled() {
            return running.iter().map(|_| Err(Error::Cancelled)).collect();
        }
        let mut sessions = vec![];
        let mut ends = vec![];
        for one in running.iter_mut() {
            let (answer, failed) = (&mut one.answer, &mut one.failed);
            sessions.push(&mut one.session);
            ends.push(move |tokens: &[u32]| match answer.push(tokens) {
                Ok(end) => end,
                Err(error) => {
                    *failed = Some(error);
                    None
                }
            });
        }
        let steps = sessions.into_iter().zip(&mut ends);
        let mut steps: Vec<Step> = steps
            .map(|(session, ends)| Step {
                session,
                ends: Some(ends),
            })
            .collect();
        let count = steps.len();
        match step_all(self.target(), cx, &mut steps) {
            Ok(outs) => outs,
            Err(Error::Cancelled) => (0..count).map(|_| Err(Error::Cancelled)).collect(),
            Err(error) => {
                // One pass for all: it failed for all.
                let what = error.to_string();
                let again = || Error::argument("generate_all", what.clone());
                (0..count).map(|_| Err(again())).collect()
            }
        }
    }
}

impl Running<'_> {
    fn complete(mut self, request: &Request, reason: FinishReason) -> Result<Completion> {
        let end = Instant::now();
        if reason == FinishReason::Cancelled {
            memory::settle(request.job.parts.target.device())?;
        } else {
            request.learn(&self.session);
            self.answer.finish()?;
        }
        let token_ids = self.answer.ids.clone();
        let Event::Text { text, .. } = self.answer.event() else {
            return Err(Error::argument("generate_all", "an answer without text"));
        };
        let usage = request.usage(
            self.kept,
            self.specprefill,
            &self.session,
            token_ids.len(),
            reason,
            [self.first.unwrap_or(end), end],
        );
        Ok(Completion {
            text,
            token_ids,
            usage,
        })
    }
}
