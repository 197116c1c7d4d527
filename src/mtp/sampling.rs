//! Drawing a token: the argmax of filtered log-probabilities plus Gumbel noise.
//!
//! The noise of a token at a position comes from a counter-based generator keyed by (seed, position, token), so a draw
//! depends on nothing else: a draft drawn with the same noise is right exactly when plain sampling would have drawn it.
//! (Gumbel-max: argmax of `log p + G` is distributed as `p`.)

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ops::argmax;

/// Below it, dividing logits by the temperature would leave f32's range; such draws are greedy ones anyway.
const MIN_TEMPERATURE: f32 = 1e-6;

/// How tokens are drawn. Filters apply in this order: penalties, logit bias, temperature, top-k, top-p, min-p.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// 0 takes the most likely token, always; above it, logits are divided by it.
    pub temperature: f32,
    /// Keeps the `top_k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens whose probabilities reach `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least `min_p` times as likely as the most likely; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that the prompt or the text has (Keskar et al., 2019); 1 is
    /// off.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens that the generated text has.
    pub presence_penalty: f32,
    /// Taken from a token's logit as often as the generated text has it.
    pub frequency_penalty: f32,
    /// Added to single tokens' logits; `-inf` forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: vec![],
            seed: 0,
        }
    }
}

impl Sampling {
    /// Checks the ranges.
    pub fn validate(&self) -> Result<()> {
        let check = |name, ok: bool, what: String| match ok {
            true => Ok(()),
            false => Err(Error::Option { name, what }),
        };
        let t = self.temperature;
        check(
            "temperature",
            t == 0.0 || (t.is_finite() && t >= MIN_TEMPERATURE),
            format!("{t} must be 0 (greedy) or at least {MIN_TEMPERATURE}"),
        )?;
        let p = self.top_p;
        check(
            "top-p",
            p > 0.0 && p <= 1.0,
            format!("{p} must be in (0, 1]"),
        )?;
        let p = self.min_p;
        check(
            "min-p",
            (0.0..=1.0).contains(&p),
            format!("{p} must be in [0, 1]"),
        )?;
        let p = self.repetition_penalty;
        check(
            "repetition-penalty",
            p.is_finite() && p > 0.0,
            format!("{p} must be above 0; 1 is off"),
        )?;
        for (name, p) in [
            ("presence-penalty", self.presence_penalty),
            ("frequency-penalty", self.frequency_penalty),
        ] {
            check(name, p.is_finite(), format!("{p} must be a number"))?;
        }
        let bad = self
            .logit_bias
            .iter()
            .find(|(_, b)| b.is_nan() || *b == f32::INFINITY);
        match bad {
            None => Ok(()),
            Some((token, bias)) => check(
                "logit-bias",
                false,
                format!("{bias} of token {token} must be a number or -inf"),
            ),
        }
    }

    /// Draws the token that stands at `position` from logits that the history has adjusted. Ties go to the lowest id; a NaN
    /// among the logits, or nothing above -inf, is an error.
    pub fn draw(&self, logits: &[f32], position: u32) -> Result<u32> {
        let best = argmax::of_row(logits)?;
        let Some(kept) = self.weights(logits, best) else {
            return Ok(best);
        };
        let noisy = kept.iter().map(|(token, w)| {
            let score = *w as f64 + gumbel(self.seed, position, *token);
            (*token, score)
        });
        let drawn = noisy.fold((best, f64::NEG_INFINITY), |a, b| {
            match b.1 > a.1 || (b.1 == a.1 && b.0 < a.0) {
                true => b,
                false => a,
            }
        });
        Ok(drawn.0)
    }

    /// Whether a draw takes the most likely token, whatever the seed.
    pub(crate) fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// The filtered distribution, by token id.
    pub(crate) fn distribution(&self, logits: &[f32]) -> Result<Vec<(u32, f64)>> {
        let best = argmax::of_row(logits)?;
        let Some(kept) = self.weights(logits, best) else {
            return Ok(vec![(best, 1.0)]);
        };
        let mut all: Vec<(u32, f64)> = kept
            .into_iter()
            .map(|(token, w)| (token, (w as f64).exp()))
            .collect();
        let total: f64 = all.iter().map(|(_, w)| w).sum();
        all.iter_mut().for_each(|(_, w)| *w /= total);
        all.sort_unstable_by_key(|(token, _)| *token);
        Ok(all)
    }

    /// The tokens that the filters leave, with their log-weights over that of `best`; `None` when it is `best` alone.
    fn weights(&self, logits: &[f32], best: u32) -> Option<Vec<(u32, f32)>> {
        let top = logits[best as usize];
        if self.is_greedy() || top == f32::INFINITY {
            return None;
        }
        let inverse = 1.0 / self.temperature;
        let log_weight = |l: f32| (l - top) * inverse;
        let mut kept: Vec<(u32, f32)> = logits
            .iter()
            .enumerate()
            .filter(|(_, l)| **l > f32::NEG_INFINITY)
            .map(|(i, l)| (i as u32, log_weight(*l)))
            .collect();
        let by_weight = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if self.top_k > 0 && self.top_k < kept.len() {
            kept.select_nth_unstable_by(self.top_k - 1, by_weight);
            kept.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            kept.sort_unstable_by(by_weight);
            let total: f64 = kept.iter().map(|(_, w)| (*w as f64).exp()).sum();
            let mut sum = 0.0;
            let enough = kept.iter().position(|(_, w)| {
                sum += (*w as f64).exp();
                sum >= self.top_p as f64 * total
            });
            kept.truncate(enough.map_or(kept.len(), |i| i + 1));
        }
        if self.min_p > 0.0 {
            let least = self.min_p.ln();
            kept.retain(|(_, w)| *w >= least);
        }
        Some(kept)
    }

    /// A number in 0..1 for a purpose at a position, from the seed.
    pub(crate) fn uniform(&self, purpose: u64, position: u32) -> f64 {
        let counter = purpose << 32 | position as u64;
        let bits = mix(mix(self.seed ^ 0x3c6e_f372_fe94_f82b).wrapping_add(mix(counter)));
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Standard Gumbel noise of a token at a position.
fn gumbel(seed: u64, position: u32, token: u32) -> f64 {
    let counter = (position as u64) << 32 | token as u64;
    let bits = mix(mix(seed ^ 0x6a09_e667_f3bc_c908).wrapping_add(mix(counter)));
    // In the open interval (0, 1).
    let uniform = ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -(-uniform.ln()).ln()
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// χ² of 200,000 draws against the filtered distribution.
    fn chi_squared(sampling: Sampling, logits: &[f32], expected: &[f64]) {
        let draws = 200_000;
        let mut counts = vec![0f64; logits.len()];
        for position in 0..draws {
            counts[sampling.draw(logits, position).unwrap() as usize] += 1.0;
        }
        let mut chi = 0.0;
        for (c, p) in counts.iter().zip(expected) {
            let e = p * draws as f64;
            match e == 0.0 {
                true => assert_eq!(*c, 0.0),
                false => chi += (c - e).powi(2) / e,
            }
        }
        // The 0.999 quantile for 7 degrees of freedom.
        assert!(chi < 24.3, "{chi}: {counts:?}");
    }

    #[test]
    fn draws_follow_the_filtered_distribution() {
        let logits = [1.0, 0.5, -0.3, 2.0, 0.0, -1.0, f32::NEG_INFINITY, 1.5];
        let softmax = |keep: &dyn Fn(usize) -> bool, t: f64| {
            let w = |(i, l): (usize, &f32)| if keep(i) { (*l as f64 / t).exp() } else { 0.0 };
            let weights: Vec<f64> = logits.iter().enumerate().map(w).collect();
            let total: f64 = weights.iter().sum();
            weights.iter().map(|w| w / total).collect::<Vec<_>>()
        };
        let base = Sampling {
            temperature: 0.8,
            seed: 7,
            ..Default::default()
        };
        chi_squared(base.clone(), &logits, &softmax(&|_| true, 0.8));
        let top_k = Sampling {
            top_k: 3,
            ..base.clone()
        };
        chi_squared(top_k, &logits, &softmax(&|i| [3, 7, 0].contains(&i), 0.8));
        let top_p = Sampling {
            top_p: 0.6,
            ..base.clone()
        };
        chi_squared(top_p, &logits, &softmax(&|i| [3, 7].contains(&i), 0.8));
        let min_p = Sampling { min_p: 0.2, ..base };
        chi_squared(
            min_p,
            &logits,
            &softmax(&|i| [3, 7, 0, 1].contains(&i) && i != 1 || i == 0, 0.8),
        );
    }

    #[test]
    fn filters_apply_in_the_documented_order() {
        // top-p sees the whole distribution, min-p what it leaves.
        let logits = [0.5f32, 0.3, 0.1, 0.1].map(f32::ln);
        let both = Sampling {
            temperature: 1.0,
            top_p: 0.62,
            min_p: 0.5,
            seed: 3,
            ..Default::default()
        };
        chi_squared(both.clone(), &logits, &[0.625, 0.375, 0.0, 0.0]);
        let three = Sampling {
            top_k: 3,
            top_p: 0.8,
            ..both
        };
        // Of the three most likely, 0.5 of 0.9 is not 0.8, 0.8 of 0.9 is.
        chi_squared(three, &logits, &[0.625, 0.375, 0.0, 0.0]);
    }

    #[test]
    fn extreme_logits_and_temperatures() {
        let tiny = Sampling {
            temperature: MIN_TEMPERATURE,
            ..Default::default()
        };
        assert!(tiny.validate().is_ok());
        assert_eq!(tiny.draw(&[0.0, 1.0, -3e38, 3e38], 1).unwrap(), 3);
        let warm = Sampling {
            temperature: 1.0,
            ..Default::default()
        };
        assert_eq!(
            warm.draw(&[0.0, f32::INFINITY, f32::INFINITY], 1).unwrap(),
            1
        );
        for s in [Sampling::default(), warm] {
            assert!(s.draw(&[f32::NEG_INFINITY; 3], 1).is_err());
            assert!(s.draw(&[], 1).is_err());
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_refuses_nan() {
        let s = Sampling::default();
        assert_eq!(s.draw(&[1.0, 3.0, 3.0], 0).unwrap(), 1);
        assert!(s
            .draw(&[1.0, f32::NAN], 0)
            .unwrap_err()
            .to_string()
            .contains("token 1 is NaN"));
    }

    #[test]
    fn ranges_are_checked() {
        for bad in [
            Sampling {
                temperature: -1.0,
                ..Default::default()
            },
            Sampling {
                temperature: 1e-39,
                ..Default::default()
            },
            Sampling {
                temperature: f32::NAN,
                ..Default::default()
            },
            Sampling {
                top_p: 0.0,
                ..Default::default()
            },
            Sampling {
                top_p: 1.1,
                ..Default::default()
            },
            Sampling {
                min_p: -0.1,
                ..Default::default()
            },
        ] {
            assert!(
                matches!(bad.validate(), Err(Error::Option { .. })),
                "{bad:?}"
            );
        }
    }
}
