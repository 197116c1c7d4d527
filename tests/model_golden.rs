//! The model against reference values from transformers, MLX and mlx-lm.

mod support;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::{Cache, DraftRows, Keep, LoadOptions, Model};
use support::{distance, feed, golden, ids, load, logits, mean_distance, tensors};

/// Logits of a prefill of all but the last six tokens, then of those six one at a time.
fn prefill_and_decode(model: &Model, ids: &[u32]) -> (Tensor, Tensor, Cache) {
    let mut cache = model.new_cache().unwrap();
    let (prompt, rest) = ids.split_at(ids.len() - 6);
    let prefill = logits(model, &feed(model, &mut cache, prompt, Keep::Commit));
    let after_prompt = cache.fork().unwrap();
    let decode: Vec<Tensor> = rest
        .iter()
        .map(|id| logits(model, &feed(model, &mut cache, &[*id], Keep::Commit)))
        .collect();
    (prefill, Tensor::cat(&decode, 0).unwrap(), after_prompt)
}

fn transformers(name: &str, bound: f32) {
    let model = load(name, DType::F32);
    let g = tensors(&format!("{name}/hf_golden.safetensors"));
    let (prefill, decode, cache) = prefill_and_decode(&model, &ids(&g["input_ids"]));
    let (p, d) = (
        distance(&prefill, &g["prefill_logits"]),
        distance(&decode, &g["decode_logits"]),
    );
    assert!(p < bound && d < bound, "prefill {p}, decode {d}");
    let (keys, len) = cache.keys(0).unwrap();
    let keys = keys.narrow(1, 0, len).unwrap().transpose(0, 1).unwrap();
    let k = distance(&keys.contiguous().unwrap(), &g["layer3.k_cache"]);
    assert!(k < 1e-4, "keys {k}");
    let (state, conv) = &cache.delta_states().unwrap()[0];
    let s = distance(state, &g["layer0.rec_state"]);
    assert!(s < 1e-4, "state {s}");
    let conv = conv.t().unwrap().contiguous().unwrap();
    let c = distance(&conv, &g["layer0.conv_state"]);
    assert!(c < 1e-4, "conv {c}");
}

#[test]
fn dense_equals_transformers() {
    transformers("dense", 5e-4);
}

#[test]
fn mixture_of_experts_equals_transformers() {
    transformers("moe", 5e-5);
}

#[test]
fn flat_config_equals_transformers() {
    transformers("dense_flat", 5e-5);
}

#[test]
fn bf16_is_as_close_to_f32_as_transformers_bf16_is() {
    for name in ["dense", "dense_flat", "moe"] {
        let model = load(name, DType::BF16);
        let g = tensors(&format!("{name}/hf_golden.safetensors"));
        let (prefill, _, _) = prefill_and_decode(&model, &ids(&g["input_ids"]));
        assert_eq!(prefill.dtype(), DType::BF16);
        let ours = mean_distance(&prefill, &g["prefill_logits"]);
        let theirs = mean_distance(&g["prefill_logits_bf16"], &g["prefill_logits"]);
        assert!(
            ours <= 2.0 * theirs,
            "{name}: {ours}, transformers {theirs}"
        );
        let best = |t: &Tensor| {
            let t = t.to_dtype(DType::F32).unwrap().argmax(1).unwrap();
            t.to_vec1::<u32>().unwrap()
        };
        let (a, b) = (best(&prefill), best(&g["prefill_logits"]));
        let agree = a.iter().zip(&b).filter(|(a, b)| a == b).count();
        assert!(
            agree as f32 >= 0.9 * a.len() as f32,
            "{name}: {agree} of {}",
            a.len()
        );
    }
}

#[test]
fn every_mlx_variant_equals_mlx() {
    let variants = [
        ("dense_q4g64", 5e-4),
        ("dense_q3g64", 5e-4),
        ("dense_q5g64", 5e-4),
        ("dense_q8g32", 5e-4),
        ("dense_custom", 5e-4),
        ("dense_flat_q4g32", 5e-5),
        ("moe_q4g64", 5e-5),
    ];
    for (name, bound) in variants {
        let model = load(&format!("mlx/{name}"), DType::F32);
        let g = tensors(&format!("mlx/{name}/logits.safetensors"));
        let (prefill, decode, _) = prefill_and_decode(&model, &ids(&g["input_ids"]));
        let rows = g["prefill_logits_f32act"].dim(0).unwrap();
        let prefill = prefill
            .narrow(0, prefill.dim(0).unwrap() - rows, rows)
            .unwrap();
        let p = distance(&prefill, &g["prefill_logits_f32act"]);
        let d = distance(&decode, &g["decode_logits_f32act"]);
        assert!(p < bound && d < bound, "{name}: prefill {p}, decode {d}");
    }
}

/// Feeds the head with the trunk's hidden states of the golden, then chains it to depth 4.
fn mtp(name: &str, bound: f32) {
    let model = load(name, DType::F32);
    let g = tensors(&format!("{name}/mtp_golden.safetensors"));
    let cx = Context::default();
    let mut cache = model.new_cache().unwrap();
    let prompt = ids(&g["input_ids"]);
    let trunk = feed(&model, &mut cache, &prompt, Keep::Commit);
    let t = distance(&trunk, &g["trunk_hidden_post_norm"]);
    assert!(t < bound, "trunk {t}");
    let positions: Vec<u32> = (0..70).collect();
    let next = ids(&g["next_tokens"]);
    let hidden = &g["trunk_hidden_post_norm"];
    let out = model
        .draft(
            &cx,
            &mut [draft_rows(&mut cache, &next, hidden, &positions)],
        )
        .unwrap();
    let h = distance(&out, &g["prefill_hidden"]);
    let l = distance(&logits(&model, &out), &g["prefill_logits"]);
    assert!(h < bound && l < bound, "hidden {h}, logits {l}");
    assert_eq!(cache.draft_rows(), 70);
    let mut last = out.narrow(0, 69, 1).unwrap();
    let chain = ids(&g["chain_tokens"]);
    let mut token = argmax(&logits(&model, &last));
    for d in 0..4u32 {
        let (want_h, want_l) = (
            g["chain_hidden"].narrow(0, d as usize, 1).unwrap(),
            g["chain_logits"].narrow(0, d as usize, 1).unwrap(),
        );
        let h = distance(&last, &want_h);
        let l = distance(&logits(&model, &last), &want_l);
        assert!(h < bound && l < bound, "depth {d}: hidden {h}, logits {l}");
        assert_eq!(token, chain[d as usize], "depth {d}");
        last = model
            .draft(
                &cx,
                &mut [draft_rows(&mut cache, &[token], &last, &[70 + d])],
            )
            .unwrap();
        token = argmax(&logits(&model, &last));
    }
}

fn draft_rows<'a>(
    cache: &'a mut Cache,
    tokens: &'a [u32],
    hidden: &'a Tensor,
    positions: &'a [u32],
) -> DraftRows<'a> {
    DraftRows {
        cache,
        tokens,
        hidden,
        positions,
    }
}

fn argmax(logits: &Tensor) -> u32 {
    logits.argmax(1).unwrap().to_vec1::<u32>().unwrap()[0]
}

#[test]
fn draft_head_chains_to_depth_four() {
    mtp("dense", 5e-4);
    mtp("dense_flat", 5e-5);
    mtp("moe", 5e-5);
}

/// The quantized side-car head, beside the unquantized trunk whose embedding the golden used.
#[test]
fn quantized_side_car_head() {
    let dir = tempfile::tempdir().unwrap();
    let from = golden("dense");
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let mut all =
        candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    all.retain(|name, _| !name.starts_with("mtp."));
    candle_core::safetensors::save(&all, dir.path().join("model.safetensors")).unwrap();
    let side = golden("mlx/dense_mtp_q4g64/mtp.safetensors");
    std::fs::copy(side, dir.path().join("mtp.safetensors")).unwrap();
    let model = Model::load(dir.path(), &LoadOptions::default()).unwrap();
    assert!(model.has_mtp());
    let g = tensors("dense/mtp_golden.safetensors");
    let mut cache = model.new_cache().unwrap();
    let next = ids(&g["next_tokens"]);
    let positions: Vec<u32> = (0..70).collect();
    let rows = DraftRows {
        cache: &mut cache,
        tokens: &next,
        hidden: &g["trunk_hidden_post_norm"],
        positions: &positions,
    };
    let out = model.draft(&Context::default(), &mut [rows]).unwrap();
    let want = &tensors("mlx/dense_mtp_q4g64/golden.safetensors")["mtp_hidden_f32act"];
    let d = distance(&out.narrow(0, 54, 16).unwrap(), want);
    assert!(d < 1e-4, "{d}");
}
