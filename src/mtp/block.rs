//! Block verification (Sun et al., arXiv 2403.10444): drafts are judged together, so that more of them are accepted and the
//! text still follows the target's distribution exactly.

/// A distribution: tokens by id with their probabilities; others have none.
pub(crate) type Distribution = Vec<(u32, f64)>;

fn probability(of: &Distribution, token: u32) -> f64 {
    of.binary_search_by_key(&token, |(t, _)| *t)
        .map_or(0.0, |i| of[i].1)
}

/// `max(share * p - q, 0)`.
fn residual(p: &Distribution, share: f64, q: &Distribution) -> Distribution {
    let left = p
        .iter()
        .map(|(token, p)| (*token, (share * p - probability(q, *token)).max(0.0)));
    left.filter(|(_, w)| *w > 0.0).collect()
}

/// Picks a token of a distribution (of any sum) by a number in 0..1.
pub(crate) fn pick(from: &Distribution, uniform: f64) -> Option<u32> {
    let total: f64 = from.iter().map(|(_, w)| w).sum();
    let mut left = uniform * total;
    for (token, w) in from {
        left -= w;
        if left < 0.0 {
            return Some(*token);
        }
    }
    from.iter().rev().find(|(_, w)| *w > 0.0).map(|(t, _)| *t)
}

/// How many of `drafts` are accepted, and the token after them. `target[i]` is the target's distribution at draft `i`
/// (one more than there are drafts), `proposal[i]` the one that draft `i` was drawn from; `accept` has a uniform number per
/// draft, `last` one for the token after.
pub(crate) fn verify(
    target: &[Distribution],
    proposal: &[Distribution],
    drafts: &[u32],
    accept: &[f64],
    last: f64,
) -> Option<(usize, u32)> {
    let (mut share, mut accepted, mut share_there) = (1f64, 0, 1f64);
    for (i, draft) in drafts.iter().enumerate() {
        let (p, q) = (
            probability(&target[i], *draft),
            probability(&proposal[i], *draft),
        );
        share = match q > 0.0 {
            true => (share * p / q).min(1.0),
            false => 0.0,
        };
        let enough = match proposal.get(i + 1) {
            // The last draft: nothing after it can make up for a refusal.
            None => share,
            Some(next) => {
                let left: f64 = residual(&target[i + 1], share, next)
                    .iter()
                    .map(|(_, w)| w)
                    .sum();
                match left + 1.0 - share {
                    all if all > 0.0 => left / all,
                    // Both are zero: the distributions are equal and the share is whole.
                    _ => 1.0,
                }
            }
        };
        if accept[i] < enough {
            (accepted, share_there) = (i + 1, share);
        }
    }
    let rest = match proposal.get(accepted) {
        None => target[accepted].clone(),
        Some(q) => residual(&target[accepted], share_there, q),
    };
    // An empty rest comes from rounding alone: the draft would then have been accepted.
    let token = pick(&rest, last).or_else(|| pick(&target[accepted], last))?;
    Some((accepted, token))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn uniform(&mut self) -> f64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    fn distribution(weights: &[f64]) -> Distribution {
        let total: f64 = weights.iter().sum();
        let all = weights
            .iter()
            .enumerate()
            .map(|(i, w)| (i as u32, w / total));
        all.filter(|(_, w)| *w > 0.0).collect()
    }

    /// Pairs of tokens from blocks of two drafts, against the target's own joint distribution.
    fn chi_squared(
        target: &dyn Fn(Option<u32>) -> Distribution,
        proposal: &dyn Fn(Option<u32>) -> Distribution,
        vocab: usize,
    ) {
        let mut random = Random(0x1234_5678_9abc_def1);
        let draws = 60_000;
        let mut counts = vec![0f64; vocab * vocab];
        for _ in 0..draws {
            // Blocks until two tokens are out, the second block after the first one's.
            let mut out: Vec<u32> = vec![];
            while out.len() < 2 {
                let last = out.last().copied();
                let q0 = proposal(last);
                let d0 = pick(&q0, random.uniform()).unwrap();
                let q1 = proposal(Some(d0));
                let d1 = pick(&q1, random.uniform()).unwrap();
                let targets = [target(last), target(Some(d0)), target(Some(d1))];
                let u = [random.uniform(), random.uniform()];
                let (n, next) =
                    verify(&targets, &[q0, q1], &[d0, d1], &u, random.uniform()).unwrap();
                out.extend(&[d0, d1][..n]);
                out.push(next);
            }
            counts[out[0] as usize * vocab + out[1] as usize] += 1.0;
        }
        let (mut chi, mut freedom) = (0.0, -1.0);
        for first in 0..vocab as u32 {
            for second in 0..vocab as u32 {
                let p =
                    probability(&target(None), first) * probability(&target(Some(first)), second);
                let (count, expected) = (
                    counts[first as usize * vocab + second as usize],
                    p * draws as f64,
                );
                if expected < 1e-9 {
                    assert_eq!(count, 0.0, "{first} {second}");
                } else {
                    chi += (count - expected).powi(2) / expected;
                    freedom += 1.0;
                }
            }
        }
        // Three and a half standard deviations above the mean.
        assert!(
            chi < freedom + 3.5 * f64::sqrt(2.0 * f64::max(freedom, 1.0)),
            "{chi} of {freedom}"
        );
    }

    /// Weights that depend on the token before.
    fn chain(weights: &'static [[f64; 4]; 5]) -> impl Fn(Option<u32>) -> Distribution {
        move |before| distribution(&weights[before.map_or(4, |b| b as usize)])
    }

    #[test]
    fn pairs_follow_the_target() {
        static P: [[f64; 4]; 5] = [
            [0.1, 0.2, 0.3, 0.4],
            [0.7, 0.1, 0.1, 0.1],
            [0.25, 0.25, 0.25, 0.25],
            [0.0, 0.5, 0.0, 0.5],
            [0.4, 0.3, 0.2, 0.1],
        ];
        static Q: [[f64; 4]; 5] = [
            [0.4, 0.3, 0.2, 0.1],
            [0.6, 0.2, 0.1, 0.1],
            [0.1, 0.1, 0.1, 0.7],
            [0.25, 0.25, 0.25, 0.25],
            [0.1, 0.2, 0.3, 0.4],
        ];
        chi_squared(&chain(&P), &chain(&Q), 4);
        chi_squared(&chain(&Q), &chain(&P), 4);
        chi_squared(&chain(&P), &chain(&P), 4);
    }

    #[test]
    fn adversarial_pairs() {
        static DISJOINT_P: [[f64; 4]; 5] = [[0.5, 0.5, 0.0, 0.0]; 5];
        static DISJOINT_Q: [[f64; 4]; 5] = [[0.0, 0.0, 0.5, 0.5]; 5];
        static ONE_HOT: [[f64; 4]; 5] = [[0.0, 0.0, 1.0, 0.0]; 5];
        static FLAT: [[f64; 4]; 5] = [[0.25; 4]; 5];
        chi_squared(&chain(&DISJOINT_P), &chain(&DISJOINT_Q), 4);
        chi_squared(&chain(&FLAT), &chain(&ONE_HOT), 4);
        chi_squared(&chain(&ONE_HOT), &chain(&FLAT), 4);
        chi_squared(&chain(&ONE_HOT), &chain(&ONE_HOT), 4);
        chi_squared(&chain(&DISJOINT_Q), &chain(&FLAT), 4);
    }

    #[test]
    fn equal_distributions_accept_all() {
        let p = distribution(&[0.3, 0.3, 0.4]);
        let (targets, proposals) = (vec![p.clone(); 4], vec![p; 3]);
        let accepted = verify(&targets, &proposals, &[0, 1, 2], &[0.999; 3], 0.5);
        assert_eq!(accepted.map(|a| a.0), Some(3));
    }
}
