//! Two numbers that a sparse prefill drives apart: how much a cache holds, and where the text is.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Rows that a cache holds. Not a place in the text: that is a [`Position`], and the one is refused for the other.
///
/// ```compile_fail
/// # use candle_specprefill::qwen3_5::Cache;
/// fn wrong(cache: &mut Cache) {
///     cache.set_next_position(cache.length());
/// }
/// ```
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct CacheLength(usize);

/// A place in the text, by which RoPE rotates. Not a number of rows: that is a [`CacheLength`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Position(u32);

impl CacheLength {
    /// That many rows.
    pub fn new(rows: usize) -> Self {
        Self(rows)
    }

    /// The rows as a number.
    pub fn get(self) -> usize {
        self.0
    }
}

impl Position {
    /// The place of the token with this index in the text.
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// The index in the text.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for CacheLength {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} rows", self.0)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "position {}", self.0)
    }
}

impl PartialEq<usize> for CacheLength {
    fn eq(&self, rows: &usize) -> bool {
        self.0 == *rows
    }
}

impl PartialEq<u32> for Position {
    fn eq(&self, index: &u32) -> bool {
        self.0 == *index
    }
}
