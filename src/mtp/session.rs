//! A decoding: cycles of draft, verify, accept. Whatever the depth, the tokens are those of plain decoding.

use std::time::Instant;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::sampling::Sampling;
use super::stats::DecodeStats;
use crate::error::{Error, Result};
use crate::ops::Context;
use crate::qwen3_5::{Cache, DraftRows, Keep, Model, Rows};

/// The most drafts per cycle.
const MAX_DEPTH: usize = 15;

/// How a session decodes.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Drafts per cycle; 0 decodes plainly. A model without a draft head always does.
    pub depth: usize,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Tokens that end the text. The one that did is emitted.
    pub stop_tokens: Vec<u32>,
    /// The most tokens to emit.
    pub max_tokens: usize,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token (or, in the pipeline, a stop string).
    Stop,
    /// `max_tokens`, or the model's last position.
    Length,
}

/// Rows of the trunk whose next token is known and that the draft head has not seen.
struct Unfed {
    hidden: Tensor,
    tokens: Vec<u32>,
    positions: Vec<u32>,
}

/// One sequence being decoded.
pub struct Session {
    cache: Cache,
    options: SessionOptions,
    /// The last emitted token: it is in no cache yet.
    next: u32,
    first_is_out: bool,
    unfed: Unfed,
    emitted: usize,
    finished: Option<FinishReason>,
    stats: DecodeStats,
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
        if options.depth > MAX_DEPTH {
            let what = format!("{} is more than {MAX_DEPTH}", options.depth);
            return Err(Error::Option {
                name: "mtp-depth",
                what,
            });
        }
        if options.max_tokens == 0 {
            let what = "must be at least 1".into();
            return Err(Error::Option {
                name: "max-tokens",
                what,
            });
        }
        if !model.has_mtp() {
            options.depth = 0;
        }
        let position = cache.next_position();
        let next = draw(model, cx, last_hidden, &options.sampling, position)?[0];
        let row = position
            .checked_sub(1)
            .ok_or_else(|| Error::Prompt("empty: nothing was prefilled".into()))?;
        let stats = DecodeStats {
            depth: options.depth,
            ..Default::default()
        };
        Ok(Self {
            cache,
            options,
            next,
            first_is_out: false,
            unfed: Unfed {
                hidden: last_hidden.clone(),
                tokens: vec![next],
                positions: vec![row],
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

    /// The cache. The last emitted token is not in it.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Ends the session and gives back the cache and the last emitted token, which is not in it: a conversation's next
    /// turn feeds that token first. A draft head that was used has then seen every row of the trunk.
    pub fn into_parts(mut self, model: &Model, cx: &Context) -> Result<(Cache, u32)> {
        if self.options.depth > 0 && !self.unfed.tokens.is_empty() {
            let rows = DraftRows {
                cache: &mut self.cache,
                tokens: &self.unfed.tokens,
                hidden: &self.unfed.hidden,
                positions: &self.unfed.positions,
            };
            model.prime(cx, &mut [rows])?;
        }
        Ok((self.cache, self.next))
    }

    /// The tokens of one cycle: at least one until the text has ended, then none.
    pub fn step(&mut self, model: &Model, cx: &Context) -> Result<Vec<u32>> {
        if self.finished.is_some() {
            return Ok(vec![]);
        }
        if !self.first_is_out {
            self.first_is_out = true;
            let mut tokens = vec![self.next];
            self.clamp(&mut tokens);
            return Ok(tokens);
        }
        let position = self.cache.next_position();
        let limit = model.config().max_position_embeddings as u32;
        if position >= limit {
            self.finished = Some(FinishReason::Length);
            return Ok(vec![]);
        }
        // Drafts that could not be emitted, or would stand past the last position, are not made.
        let room =
            (self.options.max_tokens - self.emitted - 1).min((limit - position - 1) as usize);
        let drafts = self.drafts(model, cx, position, self.options.depth.min(room))?;
        let start = Instant::now();
        let tokens: Vec<u32> = std::iter::once(self.next)
            .chain(drafts.iter().copied())
            .collect();
        let positions: Vec<u32> = (position..position + tokens.len() as u32).collect();
        let hidden = model.forward(
            cx,
            &mut [Rows {
                cache: &mut self.cache,
                tokens: &tokens,
                positions: &positions,
                keep: Keep::Pending,
            }],
        )?;
        self.stats.verify_s += start.elapsed().as_secs_f64();
        let start = Instant::now();
        let drawn = match draw(model, cx, &hidden, &self.options.sampling, position + 1) {
            Ok(drawn) => drawn,
            Err(e) => {
                self.cache.accept(0)?;
                return Err(e);
            }
        };
        self.stats.sample_s += start.elapsed().as_secs_f64();
        let right = drafts
            .iter()
            .zip(&drawn)
            .take_while(|(d, t)| d == t)
            .count();
        let mut out = drawn[..=right].to_vec();
        self.clamp(&mut out);
        let rows = out.len();
        self.cache.accept(rows)?;
        // Where the text ended inside the block, nobody knows about the drafts after it.
        let judged = if rows <= right { rows } else { drafts.len() };
        self.stats.cycle(judged, right.min(rows), rows);
        self.feed_later(&hidden.narrow(0, 0, rows)?, &out, &positions[..rows])?;
        self.next = out[rows - 1];
        Ok(out)
    }

    /// Cuts `tokens` after the first that ends the text, and counts them.
    fn clamp(&mut self, tokens: &mut Vec<u32>) {
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
        self.emitted += tokens.len();
        if self.emitted == self.options.max_tokens && self.finished.is_none() {
            self.finished = Some(FinishReason::Length);
        }
    }

    fn feed_later(&mut self, hidden: &Tensor, tokens: &[u32], positions: &[u32]) -> Result<()> {
        if self.options.depth == 0 {
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

    /// Drafts up to `depth` tokens. The head first sees the trunk's own rows of the last cycle, which stay in its cache; what
    /// it then says to itself is forgotten.
    fn drafts(
        &mut self,
        model: &Model,
        cx: &Context,
        position: u32,
        depth: usize,
    ) -> Result<Vec<u32>> {
        if depth == 0 {
            return Ok(vec![]);
        }
        let start = Instant::now();
        let rows = DraftRows {
            cache: &mut self.cache,
            tokens: &self.unfed.tokens,
            hidden: &self.unfed.hidden,
            positions: &self.unfed.positions,
        };
        let out = model.draft(cx, &mut [rows])?;
        let hidden = out.narrow(0, out.dim(0)? - 1, 1)?;
        self.unfed.tokens.clear();
        self.unfed.positions.clear();
        let fed = self.cache.draft_rows();
        let drafts = self.chain(model, cx, position, depth, hidden);
        self.cache.truncate_draft(fed)?;
        self.stats.draft_s += start.elapsed().as_secs_f64();
        drafts
    }

    /// Drafts from the head's output `hidden`, which predicts the token after `position`.
    fn chain(
        &mut self,
        model: &Model,
        cx: &Context,
        position: u32,
        depth: usize,
        mut hidden: Tensor,
    ) -> Result<Vec<u32>> {
        let mut drafts = vec![];
        loop {
            let at = position + drafts.len() as u32;
            let logits = model.logits(cx, &hidden)?.to_dtype(DType::F32)?;
            let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
            // A head whose logits are useless costs drafts, never the text.
            let Ok(token) = self.options.sampling.draw(&logits, at + 1) else {
                return Ok(drafts);
            };
            drafts.push(token);
            if drafts.len() == depth {
                return Ok(drafts);
            }
            let rows = DraftRows {
                cache: &mut self.cache,
                tokens: &[token],
                hidden: &hidden,
                positions: &[at],
            };
            hidden = model.draft(cx, &mut [rows])?;
        }
    }
}

/// Draws a token per row of `hidden`; the first stands at `position`.
fn draw(
    model: &Model,
    cx: &Context,
    hidden: &Tensor,
    sampling: &Sampling,
    position: u32,
) -> Result<Vec<u32>> {
    let logits = model.logits(cx, hidden)?.to_dtype(DType::F32)?;
    let rows = logits.to_vec2::<f32>()?;
    let rows = rows.iter().zip(position..);
    rows.map(|(row, p)| sampling.draw(row, p)).collect()
}
