//! An answer's text as its tokens arrive.

use super::builder::Parts;
use super::{Event, GenerateOptions, StreamDecoder};
use crate::Result;

/// The answer's text, held back where a stop text may have begun.
pub(super) struct Answer<'a> {
    decoder: StreamDecoder<'a>,
    stop_tokens: &'a [u32],
    stop: &'a [String],
    held: String,
    out: String,
    /// All tokens, and how many of them events have told.
    pub ids: Vec<u32>,
    told: usize,
    stopped: bool,
}

impl<'a> Answer<'a> {
    pub fn new(parts: &'a Parts, options: &'a GenerateOptions) -> Self {
        Self {
            decoder: StreamDecoder::new(&parts.tokenizer),
            stop_tokens: &parts.stop_tokens,
            stop: &options.stop,
            held: String::new(),
            out: String::new(),
            ids: Vec::new(),
            told: 0,
            stopped: false,
        }
    }

    /// Adds tokens; after how many of them a stop text is complete, if one is (tokens after it are dropped).
    pub fn push(&mut self, tokens: &[u32]) -> Result<Option<usize>> {
        for (i, &id) in tokens.iter().enumerate() {
            self.ids.push(id);
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

    pub fn finish(&mut self) -> Result<()> {
        if !self.stopped {
            let rest = self.decoder.finish()?;
            self.held.push_str(&rest);
            self.release();
            self.out.push_str(&std::mem::take(&mut self.held));
        }
        Ok(())
    }

    pub fn event(&mut self) -> Event {
        let token_ids = self.ids[self.told..].to_vec();
        self.told = self.ids.len();
        Event::Text {
            text: std::mem::take(&mut self.out),
            token_ids,
        }
    }
}
