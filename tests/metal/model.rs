//! The trained pair's target with every op as a launch on the emulator.

use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use candle_specprefill::mtp::{prefill, Depth, PrefillOptions, Sampling, Session, SessionOptions};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::TextTokenizer;
use candle_specprefill::qwen3_5::{Cache, Keep, LoadOptions, Model, Rows};

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

/// How far logits may lie apart: bf16 activations are rounded at other places, because sums have another order.
const BOUND: f32 = 0.25;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny/target")
}

fn target() -> Model {
    let options = LoadOptions {
        dtype: DType::BF16,
        ..Default::default()
    };
    Model::load(dir(), &options).unwrap()
}

/// A chat prompt of exactly 64 tokens.
fn prompt() -> Vec<u32> {
    let tokenizer = TextTokenizer::read(dir()).unwrap();
    let text = "Tell me about the sea, the garden and the harbour, then define the word \"transaction\" and write a paragraph about \
                garbage collection, error handling, sorting, Unicode and what a lantern is for when the night comes to the town.";
    let encode = |text: &str| tokenizer.encode(text).unwrap();
    let end = encode("<|im_end|>\n<|im_start|>assistant\n");
    let mut tokens = encode(&format!("<|im_start|>user\n{text}"));
    assert!(tokens.len() + end.len() >= 64, "{}", tokens.len());
    tokens.truncate(64 - end.len());
    tokens.extend(end);
    tokens
}

/// Logits `[rows][vocab]` of tokens on a new cache.
fn logits(model: &Model, cx: &Context, tokens: &[u32]) -> Vec<Vec<f32>> {
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let rows = Rows {
        cache: &mut model.new_cache().unwrap(),
        tokens,
        positions: &positions,
        keep: Keep::Commit,
    };
    let hidden = model.forward(cx, &mut [rows]).unwrap();
    let logits = model.logits(cx, &hidden).unwrap();
    logits.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

struct Run {
    tokens: Vec<u32>,
    cycles: u64,
    accepted: u64,
    contents: Vec<Vec<u32>>,
}

/// Decodes greedily from a copy of a prefilled cache.
fn decode(
    model: &Model,
    cx: &Context,
    (cache, last): (&Cache, &Tensor),
    depth: Depth,
    max_tokens: usize,
) -> Run {
    let cache = cache.fork().unwrap();
    let options = SessionOptions {
        depth,
        sampling: Sampling::default(),
        max_tokens,
        ..Default::default()
    };
    let mut session = Session::new(model, cx, cache, last, options).unwrap();
    let mut tokens = vec![];
    while session.finished().is_none() {
        tokens.extend(session.step(model, cx).unwrap());
    }
    Run {
        tokens,
        cycles: session.stats().cycles,
        accepted: session.stats().sources.draft,
        contents: contents(session.cache()),
    }
}

/// Every bit of the committed rows.
fn contents(cache: &Cache) -> Vec<Vec<u32>> {
    let mut all = vec![];
    for i in 0.. {
        let (Some((k, len)), Some((v, _))) = (cache.keys(i), cache.values(i)) else {
            break;
        };
        all.extend([k, v].map(|t: &Tensor| bits(&t.narrow(1, 0, len).unwrap())));
    }
    let states = cache.delta_states().unwrap();
    all.extend(
        states
            .iter()
            .flat_map(|(state, conv)| [bits(state), bits(conv)]),
    );
    all
}

#[test]
fn the_target_prefills_and_speculates_on_launches_alone() {
    needs_clang!();
    let (model, prompt) = (target(), prompt());
    let gpu = emulated(Mode::Fast);
    let mut cache = model.new_cache().unwrap();
    let o = PrefillOptions::default();
    let last = prefill(&model, &gpu, &mut cache, &prompt, None, &o, &mut |_| {}).unwrap();
    let start = (&cache, &last);

    // At least ten cycles, whatever is accepted.
    let max_tokens = 1 + 10 * 4;
    let spec = decode(&model, &gpu, start, Depth::Fixed(3), max_tokens);
    println!("{} cycles, {} drafts accepted", spec.cycles, spec.accepted);
    assert!(spec.cycles >= 10);
    let rejected = 3 * spec.cycles - spec.accepted;
    assert!(spec.accepted > 0 && rejected > 0, "the test shows little");
    let plain = decode(&model, &gpu, start, Depth::Off, max_tokens);
    assert_eq!(spec.tokens, plain.tokens);
    assert_eq!(spec.contents, plain.contents);

    // The prompt and the text in one pass, on both paths.
    let line = [prompt.as_slice(), &spec.tokens].concat();
    let want = logits(&model, &Context::default(), &line);
    let got = logits(&model, &gpu, &line);
    let (mut worst, mut differing) = (0f32, 0);
    for (r, (w, g)) in want.iter().zip(&got).enumerate() {
        let each = w.iter().zip(g).map(|(w, g)| (w - g).abs());
        worst = each.fold(worst, f32::max);
        let (on_cpu, on_gpu) = (best(w), best(g));
        if on_cpu != on_gpu {
            let gap = w[on_cpu] - w[on_gpu];
            println!("row {r}: token {on_cpu} on the CPU, {on_gpu} on launches, {gap} apart");
            assert!(gap < BOUND);
            differing += 1;
        }
    }
    println!(
        "logits of {} rows: at most {worst:.3} apart, {differing} other tokens",
        line.len()
    );
    assert!(worst < BOUND && 20 * differing <= line.len());

    // Plain weights have no kernel of their own yet: only they may leave the path.
    let plain_weights = "affine_matmul/candle/bf16 !no kernel for plain weights";
    let routes = gpu.routes().snapshot();
    for route in routes.keys().filter(|r| *r != plain_weights) {
        assert!(route.contains("/metal"), "{route} left the Metal path");
    }
}

fn best(logits: &[f32]) -> usize {
    let larger = |a, b| if logits[b] > logits[a] { b } else { a };
    (0..logits.len()).reduce(larger).unwrap()
}
