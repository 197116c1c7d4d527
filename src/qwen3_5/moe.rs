//! A mixture of experts: each row visits the few experts that its router likes best, and one that all rows share.
//!
//! Source: Qwen3.5's model code in transformers. Router probabilities are f32 and renormalised over the chosen experts; the
//! experts' outputs are summed in f32, best expert first, then the shared one's, and rounded once.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::{self, Context};

use super::config::MoeConfig;
use super::mlp::Mlp;
use super::scope::Scope;

pub(crate) struct Moe {
    router: Weight,
    experts: Vec<Mlp>,
    shared: Mlp,
    shared_gate: Weight,
    top: usize,
}

impl Moe {
    pub(crate) fn load(scope: &Scope, hidden: usize, config: &MoeConfig) -> Result<Self> {
        let shared = config.shared_expert_intermediate_size;
        Ok(Self {
            router: scope.linear("gate", config.num_experts, hidden)?,
            experts: experts(scope, hidden, config)?,
            shared: Mlp::load(&scope.pp("shared_expert"), hidden, shared)?,
            shared_gate: scope.linear("shared_expert_gate", 1, hidden)?,
            top: config.num_experts_per_tok,
        })
    }

    pub(crate) fn size_bytes(&self) -> usize {
        let experts: usize = self.experts.iter().map(Mlp::size_bytes).sum();
        let gates = self.router.size_bytes() + self.shared_gate.size_bytes();
        experts + gates + self.shared.size_bytes()
    }

    /// Bytes of one expert's weights.
    pub(crate) fn expert_bytes(&self) -> usize {
        self.experts.first().map_or(0, Mlp::size_bytes)
    }

    /// `x` is `[rows, hidden]`.
    pub(crate) fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        let (rows, hidden) = x.dims2()?;
        let logits = ops::matmul_grouped(cx, x, &[&self.router, &self.shared_gate])?;
        let route = |logits: Vec<f32>| choose(&logits, self.top);
        let choices: Vec<Vec<(u32, f32)>> = as_f32(&logits[0])?.into_iter().map(route).collect();
        let gates = as_f32(&logits[1])?;

        // A slot is a row's choice of an expert; an expert runs once, on all rows that chose it.
        let mut slots = vec![vec![]; self.experts.len()];
        for (row, choices) in choices.iter().enumerate() {
            for (rank, (expert, weight)) in choices.iter().enumerate() {
                slots[*expert as usize].push((row as u32, rank, *weight));
            }
        }
        let mut weighted = vec![vec![]; rows];
        for (expert, slots) in self.experts.iter().zip(&slots) {
            if slots.is_empty() {
                continue;
            }
            cx.routes().count("moe", "expert", x.dtype());
            let own: Vec<u32> = slots.iter().map(|(row, ..)| *row).collect();
            let own = x.index_select(&Tensor::new(own, x.device())?, 0)?;
            let outs = as_f32(&expert.forward(cx, &own)?)?;
            for ((row, rank, weight), out) in slots.iter().zip(outs) {
                weighted[*row as usize].push((*rank, *weight, out));
            }
        }
        let shared = as_f32(&self.shared.forward(cx, x)?)?;
        let mut sums = Vec::with_capacity(rows * hidden);
        for ((mut outs, shared), gate) in weighted.into_iter().zip(shared).zip(gates) {
            // Best expert first, so that the order of sums is the row's own and not that of its company.
            outs.sort_unstable_by_key(|(rank, ..)| *rank);
            let gate = 1.0 / (1.0 + (-gate[0]).exp());
            sums.extend((0..hidden).map(|i| {
                let routed: f32 = outs.iter().map(|(_, weight, out)| weight * out[i]).sum();
                routed + gate * shared[i]
            }));
        }
        Ok(Tensor::from_vec(sums, (rows, hidden), x.device())?.to_dtype(x.dtype())?)
    }
}

fn as_f32(x: &Tensor) -> Result<Vec<Vec<f32>>> {
    Ok(x.to_dtype(DType::F32)?.to_vec2()?)
}

/// The `top` experts of a row, best first and equal ones by number, with their share of the softmax over the chosen.
fn choose(logits: &[f32], top: usize) -> Vec<(u32, f32)> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // NaN counts as the least, so that a damaged row still has its experts (and gets NaN from them).
    let key = |i: u32| match logits[i as usize] {
        v if v.is_nan() => f32::NEG_INFINITY,
        v => v,
    };
    let better = |a: &u32, b: &u32| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
    if top < order.len() {
        order.select_nth_unstable_by(top, better);
        order.truncate(top);
    }
    order.sort_unstable_by(better);
    let best = order.first().map_or(0.0, |i| key(*i));
    let shares: Vec<f32> = order.iter().map(|i| (key(*i) - best).exp()).collect();
    let sum: f32 = shares.iter().sum();
    order
        .into_iter()
        .zip(shares)
        .map(|(expert, share)| (expert, share / sum))
        .collect()
}

/// Loads the experts from any of the layouts in use: stacked gate, up and down (MLX), gate and up fused (Hugging Face), or
/// tensors per expert.
fn experts(scope: &Scope, hidden: usize, config: &MoeConfig) -> Result<Vec<Mlp>> {
    let (count, inner) = (config.num_experts, config.moe_intermediate_size);
    let fused = ["experts.gate_up_proj", "switch_mlp.gate_up_proj"];
    let split = ["switch_mlp.", "experts."];
    let (gates, ups, downs) = if let Some(name) = fused.iter().find(|n| scope.has(n)) {
        let half = |first| scope.stacked(name, count, (first, inner, 2 * inner), hidden);
        let down = name.replace("gate_up_proj", "down_proj");
        let downs = scope.stacked(&down, count, (0, hidden, hidden), inner)?;
        (half(0)?, half(inner)?, downs)
    } else if let Some(prefix) = split.iter().find(|p| scope.has(&format!("{p}gate_proj"))) {
        let stacked = |name: &str, n, k| {
            let name = format!("{prefix}{name}");
            scope.stacked(&name, count, (0, n, n), k)
        };
        (
            stacked("gate_proj", inner, hidden)?,
            stacked("up_proj", inner, hidden)?,
            stacked("down_proj", hidden, inner)?,
        )
    } else {
        let scope = scope.pp("experts");
        let own = |e: usize| Mlp::load(&scope.pp(&e.to_string()), hidden, inner);
        return (0..count).map(own).collect();
    };
    let all = gates.into_iter().zip(ups).zip(downs);
    Ok(all.map(|((g, u), d)| Mlp::new(g, u, d)).collect())
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn the_best_experts_share_one() {
        let chosen = choose(&[0.0, 2.0, 1.0, 2.0], 3);
        let experts: Vec<u32> = chosen.iter().map(|c| c.0).collect();
        assert_eq!(experts, [1, 3, 2]);
        let e = (-1f32).exp();
        assert!((chosen[0].1 - 1.0 / (2.0 + e)).abs() < 1e-6);
        assert!((chosen.iter().map(|c| c.1).sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn nan_and_infinity_choose_as_many() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(choose(&[bad; 5], 2).len(), 2);
            assert_eq!(choose(&[0.0, bad, 1.0], 3).len(), 3);
        }
    }
}
