//! One sequence being decoded: what it has emitted, what its draft head has seen, and how deep it drafts.

use std::sync::Arc;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::controller::{Controller, Depth};
use super::cycle::{self, Ends, Step};
use super::history::{History, LogitsProcessor};
use super::ngram::Drafter;
use super::row;
use super::sampling::Sampling;
use super::stats::DecodeStats;
use crate::error::{Error, Result};
use crate::ops::{memory, Context};
use crate::qwen3_5::{Cache, DraftRows, DraftVocabulary, Model};

/// Rows that the draft head may lag behind while nobody drafts; then it sees them in one pass, keys and values alone.
const LAG: usize = 64;

/// How drafts are judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Acceptance {
    /// A draft is right when plain decoding would have drawn it; drafts are drawn with the same noise. The text is plain
    /// decoding's at every depth.
    #[default]
    Coupled,
    /// Block verification (arXiv 2403.10444): the text follows the same distribution, but is another one at another depth.
    /// The same as `Coupled` at temperature 0.
    Block,
}

/// How a session decodes.
#[derive(Default)]
pub struct SessionOptions {
    /// Drafts per cycle. A model without a draft head decodes plainly, and copies where `drafter` proposes.
    pub depth: Depth,
    /// What an earlier text on this model taught ([`Session::controller`]), for adaptive depth; without it, the first cycles
    /// measure.
    pub controller: Option<Controller>,
    /// How drafts are judged.
    pub acceptance: Acceptance,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Drafts only these tokens, which is cheaper; the text stays what it is.
    pub draft_vocabulary: Option<Arc<DraftVocabulary>>,
    /// Changes logits by what was generated.
    pub processor: Option<LogitsProcessor>,
    /// Proposes tokens beside the draft head; [`NGram`](super::NGram) copies from prompt and text. Its proposal is taken
    /// where it is longer than what the head would draft.
    pub drafter: Option<Box<dyn Drafter>>,
    /// The prompt, for repetition penalty and drafter; may be left empty without them.
    pub prompt: Vec<u32>,
    /// Tokens that end the text. The one that did is emitted.
    pub stop_tokens: Vec<u32>,
    /// The most tokens to emit.
    pub max_tokens: usize,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// `max_tokens`, or the model's last position.
    Length,
    /// The caller asked for the end.
    Cancelled,
}

/// Rows of the trunk whose next token is known and that the draft head has not seen.
pub(super) struct Unfed {
    pub hidden: Tensor,
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
}

impl Unfed {
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
    }
}

/// One sequence being decoded.
pub struct Session {
    pub(super) cache: Cache,
    pub(super) options: SessionOptions,
    pub(super) controller: Option<Controller>,
    pub(super) history: History,
    /// The last emitted token: it is in no cache yet.
    pub(super) next: u32,
    pub(super) first_is_out: bool,
    /// Whether the draft head is kept complete.
    pub(super) head: bool,
    pub(super) unfed: Unfed,
    pub(super) emitted: usize,
    pub(super) finished: Option<FinishReason>,
    pub(super) stats: DecodeStats,
}

impl Session {
    /// Begins after a prefill that returned `last_hidden` (`[1, hidden]`): draws the first token from it.
    pub fn new(
        model: &Model,
        cx: &Context,
        cache: Cache,
        last_hidden: &Tensor,
        mut options: SessionOptions,
    ) -> Result<Self> {
        options.sampling.validate()?;
        options.depth.validate()?;
        if options.max_tokens == 0 {
            let what = "must be at least 1".into();
            return Err(Error::Option {
                name: "max-tokens",
                what,
            });
        }
        if !model.has_mtp() {
            options.depth = Depth::Off;
        }
        let position = cache.next_position().get();
        let last_position = position
            .checked_sub(1)
            .ok_or_else(|| Error::Prompt("empty: nothing was prefilled".into()))?;
        let mut history = History::new(&options.prompt);
        let greedy = [row::is_greedy(&options)];
        let said = memory::pooled(|| row::rows(model, cx, last_hidden, &greedy))?;
        let said = said.into_iter().next();
        let said = said.ok_or_else(|| Error::argument("session", "no row to draw from"))?;
        // The prompt is read: nothing is under way any more.
        memory::settle(model.device())?;
        let next = said.draw(&options, &history, position)?;
        history.push(next);
        let controller = match options.depth {
            Depth::Adaptive { max } if max > 0 => Some(match options.controller.take() {
                Some(learned) if learned.max() == max => learned.resume(),
                _ => Controller::new(max),
            }),
            _ => None,
        };
        let mut stats = DecodeStats {
            depth: options.depth.max(),
            primed_rows: cache.draft_rows() as u64,
            ..Default::default()
        };
        stats.sources.first = 1;
        Ok(Self {
            head: options.depth.max() > 0,
            cache,
            options,
            controller,
            history,
            next,
            first_is_out: false,
            unfed: Unfed {
                hidden: last_hidden.clone(),
                tokens: vec![next],
                positions: vec![last_position],
            },
            emitted: 0,
            finished: None,
            stats,
        })
    }

    /// Why the text ended, once it has.
    pub fn finished(&self) -> Option<FinishReason> {
        self.finished
    }

    /// What was done so far.
    pub fn stats(&self) -> &DecodeStats {
        &self.stats
    }

    /// What was learned about depth, for the next text on this model.
    pub fn controller(&self) -> Option<&Controller> {
        self.controller.as_ref()
    }

    /// The cache. The last emitted token is not in it.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Ends the session and gives back the cache and the last emitted token, which is not in it: a conversation's next
    /// turn feeds that token first. A draft head that was used has then seen every row of the trunk. Safe between any two
    /// steps.
    pub fn into_parts(mut self, model: &Model, cx: &Context) -> Result<(Cache, u32)> {
        self.prime(model, cx, 0)?;
        Ok((self.cache, self.next))
    }

    /// The tokens of one cycle: at least one until the text has ended, then none.
    pub fn step(&mut self, model: &Model, cx: &Context) -> Result<Vec<u32>> {
        self.step_until(model, cx, &mut |_| None)
    }

    /// [`step`](Self::step), where `ends` sees the cycle's tokens before anything is committed and may say after how many of
    /// them (at least one) the text ends: no row after it reaches any cache.
    pub fn step_until<'a>(
        &'a mut self,
        model: &Model,
        cx: &Context,
        ends: &'a mut Ends<'a>,
    ) -> Result<Vec<u32>> {
        let mut steps = [Step {
            session: self,
            ends: Some(ends),
        }];
        let tokens = cycle::step_all(model, cx, &mut steps)?;
        tokens.into_iter().next().unwrap_or_else(|| Ok(vec![]))
    }

    /// Cuts `tokens` after the first that ends the text, counts and remembers them.
    pub(super) fn emit(
        &mut self,
        tokens: &mut Vec<u32>,
        ends: impl FnOnce(&[u32]) -> Option<usize>,
    ) {
        let stop = |t: &u32| self.options.stop_tokens.contains(t);
        if let Some(i) = tokens.iter().position(stop) {
            tokens.truncate(i + 1);
            self.finished = Some(FinishReason::Stop);
        }
        let room = self.options.max_tokens - self.emitted;
        if tokens.len() > room {
            tokens.truncate(room);
            self.finished = None;
        }
        if let Some(n) = ends(tokens) {
            tokens.truncate(n.max(1));
            self.finished = Some(FinishReason::Stop);
        }
        self.emitted += tokens.len();
        if self.emitted == self.options.max_tokens && self.finished.is_none() {
            self.finished = Some(FinishReason::Length);
        }
    }

    /// Remembers rows that the draft head has not seen.
    pub(super) fn feed_later(
        &mut self,
        hidden: &Tensor,
        tokens: &[u32],
        positions: &[u32],
    ) -> Result<()> {
        if !self.head {
            return Ok(());
        }
        self.unfed.hidden = match self.unfed.tokens.is_empty() {
            true => hidden.clone(),
            false => Tensor::cat(&[&self.unfed.hidden, hidden], 0)?,
        };
        self.unfed.tokens.extend_from_slice(tokens);
        self.unfed.positions.extend_from_slice(positions);
        Ok(())
    }

    /// Lets the head see what it has not seen, if that is more than `allowed` rows.
    fn prime(&mut self, model: &Model, cx: &Context, allowed: usize) -> Result<()> {
        if !self.head || self.unfed.tokens.len() <= allowed {
            return Ok(());
        }
        let rows = DraftRows {
            cache: &mut self.cache,
            tokens: &self.unfed.tokens,
            hidden: &self.unfed.hidden,
            positions: &self.unfed.positions,
        };
        model.prime(cx, &mut [rows])?;
        self.unfed.clear();
        Ok(())
    }

    /// Keeps the head from lagging too far behind while nobody drafts.
    pub(super) fn catch_up(&mut self, model: &Model, cx: &Context) -> Result<()> {
        self.prime(model, cx, LAG)
    }
}
