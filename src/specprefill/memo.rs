//! Scores of prompts that were scored before.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use super::Scores;

/// The latest scores of one draft, so that the same prompt is not scored again, whatever the selection's settings are then.
/// Prompts are compared token by token; failures are never remembered.
#[derive(Debug)]
pub struct ScoreMemo {
    entries: Mutex<VecDeque<Entry>>,
    capacity: usize,
}

#[derive(Debug)]
struct Entry {
    scorer: String,
    tokens: Box<[u32]>,
    scores: Arc<Scores>,
}

impl Default for ScoreMemo {
    fn default() -> Self {
        Self::new(64)
    }
}

impl ScoreMemo {
    /// Remembers up to `capacity` prompts; the one that was not used for longest goes first.
    pub fn new(capacity: usize) -> Self {
        Self {
            entries: Mutex::default(),
            capacity,
        }
    }

    /// What the scorer called `scorer` said about `tokens`.
    pub fn get(&self, scorer: &str, tokens: &[u32]) -> Option<Arc<Scores>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let found = |e: &Entry| e.scorer == scorer && *e.tokens == *tokens;
        let entry = entries.iter().position(found)?;
        let entry = entries.remove(entry)?;
        let scores = entry.scores.clone();
        entries.push_front(entry);
        Some(scores)
    }

    /// Remembers scores.
    pub fn insert(&self, scorer: &str, tokens: &[u32], scores: Arc<Scores>) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|e| e.scorer != scorer || *e.tokens != *tokens);
        entries.push_front(Entry {
            scorer: scorer.into(),
            tokens: tokens.into(),
            scores,
        });
        entries.truncate(self.capacity);
    }

    /// Prompts that are remembered.
    pub fn len(&self) -> usize {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
