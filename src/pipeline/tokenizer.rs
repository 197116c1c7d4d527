//! Text to tokens, and tokens to text as they arrive.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use tokenizers::Tokenizer;

use crate::{Error, Result};

/// The bytes of a text that each token stands for: from, to.
pub type Offsets = Vec<(usize, usize)>;

/// A model's `tokenizer.json`.
#[derive(Clone)]
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    special: HashSet<u32>,
    /// The same without special tokens, made when a text needs it.
    plain: Arc<OnceLock<Tokenizer>>,
}

impl TextTokenizer {
    /// Reads `tokenizer.json` of a model's folder.
    pub fn read(dir: impl AsRef<Path>) -> Result<Self> {
        let file = dir.as_ref().join("tokenizer.json");
        if !file.is_file() {
            return Err(Error::Tokenizer(format!(
                "{}: no such file",
                file.display()
            )));
        }
        let tokenizer = Tokenizer::from_file(&file)
            .map_err(|error| Error::Tokenizer(format!("{}: {error}", file.display())))?;
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special);
        Ok(Self {
            special: special.map(|(id, _)| *id).collect(),
            tokenizer,
            plain: Arc::default(),
        })
    }

    /// The tokens of a text. Nothing is added; special tokens written in the text are taken as such.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer
            .encode_fast(text, false)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| Error::Tokenizer(error.to_string()))
    }

    /// The tokens of a text, each with the bytes of the text that it stands for.
    pub fn encode_with_offsets(&self, text: &str) -> Result<(Vec<u32>, Offsets)> {
        let encoding = self.tokenizer.encode(text, false);
        let encoding = encoding.map_err(|error| Error::Tokenizer(error.to_string()))?;
        Ok((encoding.get_ids().to_vec(), encoding.get_offsets().to_vec()))
    }

    /// [`TextTokenizer::encode_with_offsets`] of a rendered prompt: what looks like a special token within `literal` (byte
    /// ranges: what users wrote) is plain text.
    pub fn encode_prompt(
        &self,
        text: &str,
        literal: &[Range<usize>],
    ) -> Result<(Vec<u32>, Offsets)> {
        let (ids, offsets) = self.encode_with_offsets(text)?;
        let own =
            |(start, end): (usize, usize)| literal.iter().all(|c| end <= c.start || c.end <= start);
        let special = ids.iter().copied().zip(offsets.iter().copied());
        let special: Vec<_> = special
            .filter(|(id, _)| self.special.contains(id))
            .collect();
        if special.iter().all(|(_, at)| own(*at)) {
            return Ok((ids, offsets));
        }
        // The tokenizer cuts a text at special tokens before all else, so pieces between the template's own give what the
        // whole would.
        let plain = self.plain.get_or_init(|| {
            let mut plain = self.tokenizer.clone();
            plain.set_encode_special_tokens(true);
            plain
        });
        let (mut ids, mut offsets, mut from) = (vec![], vec![], 0);
        let end = (None, (text.len(), text.len()));
        let cuts = special.into_iter().filter(|(_, at)| own(*at));
        for (id, at) in cuts.map(|(id, at)| (Some(id), at)).chain([end]) {
            let piece = text.get(from..at.0).unwrap_or_default();
            let encoding = plain.encode(piece, false);
            let encoding = encoding.map_err(|error| Error::Tokenizer(error.to_string()))?;
            ids.extend(encoding.get_ids());
            let shifted = encoding.get_offsets().iter();
            offsets.extend(shifted.map(|(a, b)| (a + from, b + from)));
            ids.extend(id);
            offsets.extend(id.map(|_| at));
            from = at.1;
        }
        Ok((ids, offsets))
    }

    /// Where a text spells special tokens, in order; what overlaps is one.
    pub(super) fn special_ranges(&self, text: &str) -> Vec<Range<usize>> {
        let spelled = self
            .special
            .iter()
            .filter_map(|id| self.tokenizer.id_to_token(*id));
        let spelled = spelled.filter(|token| !token.is_empty());
        let found = spelled.flat_map(|token| {
            let found = text
                .match_indices(&*token)
                .map(|(at, _)| at..at + token.len());
            found.collect::<Vec<_>>()
        });
        let mut found: Vec<Range<usize>> = found.collect();
        found.sort_by_key(|range| (range.start, range.end));
        let mut ranges: Vec<Range<usize>> = vec![];
        for range in found {
            match ranges.last_mut() {
                Some(last) if range.start < last.end => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        ranges
    }

    /// The text of tokens, without special tokens. Incomplete characters become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer
            .decode(ids, true)
            .map_err(|error| Error::Tokenizer(error.to_string()))
    }

    /// The text of tokens, special tokens included.
    pub(super) fn decode_all(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer
            .decode(ids, false)
            .map_err(|error| Error::Tokenizer(error.to_string()))
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether a text begins with a special token.
    pub(super) fn begins_special(&self, text: &str) -> bool {
        let mut special = (self.special.iter()).filter_map(|id| self.tokenizer.id_to_token(*id));
        special.any(|token| !token.is_empty() && text.starts_with(&token))
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Number of tokens, added ones included.
    pub fn len(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How `other` differs from this one, `None` if both give every token the same id.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let (mine, theirs) = (self.by_id(), other.by_id());
        if mine == theirs {
            return None;
        }
        let id = (0..=u32::MAX).find(|id| mine.get(id) != theirs.get(id))?;
        let show = |token: Option<&String>| token.map_or("nothing".into(), |t| format!("{t:?}"));
        Some(format!(
            "{} and {} tokens; id {id} is {} here and {} there",
            mine.len(),
            theirs.len(),
            show(mine.get(&id)),
            show(theirs.get(&id)),
        ))
    }

    fn by_id(&self) -> HashMap<u32, String> {
        let vocabulary = self.tokenizer.get_vocab(true);
        vocabulary
            .into_iter()
            .map(|(token, id)| (id, token))
            .collect()
    }
}

/// Decodes tokens one after the other and never gives out part of a character.
pub struct StreamDecoder<'a> {
    tokenizer: &'a TextTokenizer,
    ids: Vec<u32>,
    /// Tokens before `start` are forgotten; those up to `shown` have been given out and remain as context,
    /// because some decoders treat the first token of a text in a way of their own.
    start: usize,
    shown: usize,
}

impl<'a> StreamDecoder<'a> {
    /// Starts an empty text.
    pub fn new(tokenizer: &'a TextTokenizer) -> Self {
        Self {
            tokenizer,
            ids: Vec::new(),
            start: 0,
            shown: 0,
        }
    }

    /// Adds a token and gives the text that is complete now, possibly none.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.next(false)
    }

    /// What is left at the end; an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> Result<String> {
        self.next(true)
    }

    fn next(&mut self, last: bool) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[self.start..self.shown])?;
        let now = self.tokenizer.decode(&self.ids[self.start..])?;
        if !last && now.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = now.get(before.len()..).unwrap_or_default().to_string();
        if !new.is_empty() {
            self.start = self.shown;
            self.shown = self.ids.len();
        }
        Ok(new)
    }
}
