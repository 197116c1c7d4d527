//! What a mixture of experts does beside its matmuls: each row's choice of experts, and the weighted sum of what they return.
//!
//! Source: Qwen3.5's model code in transformers. Shares are f32 and renormalised over the chosen experts; outputs are summed in f32,
//! best expert first, then the shared expert's, and rounded once.

mod metal;

use candle_core::{DType, Device, Tensor};

use super::cpu::{for_element, to_f32, Element};
use super::launch::{self, Operand};
use super::{check, Context};
use crate::error::{Error, Result};

const OP: &str = "moe";

/// Each row's `top` experts, best first and equal ones by number (u32 `[rows, top]`), and their shares (f32 `[rows, top]`): the softmax
/// over the chosen of `logits` `[rows, experts]` (f32, bf16 or f16). A NaN counts as the least, so that a damaged row
/// still has its experts.
pub fn route(cx: &Context, logits: &Tensor, top: usize) -> Result<(Tensor, Tensor)> {
    let dtype = check::activation(OP, "logits", logits)?;
    check::shape(OP, "logits", logits, &[None, None])?;
    let (rows, experts) = logits.dims2()?;
    if top == 0 || top > experts {
        return Err(Error::argument(
            OP,
            format!("{top} experts a row, of {experts}"),
        ));
    }
    if launch::wanted(cx, logits) {
        cx.routes().count("moe_route", "metal", dtype);
        let logits = columns_together(logits)?;
        let plan = metal::route(&Operand::of(OP, &logits)?, top)?;
        let mut outputs = launch::run(cx, &plan, &[&logits])?;
        return match (outputs.pop(), outputs.pop()) {
            (Some(shares), Some(experts)) => Ok((experts, shares)),
            _ => Err(Error::argument(OP, "a launcher returned too few outputs")),
        };
    }
    cx.routes().count("moe_route", "cpu", dtype);
    let logits = for_element!(dtype, to_f32(OP, logits))?;
    let chosen = logits.chunks(experts).flat_map(|row| choose(row, top));
    let (chosen, shares): (Vec<u32>, Vec<f32>) = chosen.unzip();
    let tensor = |shape| Tensor::from_vec(chosen, shape, &Device::Cpu);
    let shape = (rows, top);
    Ok((
        tensor(shape)?,
        Tensor::from_vec(shares, shape, &Device::Cpu)?,
    ))
}

/// `Σ shares[k] * outs[k] + sigmoid(gate) * shared`, row by row: `outs` is `[rows, top, hidden]`, `shares` f32 `[rows, top]`, `shared`
/// `[rows, hidden]` and `gates` `[rows, 1]`; all but `shares` of one dtype (f32, bf16 or f16), which the result `[rows, hidden]`
/// has too.
pub fn combine(
    cx: &Context,
    outs: &Tensor,
    shares: &Tensor,
    shared: &Tensor,
    gates: &Tensor,
) -> Result<Tensor> {
    let dtype = check::activation(OP, "outs", outs)?;
    check::shape(OP, "outs", outs, &[None; 3])?;
    let (rows, top, hidden) = outs.dims3()?;
    check::dtype(OP, "shares", shares, DType::F32)?;
    check::shape(OP, "shares", shares, &[Some(rows), Some(top)])?;
    for (name, t, width) in [("shared", shared, hidden), ("gates", gates, 1)] {
        check::dtype(OP, name, t, dtype)?;
        check::shape(OP, name, t, &[Some(rows), Some(width)])?;
    }
    if launch::wanted(cx, outs) {
        cx.routes().count("moe_combine", "metal", dtype);
        let tensors = [
            &outs.contiguous()?,
            &shares.contiguous()?,
            &shared.contiguous()?,
            gates,
        ];
        let operands = tensors.map(|t| Operand::of(OP, t));
        let [outs, shares, shared, gates] = operands;
        let plan = metal::combine([&outs?, &shares?, &shared?, &gates?])?;
        return launch::run_one(cx, &plan, &tensors);
    }
    cx.routes().count("moe_combine", "cpu", dtype);
    let shape = [rows, top, hidden];
    for_element!(dtype, combine_on_cpu(outs, shares, shared, gates, shape))
}

fn columns_together(x: &Tensor) -> Result<Tensor> {
    Ok(match x.stride()[1] {
        1 => x.clone(),
        _ => x.contiguous()?,
    })
}

fn combine_on_cpu<T: Element>(
    outs: &Tensor,
    shares: &Tensor,
    shared: &Tensor,
    gates: &Tensor,
    [rows, top, hidden]: [usize; 3],
) -> Result<Tensor> {
    let f32 = |t: &Tensor| to_f32::<T>(OP, t);
    let (outs, shared, gates) = (f32(outs)?, f32(shared)?, f32(gates)?);
    let shares = to_f32::<f32>(OP, shares)?;
    let mut sums = Vec::with_capacity(rows * hidden);
    for r in 0..rows {
        let gate = 1.0 / (1.0 + (-gates[r]).exp());
        sums.extend((0..hidden).map(|i| {
            let slots = r * top..(r + 1) * top;
            let routed: f32 = slots.map(|s| shares[s] * outs[s * hidden + i]).sum();
            T::round(routed + gate * shared[r * hidden + i])
        }));
    }
    Ok(Tensor::from_vec(sums, (rows, hidden), &Device::Cpu)?)
}

/// The `top` experts of a row with their shares; see [`route`].
fn choose(logits: &[f32], top: usize) -> Vec<(u32, f32)> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
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
