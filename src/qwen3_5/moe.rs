//! A mixture of experts: each row visits the few experts that its router likes best, and one that all rows share.
//!
//! Source: Qwen3.5's model code in transformers. Router probabilities are f32 and renormalised over the chosen experts; the
//! experts' outputs are summed in f32, best expert first, then the shared one's, and rounded once.

use std::sync::OnceLock;

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::affine_matmul::Weight;
use crate::ops::{self, moe, Context};

use super::config::MoeConfig;
use super::mlp::Mlp;
use super::scope::Scope;

pub(crate) struct Moe {
    router: Weight,
    experts: Vec<Mlp>,
    /// The experts' weights stacked, for the device; `None` inside if their formats differ.
    stacked: OnceLock<Option<Stacked>>,
    shared: Mlp,
    shared_gate: Weight,
    top: usize,
}

struct Stacked {
    gate: Weight,
    up: Weight,
    down: Weight,
}

impl Stacked {
    /// The stacks, and the experts as parts of them.
    fn new(experts: &[Mlp]) -> Result<Option<(Self, Vec<Mlp>)>> {
        let stack = |i: usize| {
            let parts: Vec<_> = experts.iter().map(|e| e.weights()[i]).collect();
            Weight::stack(&parts)
        };
        let (Some(gate), Some(up), Some(down)) = (stack(0)?, stack(1)?, stack(2)?) else {
            return Ok(None);
        };
        let parts = gate.1.into_iter().zip(up.1).zip(down.1);
        let parts = parts.map(|((g, u), d)| Mlp::new(g, u, d)).collect();
        let all = Self {
            gate: gate.0,
            up: up.0,
            down: down.0,
        };
        Ok(Some((all, parts)))
    }

    /// The chosen experts' outputs `[rows, top, hidden]`.
    fn forward(&self, cx: &Context, x: &Tensor, chosen: &Tensor, experts: usize) -> Result<Tensor> {
        let (rows, top) = chosen.dims2()?;
        let product = |x: &Tensor, w: &Weight, chosen: &Tensor| {
            ops::affine_matmul::matmul_experts(cx, x, w, chosen, w.n() / experts)
        };
        let gate = product(x, &self.gate, chosen)?;
        let inner = ops::silu_gate(cx, &product(x, &self.up, chosen)?, &gate)?;
        // Every choice is a row of its own now.
        let chosen = chosen.reshape((rows * top, 1))?;
        let out = product(&inner.flatten_to(1)?, &self.down, &chosen)?;
        Ok(out.reshape((rows, top, out.dim(2)?))?)
    }
}

impl Moe {
    pub(crate) fn load(scope: &Scope, hidden: usize, config: &MoeConfig) -> Result<Self> {
        let shared = config.shared_expert_intermediate_size;
        let mut experts = experts(scope, hidden, config)?;
        let stacked = OnceLock::new();
        if scope.device.is_metal() {
            let all = Stacked::new(&experts)?.map(|(all, parts)| {
                experts = parts;
                all
            });
            let _ = stacked.set(all);
        }
        Ok(Self {
            router: scope.linear("gate", config.num_experts, hidden)?,
            experts,
            stacked,
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

    pub(crate) fn experts(&self) -> usize {
        self.experts.len()
    }

    /// Bytes of one expert's weights.
    pub(crate) fn expert_bytes(&self) -> usize {
        self.experts.first().map_or(0, Mlp::size_bytes)
    }

    fn stacked(&self) -> Result<Option<&Stacked>> {
        if let Some(stacked) = self.stacked.get() {
            return Ok(stacked.as_ref());
        }
        let stacked = Stacked::new(&self.experts)?.map(|(all, _)| all);
        Ok(self.stacked.get_or_init(|| stacked).as_ref())
    }

    /// `x` is `[rows, hidden]`.
    pub(crate) fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        let (rows, hidden) = x.dims2()?;
        let logits = ops::matmul_grouped(cx, x, &[&self.router, &self.shared_gate])?;
        let (chosen, shares) = moe::route(cx, &logits[0], self.top)?;
        // Three launches read the stacked experts, without asking which were chosen. With more rows they would read an expert
        // often, and each expert runs once on all its rows instead.
        if rows <= ops::DECODE_ROWS && ops::on_launches(cx, x) {
            if let Some(stacked) = self.stacked()? {
                let outs = stacked.forward(cx, x, &chosen, self.experts.len())?;
                let shared = self.shared.forward(cx, x)?;
                return moe::combine(cx, &outs, &shares, &shared, &logits[1]);
            }
        }

        // A slot is a row's choice of an expert; an expert runs once, on all rows that chose it.
        let mut slots = vec![vec![]; self.experts.len()];
        for (slot, expert) in chosen.flatten_all()?.to_vec1::<u32>()?.iter().enumerate() {
            slots[*expert as usize].push(slot as u32);
        }
        let (mut outs, mut place_of) = (vec![], vec![0u32; rows * self.top]);
        let mut placed = 0;
        for (expert, slots) in self.experts.iter().zip(&slots) {
            if slots.is_empty() {
                continue;
            }
            cx.routes().count("moe", "expert", x.dtype());
            let own: Vec<u32> = slots.iter().map(|slot| slot / self.top as u32).collect();
            let own = x.index_select(&Tensor::new(own, x.device())?, 0)?;
            outs.push(expert.forward(cx, &own)?);
            for slot in slots {
                place_of[*slot as usize] = placed;
                placed += 1;
            }
        }
        if outs.is_empty() {
            return Ok(x.clone());
        }
        // Best expert first, so that the order of sums is the row's own and not that of its company.
        let order = Tensor::new(place_of, x.device())?;
        let outs = Tensor::cat(&outs, 0)?.index_select(&order, 0)?;
        let outs = outs.reshape((rows, self.top, hidden))?;
        let shared = self.shared.forward(cx, x)?;
        moe::combine(cx, &outs, &shares, &shared, &logits[1])
    }
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
