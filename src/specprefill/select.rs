//! From a score per token to the rows that are kept. Pure.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Settings;

/// Why a chunk was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// It holds rows that must be kept.
    Mandatory,
    /// It is part of the tail.
    Tail,
    /// Its score.
    Score,
}

/// One chunk of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chunk {
    /// Its first token.
    pub start: u32,
    /// The token after its last.
    pub end: u32,
    /// Mean importance of its tokens.
    pub score: f32,
    /// Why it was kept, if it was.
    pub kept: Option<Kept>,
}

/// Splits `importance` (one value per token) in chunks and keeps `ceil(chunks * keep)` of them, at least one: the tail and
/// the chunks that touch `mandatory` always, then the best scored (ties to the earlier). More are kept when more
/// must be. `keep` of 1 or more keeps all. A score that is not a number counts as the lowest.
pub fn select_chunks(
    importance: &[f32],
    mandatory: &[Range<usize>],
    settings: &Settings,
) -> Vec<Chunk> {
    let (total, size) = (importance.len(), settings.chunk.max(1));
    let count = total.div_ceil(size);
    let mut chunks: Vec<Chunk> = (0..count)
        .map(|i| {
            let (start, end) = (i * size, ((i + 1) * size).min(total));
            let sum: f64 = importance[start..end].iter().map(|s| *s as f64).sum();
            Chunk {
                start: start as u32,
                end: end as u32,
                score: (sum / (end - start) as f64) as f32,
                kept: None,
            }
        })
        .collect();
    let budget = match settings.keep >= 1.0 {
        true => count,
        false => ((count as f64 * settings.keep).ceil() as usize).clamp(1, count.max(1)),
    };
    // Whole chunks, so that at least `tail` tokens are kept even where the last chunk is short.
    let tail = match settings.tail {
        0 => count,
        tail => total.saturating_sub(tail) / size,
    };
    for chunk in &mut chunks[tail..] {
        chunk.kept = Some(Kept::Tail);
    }
    for range in mandatory
        .iter()
        .filter(|r| r.start < r.end && r.start < total)
    {
        for chunk in &mut chunks[range.start / size..range.end.min(total).div_ceil(size)] {
            chunk.kept = Some(Kept::Mandatory);
        }
    }
    let fixed = chunks.iter().filter(|c| c.kept.is_some()).count();
    let mut open: Vec<usize> = (0..count).filter(|i| chunks[*i].kept.is_none()).collect();
    let rank = |s: f32| if s.is_nan() { f32::NEG_INFINITY } else { s };
    open.sort_by(|a, b| {
        rank(chunks[*b].score)
            .total_cmp(&rank(chunks[*a].score))
            .then(a.cmp(b))
    });
    for i in open.into_iter().take(budget.saturating_sub(fixed)) {
        chunks[i].kept = Some(Kept::Score);
    }
    chunks
}

/// The tokens of the kept chunks, in order.
pub fn kept_rows(chunks: &[Chunk]) -> Vec<u32> {
    let kept = chunks.iter().filter(|c| c.kept.is_some());
    kept.flat_map(|c| c.start..c.end).collect()
}
