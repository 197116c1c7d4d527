//! How much of a prompt is kept.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How much of a prompt is kept. More is kept when more is required.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// This share of the chunks, rounded up, tail included; required tokens before the tail come on top. 1 keeps every row.
    Fraction(f64),
    /// This many tokens, to within a chunk, required ones included.
    Tokens(usize),
    /// The fewest chunks that hold this share of all importance.
    Mass(f64),
    /// As many tokens as the target can read so that the first token comes after this many seconds, by the speeds that
    /// the pipeline has measured; before it has, [`Keep::default`].
    Budget {
        /// Seconds to the first token.
        ttft_s: f64,
    },
}

impl Default for Keep {
    fn default() -> Self {
        Self::Fraction(0.2)
    }
}

impl From<f64> for Keep {
    fn from(share: f64) -> Self {
        Self::Fraction(share)
    }
}

impl Keep {
    /// Whether every row is kept without looking.
    pub fn is_all(&self, total: usize) -> bool {
        match *self {
            Self::Fraction(share) => share >= 1.0,
            Self::Tokens(tokens) => tokens >= total,
            Self::Mass(share) => share >= 1.0,
            Self::Budget { .. } => false,
        }
    }

    /// Checks the range.
    pub fn validate(&self) -> Result<()> {
        let what = match *self {
            Self::Fraction(k) | Self::Mass(k) if !(k > 0.0 && k <= 1.0) => {
                format!("{k} must be in (0, 1]")
            }
            Self::Tokens(0) => "0 tokens: keep at least 1".into(),
            Self::Budget { ttft_s } if !(ttft_s > 0.0 && ttft_s.is_finite()) => {
                format!("{ttft_s} seconds must be positive and finite")
            }
            _ => return Ok(()),
        };
        Err(Error::Option { name: "keep", what })
    }

    /// A budget of time as tokens, for a prompt of `total` tokens.
    pub fn resolve(self, total: usize, costs: Option<Costs>) -> Self {
        let Self::Budget { ttft_s } = self else {
            return self;
        };
        let Some(costs) = costs else {
            return Self::default();
        };
        let left = ttft_s - costs.draft_s_per_token * total as f64;
        let tokens = (left / costs.target_s_per_token).floor();
        // Not even the draft's reading fits: as little as possible.
        Self::Tokens((tokens.max(1.0) as usize).min(total))
    }
}

/// Measured costs of reading a prompt token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Seconds per token that the draft scores.
    pub draft_s_per_token: f64,
    /// Seconds per token that the target reads.
    pub target_s_per_token: f64,
}

impl Costs {
    /// The speed-up of the first token that the model `1 / (keep + d)` predicts when a share `kept` is read, `d` being the
    /// draft's cost by the target's.
    pub fn predicted_speedup(&self, kept: f64) -> f64 {
        1.0 / (kept + self.draft_s_per_token / self.target_s_per_token)
    }
}

impl FromStr for Keep {
    type Err = Error;

    /// `0.2` is a share of the chunks, `4000t` tokens, `mass:0.9` a share of the importance, `1.5s` seconds to the first token.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::Option {
            name: "keep",
            what: format!(
                "{text:?} is none of 0.2 (share), 4000t (tokens), mass:0.9 (share of importance), 1.5s (time to first token)"
            ),
        }
        };
        let number = |text: &str| text.parse::<f64>().map_err(|_| bad());
        let keep = if let Some(share) = text.strip_prefix("mass:") {
            Self::Mass(number(share)?)
        } else if let Some(tokens) = text.strip_suffix('t') {
            Self::Tokens(tokens.parse().map_err(|_| bad())?)
        } else if let Some(seconds) = text.strip_suffix('s') {
            Self::Budget {
                ttft_s: number(seconds)?,
            }
        } else {
            Self::Fraction(number(text)?)
        };
        keep.validate()?;
        Ok(keep)
    }
}
