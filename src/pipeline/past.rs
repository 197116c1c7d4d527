//! What a conversation's turns leave behind: a cache, the text it stands for, and places that one can go back to.

use std::collections::VecDeque;
use std::ops::Range;

use candle_core::Tensor;

use super::reading::{Read, Reading};
use super::rendering::Layout;
use super::{SpecPrefillUsage, TextTokenizer};
use crate::ops::Context;
use crate::qwen3_5::{Cache, Mark};
use crate::Result;

/// Everything up to the last answer.
#[derive(Default)]
pub(super) struct Past {
    cache: Option<Cache>,
    tokens: Vec<u32>,
    /// What the tokens stand for, special tokens included.
    text: String,
    /// Where the text spells special tokens that are text.
    literal: Vec<Range<usize>>,
    /// Where in the text the prompt of the turn under way is marked.
    split: usize,
    places: VecDeque<Place>,
    /// Places that are remembered.
    limit: usize,
}

/// A place in the text at which the cache's state is known.
struct Place {
    mark: Mark,
    text: usize,
    /// Tokens up to here: as many as the cache has positions, or one more, which was emitted and is in no cache.
    tokens: usize,
    /// The hidden state of the last row, if the draft head waits to read it with the next token.
    waiting: Option<Tensor>,
}

impl Past {
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            ..Default::default()
        }
    }

    /// Bytes of the cache and of the remembered states.
    pub fn size_bytes(&self) -> usize {
        let marks = self.places.iter().map(|p| p.mark.size_bytes());
        self.cache.as_ref().map_or(0, Cache::size_bytes) + marks.sum::<usize>()
    }

    /// The state from which the next turn goes on, if nothing changes before it.
    pub fn end(&self) -> Option<&Mark> {
        self.places.back().map(|p| &p.mark)
    }

    /// Tokens up to the last place.
    pub fn tokens(&self) -> usize {
        self.places.back().map_or(0, |p| p.tokens)
    }

    /// Goes back to the last place whose text `layout` continues, between two tokens for certain. Returns the tokens that the
    /// cache has there, the one that it lacks if there is one, and where the new text begins.
    pub fn resume(
        &mut self,
        layout: &Layout,
        tokenizer: &TextTokenizer,
    ) -> (Vec<u32>, Option<u32>, usize) {
        while let (Some(place), Some(_)) = (self.places.back(), &self.cache) {
            if self.fits(place, layout, tokenizer) {
                let read = place.mark.next_position().get() as usize;
                let unread = self.tokens[read..place.tokens].first().copied();
                self.tokens.truncate(place.tokens);
                return (self.tokens[..read].to_vec(), unread, place.text);
            }
            self.places.pop_back();
        }
        *self = Self::new(self.limit);
        (vec![], None, 0)
    }

    fn fits(&self, place: &Place, layout: &Layout, tokenizer: &TextTokenizer) -> bool {
        let at = place.text;
        let Some(rest) = layout.text.strip_prefix(&self.text[..at]) else {
            return false;
        };
        // Where special tokens are cut off, tokens do not depend on what is beyond. The same text written by others may
        // be other tokens.
        let last = self.tokens[..place.tokens].last();
        let special = last.is_some_and(|id| tokenizer.is_special(*id));
        let spelled = layout.literal.iter().any(|r| r.start == at);
        let cut = special || (tokenizer.begins_special(rest) && !spelled);
        let before = |literal: &[Range<usize>]| literal.partition_point(|r| r.start < at);
        let mine = &self.literal[..before(&self.literal)];
        let theirs = &layout.literal[..before(&layout.literal)];
        !rest.is_empty() && cut && mine == theirs
    }

    /// Remembers what a turn's prompt is: `tokens` come after the place gone back to, and the text is marked at `split`.
    pub fn begin_turn(&mut self, layout: &Layout, tokens: &[u32], split: usize) {
        self.text.clone_from(&layout.text);
        self.literal.clone_from(&layout.literal);
        self.tokens.extend_from_slice(tokens);
        self.split = split;
    }

    /// Reads a turn's rows after the place gone back to; a second time too, for another selection.
    pub fn read(
        &mut self,
        reading: &Reading,
        cx: &Context,
        kept: &[u32],
        usage: &mut SpecPrefillUsage,
    ) -> Result<Read> {
        match (&mut self.cache, self.places.back()) {
            (Some(cache), Some(place)) => {
                cache.restore(&place.mark)?;
                reading.read_after(cx, cache, place.waiting.clone(), 0, kept)
            }
            _ => {
                let (cache, read) = reading.read(cx, kept, usage)?;
                self.cache = Some(cache);
                Ok(read)
            }
        }
    }

    /// Gives the cache away for an answer, and remembers the place within the prompt.
    pub fn begin_answer(&mut self, split: Option<(Mark, Tensor)>) -> Option<Cache> {
        if let Some((mark, hidden)) = split {
            self.push(Place {
                tokens: mark.next_position().get() as usize,
                mark,
                text: self.split,
                waiting: Some(hidden),
            });
        }
        self.cache.take()
    }

    /// Takes the cache back after an answer of these tokens: a text, and the stop token that may have ended it.
    pub fn answered(
        &mut self,
        cache: Cache,
        ids: &[u32],
        (text, stop): (&str, &str),
        tokenizer: &TextTokenizer,
    ) -> Result<()> {
        if !ids.is_empty() {
            let start = self.text.len();
            self.tokens.extend_from_slice(ids);
            self.text.push_str(text);
            let spelled = tokenizer.special_ranges(text).into_iter();
            (self.literal).extend(spelled.map(|r| start + r.start..start + r.end));
            self.text.push_str(stop);
            self.push(Place {
                mark: cache.mark()?,
                text: self.text.len(),
                tokens: self.tokens.len(),
                waiting: None,
            });
        }
        self.cache = Some(cache);
        Ok(())
    }

    fn push(&mut self, place: Place) {
        self.places.push_back(place);
        if self.places.len() > self.limit {
            self.places.pop_front();
        }
    }
}
