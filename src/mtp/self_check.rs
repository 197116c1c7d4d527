//! Whether a draft head knows its trunk, before anybody waits for its drafts.

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::{argmax, Context};
use crate::qwen3_5::{DraftRows, Keep, Model, Rows};

/// How often head and trunk say the same, on a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadCheck {
    /// Share of rows at which the head's most likely token is the trunk's.
    pub agreement: f64,
    /// The share that always naming the trunk's most frequent token would reach.
    pub chance: f64,
    /// Rows that were compared.
    pub rows: usize,
}

impl HeadCheck {
    /// Whether the head beats chance clearly.
    pub fn passed(&self) -> bool {
        self.agreement >= 0.05 && self.agreement >= 1.2 * self.chance.min(0.5)
    }

    /// What is likely wrong with a head that did not pass.
    pub fn advice(&self) -> String {
        format!(
            "the MTP head agrees with its model on {:.0} % of {} tokens, no better than chance ({:.0} %): its norms may be stored with another \
             convention (w or 1 + w), or its fc may be quantized; MTP is off unless it is forced",
            100.0 * self.agreement,
            self.rows,
            100.0 * self.chance
        )
    }
}

/// Runs `tokens` (at least 3) through trunk and head and compares what they predict. `None` without a head.
pub fn check_head(model: &Model, cx: &Context, tokens: &[u32]) -> Result<Option<HeadCheck>> {
    if !model.has_mtp() || tokens.len() < 3 {
        return Ok(None);
    }
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let mut cache = model.new_cache()?;
    let hidden = model.forward(
        cx,
        &mut [Rows {
            cache: &mut cache,
            tokens,
            positions: &positions,
            keep: Keep::Commit,
        }],
    )?;
    let best = |hidden: &Tensor| -> Result<Vec<u32>> {
        Ok(argmax(cx, &model.logits(cx, hidden)?)?.to_vec1()?)
    };
    let trunk = best(&hidden)?;
    // Row t of the head sees the trunk's row t and token t + 1, and predicts token t + 2 as row t + 1 of the trunk does.
    let rows = tokens.len() - 1;
    let out = model.draft(
        cx,
        &mut [DraftRows {
            cache: &mut cache,
            tokens: &tokens[1..],
            hidden: &hidden.narrow(0, 0, rows)?,
            positions: &positions[..rows],
        }],
    )?;
    let head = best(&out)?;
    let same = head.iter().zip(&trunk[1..]).filter(|(a, b)| a == b).count();
    let mut sorted = trunk[1..].to_vec();
    sorted.sort_unstable();
    let most = sorted.chunk_by(|a, b| a == b).map(<[u32]>::len).max();
    Ok(Some(HeadCheck {
        agreement: same as f64 / rows as f64,
        chance: most.unwrap_or(0) as f64 / rows as f64,
        rows,
    }))
}
