//! Reading a prompt: which rows, by the draft; then the target's pass over them, after a stored prefix where there is one.

use std::sync::{Arc, PoisonError};

use candle_core::{DType, Tensor};

use super::builder::Parts;
use super::prefix::Prefix;
use super::spans::RenderedPrompt;
use super::{GenerateOptions, SpecPrefillUsage, Stage};
use crate::mtp::{self, PrefillOptions};
use crate::ops::Context;
use crate::qwen3_5::{Cache, DraftRows, Mark};
use crate::specprefill::{
    self, Costs, OnFailure, Progress, Reason, Role, ScorerInput, Scores, Selection, Settings, Span,
};
use crate::{Error, Result};

/// A shorter prefix is not worth a cache.
const SHORTEST_PREFIX: usize = 32;

/// One prompt, being read.
pub(super) struct Reading<'a> {
    pub parts: &'a Parts,
    pub prompt: &'a RenderedPrompt,
    pub options: &'a GenerateOptions,
    /// Whether the draft head will be used.
    pub prime: bool,
    /// A token of the prompt before which the cache is marked, if the one before it is kept.
    pub split: Option<usize>,
    /// Hears a stage's tokens done, of how many.
    pub progress: &'a dyn Fn(Stage, usize, usize),
}

/// What the target left behind beside its cache.
pub(super) struct Read {
    /// The last row's hidden state, `[1, hidden]`.
    pub hidden: Tensor,
    /// The cache's state where it was to be marked, and the hidden state of the row before.
    pub split: Option<(Mark, Tensor)>,
}

impl Reading<'_> {
    /// The rows to read, or `None` for all. A draft that fails costs sparsity, not the answer, unless asked otherwise.
    pub fn choose(&self, cx: &Context) -> Result<(Option<Selection>, SpecPrefillUsage)> {
        let tokens = &self.prompt.tokens;
        let total = tokens.len();
        let mut settings = self.options.specprefill.clone();
        let mut usage = SpecPrefillUsage {
            keep: settings.keep,
            ..Default::default()
        };
        let costs = *self
            .parts
            .costs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        settings.keep = settings.keep.resolve(total, costs);
        let marked = self.options.keep.iter().map(|tokens| Span {
            role: Role::Marked,
            tokens: tokens.clone(),
        });
        let spans: Vec<Span> = self.prompt.spans.iter().cloned().chain(marked).collect();
        let required = settings.policy.required(&spans, total, settings.tail);
        let draft = self.parts.draft.as_ref();
        let context = draft.map(|d| d.longest());
        usage.reason = specprefill::admit(&settings, context, total, &required);
        usage.explanation = usage.reason.explain(&settings, total);
        let (Reason::Admitted, Some(draft)) = (usage.reason, draft) else {
            return Ok((None, usage));
        };
        let input = ScorerInput {
            draft,
            cx,
            tokens,
            prefill_chunk: settings.prefill_chunk,
        };
        match self.scores(&input, &settings, &mut usage) {
            Ok(scores) => {
                let mut selection = specprefill::select(&scores, &required, &settings);
                if usage.memo {
                    (selection.scoring_s, selection.lookahead_s) = (0.0, 0.0);
                }
                usage.admitted = true;
                usage.scoring_s = selection.scoring_s;
                usage.lookahead_s = selection.lookahead_s;
                usage.required_tokens = selection.required_tokens();
                usage.over_budget = selection.over_budget();
                if usage.over_budget {
                    tracing::warn!(
                        required = usage.required_tokens,
                        budget = selection.budget,
                        "more must be kept than SpecPrefill's settings allow"
                    );
                }
                Ok((Some(selection), usage))
            }
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(error) if settings.on_failure == OnFailure::Error => Err(error),
            Err(error) => {
                tracing::warn!(%error, "the draft could not score the prompt; every token is kept");
                usage.reason = Reason::ScoringFailed;
                let why = usage.reason.explain(&settings, total);
                usage.explanation = format!("{why}: {error}");
                Ok((None, usage))
            }
        }
    }

    fn scores(
        &self,
        input: &ScorerInput,
        settings: &Settings,
        usage: &mut SpecPrefillUsage,
    ) -> Result<Arc<Scores>> {
        let own = self.parts.scorer.as_deref();
        let scorer = own.unwrap_or_else(|| settings.scorer.scorer());
        let id = scorer.id();
        if let Some(scores) = self.parts.memo.get(&id, input.tokens) {
            usage.memo = true;
            return Ok(scores);
        }
        let mut report = |progress| {
            if let Progress::Scoring { done, total } = progress {
                (self.progress)(Stage::Scoring, done, total);
            }
        };
        let scores = Arc::new(specprefill::score(scorer, input, &mut report)?);
        self.parts.memo.insert(&id, input.tokens, scores.clone());
        Ok(scores)
    }

    /// Reads the rows `kept` into a new cache, the last of them being the prompt's last.
    pub fn read(
        &self,
        cx: &Context,
        kept: &[u32],
        usage: &mut SpecPrefillUsage,
    ) -> Result<(Cache, Read)> {
        let (target, tokens) = (&self.parts.target, &self.prompt.tokens);
        let (mut cache, mut waiting, mut done) = (target.new_cache()?, None, 0);
        let fixed = self.prompt.fixed.min(tokens.len() - 1);
        let whole = kept.iter().take(fixed).copied().eq(0..fixed as u32);
        if whole && fixed >= SHORTEST_PREFIX && !self.parts.prefixes.is_off() {
            let prefix = self.prefix(cx, fixed, usage)?;
            cache = prefix.cache.fork()?;
            waiting = prefix.primed.then(|| prefix.hidden.clone());
            done = fixed;
        }
        let read = self.read_after(cx, &mut cache, waiting, done, kept)?;
        Ok((cache, read))
    }

    /// Reads those of the rows `kept` that come after the first `done`, which `cache` has. `waiting` is the hidden state of the
    /// cache's last row, if the draft head waits to read it with the token that comes next.
    pub fn read_after(
        &self,
        cx: &Context,
        cache: &mut Cache,
        mut waiting: Option<Tensor>,
        done: usize,
        kept: &[u32],
    ) -> Result<Read> {
        let (target, tokens) = (&self.parts.target, &self.prompt.tokens);
        let options = self.prefill_options();
        let markable = |at: &usize| done < *at && kept.binary_search(&(*at as u32 - 1)).is_ok();
        let split = self.split.filter(markable);
        let (mut from, mut split_at) = (done, None);
        for end in split.into_iter().chain([tokens.len()]) {
            if let (Some(hidden), true) = (&waiting, self.prime && target.has_mtp()) {
                let at = cache.next_position().get().saturating_sub(1);
                let rows = DraftRows {
                    cache: &mut *cache,
                    tokens: &tokens[from..=from],
                    hidden,
                    positions: &[at],
                };
                target.prime(cx, &mut [rows])?;
            }
            let before = kept.partition_point(|k| (*k as usize) < from);
            let part = kept[before..].iter().take_while(|k| (**k as usize) < end);
            let part: Vec<u32> = part.map(|k| k - from as u32).collect();
            let mut report = |n| (self.progress)(Stage::Prefill, before + n, kept.len());
            let hidden = mtp::prefill(
                target,
                cx,
                cache,
                &tokens[from..end],
                Some(&part),
                &options,
                &mut report,
            )?;
            if end < tokens.len() {
                split_at = Some((cache.mark()?, hidden.clone()));
            }
            (waiting, from) = (Some(hidden), end);
        }
        let nothing = || Error::argument("read", "no row is left to read");
        Ok(Read {
            hidden: waiting.ok_or_else(nothing)?,
            split: split_at,
        })
    }

    fn prefill_options(&self) -> PrefillOptions {
        PrefillOptions {
            prime: self.prime,
            ..Default::default()
        }
    }

    /// The first `fixed` rows, from the store or read now.
    fn prefix(
        &self,
        cx: &Context,
        fixed: usize,
        usage: &mut SpecPrefillUsage,
    ) -> Result<Arc<Prefix>> {
        let target = &self.parts.target;
        let tokens = &self.prompt.tokens[..fixed];
        let options = &self.prefill_options();
        let primed = options.prime && target.has_mtp();
        if let Some(prefix) = self.parts.prefixes.get(tokens, primed) {
            usage.prefix_tokens = fixed;
            return Ok(prefix);
        }
        let mut cache = target.new_cache()?;
        let hidden = mtp::prefill(target, cx, &mut cache, tokens, None, options, &mut |_| {})?;
        let prefix = Arc::new(Prefix {
            tokens: tokens.to_vec(),
            cache,
            hidden,
            primed,
        });
        self.parts.prefixes.insert(prefix.clone());
        Ok(prefix)
    }

    /// The rows of a selection, or all.
    pub fn rows(&self, selection: Option<Selection>) -> Vec<u32> {
        match selection {
            Some(selection) => selection.kept,
            None => (0..self.prompt.tokens.len() as u32).collect(),
        }
    }

    /// Measures how likely the target finds the draft's first token after reading a selection, and gives the rows to read in
    /// its place if the settings' gate doubts it.
    pub fn doubt(
        &self,
        cx: &Context,
        hidden: &Tensor,
        expected: Option<u32>,
        usage: &mut SpecPrefillUsage,
    ) -> Result<Option<Vec<u32>>> {
        let Some(expected) = expected else {
            return Ok(None);
        };
        let logits = self.parts.target.logits(cx, hidden)?.to_dtype(DType::F32)?;
        let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let all: f64 = logits.iter().map(|l| ((l - top) as f64).exp()).sum();
        let logit = logits.get(expected as usize).copied();
        let agreement = logit.map_or(0.0, |l| ((l - top) as f64).exp() / all);
        usage.agreement = Some(agreement);
        let gate = self.options.specprefill.gate;
        // Also where the target's logits are not numbers.
        if agreement >= gate.min_probability || gate.min_probability == 0.0 {
            return Ok(None);
        }
        tracing::info!(agreement, "the selection is doubted: more is read");
        usage.reread = true;
        let Some(keep) = gate.reread else {
            return Ok(Some(self.rows(None)));
        };
        let mut options = self.options.clone();
        options.specprefill.keep = keep;
        let again = Reading {
            options: &options,
            ..*self
        };
        // The memo has the scores.
        Ok(Some(again.rows(again.choose(cx)?.0)))
    }

    /// Learns what a token costs, for [`Keep::Budget`].
    pub fn learn(&self, kept: usize, usage: &SpecPrefillUsage) {
        if usage.memo || usage.reread || !usage.admitted || usage.prefix_tokens > 0 || kept == 0 {
            return;
        }
        let total = self.prompt.tokens.len() as f64;
        let new = Costs {
            draft_s_per_token: (usage.scoring_s + usage.lookahead_s) / total,
            target_s_per_token: usage.prefill_s / kept as f64,
        };
        let mut costs = self
            .parts
            .costs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *costs = Some(match *costs {
            None => new,
            Some(old) => Costs {
                draft_s_per_token: (old.draft_s_per_token + new.draft_s_per_token) / 2.0,
                target_s_per_token: (old.target_s_per_token + new.target_s_per_token) / 2.0,
            },
        });
    }
}
