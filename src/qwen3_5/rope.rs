//! The kinds of rotary frequencies that `rope_parameters` can ask for, as transformers computes them
//! (`modeling_rope_utils.py`).
//!
//! transformers lets two kinds follow a sequence's length while it grows, so that cached keys and new queries disagree. Here
//! a model's frequencies are fixed by the longest sequence it is to take, and a row's result depends on its position alone.

use std::f64::consts::PI;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::ops::rope::Rope;

use super::config::TextConfig;

/// A kind of rotary frequencies with its parameters. `factor` stretches the context, `original` is the context (in tokens)
/// before that.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum RopeKind {
    /// `theta^(-2i/dims)`.
    #[default]
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// NTK-aware: a larger base for sequences longer than `original`.
    Dynamic {
        /// Stretch.
        factor: f64,
        /// `max_position_embeddings` as the file has it.
        original: usize,
    },
    /// YaRN (arXiv 2309.00071): slow pairs are divided by `factor`, fast ones stay, a ramp between.
    Yarn {
        /// Stretch.
        factor: f64,
        /// Context before it.
        original: usize,
        /// Turns within `original` above which a pair stays.
        beta_fast: f64,
        /// Turns below which it is divided.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole pairs.
        truncate: bool,
        /// Multiplies the rotated lanes of queries and keys.
        attention_factor: f64,
    },
    /// Llama 3.1: as YaRN, with a ramp over wavelengths.
    Llama3 {
        /// Stretch.
        factor: f64,
        /// Context before it.
        original: usize,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` stay.
        high_freq_factor: f64,
    },
    /// LongRoPE (arXiv 2402.13753): a divisor per pair, other ones for sequences longer than `original`.
    LongRope {
        /// Divisors of sequences up to `original`.
        short_factor: Vec<f64>,
        /// Divisors of longer ones.
        long_factor: Vec<f64>,
        /// Context before the stretch.
        original: usize,
        /// Multiplies the rotated lanes of queries and keys.
        attention_factor: f64,
    },
}

/// The fields of `rope_parameters` or of the older `rope_scaling`.
#[derive(Deserialize)]
pub(super) struct RopeParameters {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    pub(super) rope_theta: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) mrope_section: Option<[usize; 3]>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    truncate: Option<bool>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
}

impl RopeParameters {
    /// The kind; the error says what is wrong with it. `positions` is the file's `max_position_embeddings`, `outer` an
    /// `original_max_position_embeddings` beside the parameters, which goes first.
    pub(super) fn kind(
        &self,
        positions: usize,
        outer: Option<usize>,
    ) -> std::result::Result<RopeKind, String> {
        let name = self.rope_type.as_deref().or(self.kind.as_deref());
        let name = name.unwrap_or("default");
        let positive = |field: &str, value: Option<f64>| match value {
            Some(v) if v.is_finite() && v > 0.0 => Ok(v),
            Some(v) => Err(format!("{name}: {field} {v} is not positive")),
            None => Err(format!("{name}: {field} is missing")),
        };
        let inner = self.original_max_position_embeddings;
        let original = outer.or(inner).unwrap_or(positions);
        if original == 0 {
            return Err(format!("{name}: original_max_position_embeddings is 0"));
        }
        let ratio = positions as f64 / original as f64;
        let kind = match name {
            "default" | "mrope" => RopeKind::Default,
            "linear" => RopeKind::Linear {
                factor: stretch(name, self.factor)?,
            },
            "dynamic" => RopeKind::Dynamic {
                factor: stretch(name, self.factor)?,
                original: positions,
            },
            "yarn" => {
                let factor = stretch(name, self.factor.or(Some(ratio)))?;
                let magnitude = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
                let inferred = match (self.mscale, self.mscale_all_dim) {
                    (Some(m), Some(all)) if m != 0.0 && all != 0.0 => magnitude(m) / magnitude(all),
                    _ => magnitude(1.0),
                };
                let or_default = |value: Option<f64>, default| match value {
                    Some(v) if v != 0.0 => v,
                    _ => default,
                };
                let attention = self.attention_factor.or(Some(inferred));
                RopeKind::Yarn {
                    factor,
                    original,
                    beta_fast: positive("beta_fast", Some(or_default(self.beta_fast, 32.0)))?,
                    beta_slow: positive("beta_slow", Some(or_default(self.beta_slow, 1.0)))?,
                    truncate: self.truncate.unwrap_or(true),
                    attention_factor: positive("attention_factor", attention)?,
                }
            }
            "llama3" => {
                let low_freq_factor = positive("low_freq_factor", self.low_freq_factor)?;
                let high_freq_factor = positive("high_freq_factor", self.high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    return Err(format!(
                        "llama3: high_freq_factor {high_freq_factor} must be more than low_freq_factor {low_freq_factor}"
                    ));
                }
                RopeKind::Llama3 {
                    factor: stretch(name, self.factor)?,
                    original,
                    low_freq_factor,
                    high_freq_factor,
                }
            }
            "longrope" => {
                let factor = positive("factor", self.factor.or(Some(ratio)))?;
                let inferred = match factor <= 1.0 {
                    true => 1.0,
                    false => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
                };
                let attention = self.attention_factor.or(Some(inferred));
                let divisors = |field: &str, list: &Option<Vec<f64>>| match list {
                    Some(list) if list.iter().all(|f| f.is_finite() && *f > 0.0) => {
                        Ok(list.clone())
                    }
                    Some(_) => Err(format!("longrope: {field} has an entry that is not positive")),
                    None => Err(format!("longrope: {field} is missing")),
                };
                RopeKind::LongRope {
                    short_factor: divisors("short_factor", &self.short_factor)?,
                    long_factor: divisors("long_factor", &self.long_factor)?,
                    original,
                    attention_factor: positive("attention_factor", attention)?,
                }
            }
            other => {
                return Err(format!(
                    "rope type {other:?} is not supported: expected default, mrope, linear, dynamic, yarn, llama3 or longrope"
                ))
            }
        };
        Ok(kind)
    }
}

fn stretch(name: &str, factor: Option<f64>) -> std::result::Result<f64, String> {
    match factor {
        Some(v) if v.is_finite() && v >= 1.0 => Ok(v),
        Some(v) => Err(format!("{name}: factor {v} is not 1 or more")),
        None => Err(format!("{name}: factor is missing")),
    }
}

impl RopeKind {
    /// Positions that a model of `positions` (`max_position_embeddings`) takes with this kind.
    pub(super) fn reach(&self, positions: usize) -> usize {
        let stretched = |context: usize, factor: f64| (context as f64 * factor) as usize;
        match self {
            Self::Linear { factor } => stretched(positions, *factor),
            Self::Dynamic { factor, original } => stretched(*original, *factor),
            Self::Yarn {
                factor, original, ..
            } => stretched(*original, *factor).max(positions),
            Self::Default | Self::Llama3 { .. } | Self::LongRope { .. } => positions,
        }
    }
}

fn fits(sections: [usize; 3], pairs: usize) -> bool {
    let sum = sections
        .iter()
        .try_fold(0usize, |sum, s| sum.checked_add(*s));
    sum == Some(pairs)
}

impl TextConfig {
    /// Whether rows may have positions on three axes.
    pub fn has_axes(&self) -> bool {
        (self.mrope_section).is_some_and(|sections| fits(sections, self.rotary_dims() / 2))
    }

    /// The rotary embedding for sequences of up to `longest` tokens; the length matters to `dynamic` and `longrope` alone.
    pub fn rope(&self, longest: usize) -> Result<Rope> {
        let (dims, base) = (self.rotary_dims(), self.rope_theta);
        let frequencies = self.frequencies(longest, base, dims)?;
        let rope = Rope::from_frequencies(frequencies, dims)?;
        let rope = match &self.rope_kind {
            RopeKind::Yarn {
                attention_factor, ..
            }
            | RopeKind::LongRope {
                attention_factor, ..
            } => rope.with_pre_scale(*attention_factor as f32),
            _ => rope,
        };
        // Sections that do not fit matter only to three-axis positions, which are then refused.
        match self.mrope_section {
            Some(sections) if fits(sections, dims / 2) => rope.with_sections(sections),
            _ => Ok(rope),
        }
    }

    fn frequencies(&self, longest: usize, base: f64, dims: usize) -> Result<Vec<f32>> {
        let plain =
            |base: f64| (0..dims / 2).map(move |i| base.powf(-2.0 * i as f64 / dims as f64));
        let frequencies: Vec<f64> = match &self.rope_kind {
            RopeKind::Default => plain(base).collect(),
            RopeKind::Linear { factor } => plain(base).map(|f| f / factor).collect(),
            RopeKind::Dynamic { factor, original } => {
                let longest = longest.max(*original) as f64 / *original as f64;
                // With a single pair nothing depends on the base.
                let power = dims as f64 / (dims as f64 - 2.0).max(1.0);
                plain(base * (factor * longest - (factor - 1.0)).powf(power)).collect()
            }
            RopeKind::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                // The pair that turns `turns` times within the original context.
                let pair = |turns: f64| {
                    dims as f64 * (*original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * base.ln())
                };
                let (low, high) = match (pair(*beta_fast), pair(*beta_slow)) {
                    (low, high) if *truncate => (low.floor(), high.ceil()),
                    ends => ends,
                };
                let (low, mut high) = (low.max(0.0), high.min(dims as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let blend = |(i, f): (usize, f64)| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                };
                plain(base).enumerate().map(blend).collect()
            }
            RopeKind::Llama3 {
                factor,
                original,
                low_freq_factor: low,
                high_freq_factor: high,
            } => {
                let original = *original as f64;
                let scale = |f: f64| {
                    let wavelength = 2.0 * PI / f;
                    if wavelength < original / high {
                        return f;
                    }
                    if wavelength > original / low {
                        return f / factor;
                    }
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * f / factor + smooth * f
                };
                plain(base).map(scale).collect()
            }
            RopeKind::LongRope {
                short_factor,
                long_factor,
                original,
                ..
            } => {
                let factors = match longest > *original {
                    true => long_factor,
                    false => short_factor,
                };
                if factors.len() != dims / 2 {
                    let what =
                        format!("longrope: {} factors for {} pairs", factors.len(), dims / 2);
                    return Err(Error::argument("rope", what));
                }
                plain(base).zip(factors).map(|(f, by)| f / by).collect()
            }
        };
        Ok(frequencies.into_iter().map(|f| f as f32).collect())
    }
}
