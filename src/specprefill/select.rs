//! From a score per token to the rows that are kept. Pure.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::spans::union;
use super::{Keep, Settings};

/// Why a chunk was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// All of its tokens are required.
    Required,
    /// It is part of the tail.
    Tail,
    /// Its score.
    Score,
    /// It stands beside a chunk that was kept for its score.
    Neighbour,
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
    /// Tokens of it that are kept in any case.
    pub required: u32,
    /// Why the whole of it was kept, if it was.
    pub kept: Option<Kept>,
}

impl Chunk {
    fn len(&self) -> u32 {
        self.end - self.start
    }

    /// What keeping the rest of it costs, in chunks.
    fn cost(&self) -> f64 {
        (self.len() - self.required) as f64 / self.len() as f64
    }
}

/// Splits `importance` (one value per token) in chunks and keeps as many as `settings.keep` says: those of the tail always
/// and those whose tokens are all `required`, then the best scored (ties to the earlier), each with `settings.neighbours` on
/// either side. Required tokens count, also those of chunks that are dropped. A score that is not a number is the lowest.
pub fn select_chunks(
    importance: &[f32],
    required: &[Range<usize>],
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
                required: 0,
                kept: None,
            }
        })
        .collect();
    for range in union(required.iter().cloned(), total) {
        for chunk in &mut chunks[range.start / size..range.end.div_ceil(size)] {
            let (from, to) = (
                range.start.max(chunk.start as usize),
                range.end.min(chunk.end as usize),
            );
            chunk.required += (to - from) as u32;
        }
    }
    // Whole chunks, so that at least `tail` tokens are kept even where the last chunk is short.
    let tail = match settings.tail {
        0 => count,
        tail => total.saturating_sub(tail) / size,
    };
    for (i, chunk) in chunks.iter_mut().enumerate() {
        if i >= tail {
            chunk.required = chunk.len();
            chunk.kept = Some(Kept::Tail);
        } else if chunk.required == chunk.len() {
            chunk.kept = Some(Kept::Required);
        }
    }
    if settings.keep.is_all(total) {
        chunks
            .iter_mut()
            .filter(|c| c.kept.is_none())
            .for_each(|c| c.kept = Some(Kept::Score));
        return chunks;
    }
    let mut budget = Budget::new(settings.keep, &chunks, size);
    let rank = |s: f32| if s.is_nan() { f32::NEG_INFINITY } else { s };
    let mut order: Vec<usize> = (0..count).filter(|i| chunks[*i].kept.is_none()).collect();
    order.sort_by(|a, b| {
        rank(chunks[*b].score)
            .total_cmp(&rank(chunks[*a].score))
            .then(a.cmp(b))
    });
    for i in order {
        let near = i.saturating_sub(settings.neighbours)..=(i + settings.neighbours).min(count - 1);
        for (j, why) in std::iter::once((i, Kept::Score)).chain(near.map(|j| (j, Kept::Neighbour)))
        {
            if budget.is_spent() {
                return chunks;
            }
            if chunks[j].kept.is_none() {
                chunks[j].kept = Some(why);
                budget.spend(&chunks[j]);
            }
        }
    }
    chunks
}

/// What is left to keep.
enum Budget {
    Chunks(f64),
    /// The share that is left, and all that there is.
    Mass(f64, f64),
}

impl Budget {
    fn new(keep: Keep, chunks: &[Chunk], size: usize) -> Self {
        if let Keep::Mass(share) = keep {
            let all: f64 = chunks.iter().map(mass).sum();
            let required = chunks.iter().map(|c| mass(c) * (1.0 - c.cost()));
            return match all > 0.0 {
                true => Self::Mass(share - required.sum::<f64>() / all, all),
                false => Self::Mass(0.0, 1.0),
            };
        }
        let required: f64 = chunks.iter().map(|c| 1.0 - c.cost()).sum();
        let free = match keep {
            Keep::Fraction(_) | Keep::Budget { .. } => free(chunks),
            _ => 0.0,
        };
        Self::Chunks(budget(keep, chunks.len() as f64 - free, size) + free - required)
    }

    /// Rounding errors of fractions of chunks and of shares stay below the margin.
    fn is_spent(&self) -> bool {
        match *self {
            Self::Chunks(left) | Self::Mass(left, _) => left < 1e-6,
        }
    }

    fn spend(&mut self, chunk: &Chunk) {
        match self {
            Self::Chunks(left) => *left -= chunk.cost(),
            Self::Mass(left, all) => *left -= mass(chunk) * chunk.cost() / *all,
        }
    }
}

/// Required tokens before the tail, in chunks. A share is a share of what competes, as in the published system: a long system
/// block is kept beside it and does not eat it up. The tail counts.
fn free(chunks: &[Chunk]) -> f64 {
    let before = chunks.iter().filter(|c| c.kept != Some(Kept::Tail));
    before.map(|c| 1.0 - c.cost()).sum()
}

/// Chunks that may be kept, of `count`.
fn budget(keep: Keep, count: f64, size: usize) -> f64 {
    match keep {
        // A sum of fractions of chunks may lie a hair above a whole number.
        Keep::Fraction(share) => (count * share - 1e-9).ceil().clamp(1.0, count.max(1.0)),
        Keep::Tokens(tokens) => tokens as f64 / size as f64,
        Keep::Mass(_) => count,
        Keep::Budget { .. } => budget(Keep::default(), count, size),
    }
}

/// Tokens that may be kept; `None` where the scores decide.
pub(super) fn budget_tokens(settings: &Settings, chunks: &[Chunk]) -> Option<usize> {
    let size = settings.chunk.max(1);
    let free = match settings.keep {
        Keep::Mass(_) => return None,
        Keep::Tokens(_) => 0.0,
        _ => free(chunks),
    };
    let chunks = budget(settings.keep, chunks.len() as f64 - free, size) + free;
    Some((chunks * size as f64).round() as usize)
}

/// A chunk's importance; what is not a positive number counts nothing.
fn mass(chunk: &Chunk) -> f64 {
    let score = chunk.score as f64;
    match score.is_finite() && score > 0.0 {
        true => score * chunk.len() as f64,
        false => 0.0,
    }
}

/// The tokens of the kept chunks and the required ones, sorted, each once.
pub fn kept_rows(chunks: &[Chunk], required: &[Range<usize>]) -> Vec<u32> {
    let total = chunks.last().map_or(0, |c| c.end as usize);
    let kept = chunks.iter().filter(|c| c.kept.is_some());
    let kept = kept.map(|c| c.start as usize..c.end as usize);
    let all = union(kept.chain(required.iter().cloned()), total);
    all.into_iter().flatten().map(|i| i as u32).collect()
}
