//! Prefixes that were prefilled before: a system block is read once, whatever turns follow it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Tensor;

use crate::qwen3_5::Cache;

/// A prefix and what reading it leaves behind. Exact: only a prompt that begins with these very tokens may use it.
pub(super) struct Prefix {
    pub tokens: Vec<u32>,
    /// Every row of the prefix, at its true position.
    pub cache: Cache,
    /// The last row's hidden state, `[1, hidden]`, which the draft head still waits to read: its next token is the first
    /// after the prefix.
    pub hidden: Tensor,
    /// Whether the draft head's cache is primed.
    pub primed: bool,
}

/// The latest prefixes, as many as fit in the limit.
pub(super) struct PrefixStore {
    entries: Mutex<VecDeque<Arc<Prefix>>>,
    limit_bytes: usize,
}

impl PrefixStore {
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            entries: Mutex::default(),
            limit_bytes,
        }
    }

    pub fn is_off(&self) -> bool {
        self.limit_bytes == 0
    }

    /// The stored prefix with exactly these tokens.
    pub fn get(&self, tokens: &[u32], primed: bool) -> Option<Arc<Prefix>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let found = |e: &Arc<Prefix>| e.primed == primed && e.tokens == tokens;
        let at = entries.iter().position(found)?;
        let entry = entries.remove(at)?;
        entries.push_front(entry.clone());
        Some(entry)
    }

    /// Stores a prefix; those that were not used for longest make room. One that is larger than the limit is not stored.
    pub fn insert(&self, prefix: Arc<Prefix>) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|e| e.primed != prefix.primed || e.tokens != prefix.tokens);
        entries.push_front(prefix);
        let size = |e: &Arc<Prefix>| e.cache.size_bytes();
        while entries.iter().map(size).sum::<usize>() > self.limit_bytes {
            entries.pop_back();
        }
    }
}
