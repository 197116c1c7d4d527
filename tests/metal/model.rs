//! The trained pair's target with every op as a launch on the emulator.

use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use candle_specprefill::mtp::{prefill, Depth, PrefillOptions, Sampling, Session, SessionOptions};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::TextTokenizer;
use candle_specprefill::qwen3_5::{Cache, Keep, LoadOptions, Model, Rows};
use candle_specprefill::specprefill::{AttentionScorer, Scorer, ScorerInput};

use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

/// How far logits may lie apart: bf16 activations are rounded at other places, because sums have another order.
const BOUND: f32 = 0.5;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny/target")
}

fn open(dir: &Path, dtype: DType) -> Model {
    let options = LoadOptions {
        dtype,
        ..Default::default()
    };
    Model::load(dir, &options).unwrap()
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

/// The prompt's cache and its last hidden state.
fn prefilled(model: &Model, cx: &Context, prompt: &[u32]) -> (Cache, Tensor) {
    let mut cache = model.new_cache().unwrap();
    let o = PrefillOptions::default();
    let last = prefill(model, cx, &mut cache, prompt, None, &o, &mut |_| {}).unwrap();
    (cache, last)
}

/// Logits `[1 + tokens][vocab]` of the prompt's last row and of the tokens after it, `step` a pass.
fn logits(
    model: &Model,
    cx: &Context,
    start: (Cache, Tensor),
    tokens: &[u32],
    step: usize,
) -> Vec<Vec<f32>> {
    let (mut cache, last) = start;
    let mut hidden = vec![last];
    for tokens in tokens.chunks(step) {
        let first = cache.next_position().get();
        let positions: Vec<u32> = (first..).take(tokens.len()).collect();
        let rows = Rows {
            cache: &mut cache,
            tokens,
            positions: &positions,
            keep: Keep::Commit,
        };
        hidden.push(model.forward(cx, &mut [rows]).unwrap());
    }
    let logits = model.logits(cx, &Tensor::cat(&hidden, 0).unwrap());
    let logits = logits.unwrap().to_dtype(DType::F32).unwrap();
    logits.to_vec2().unwrap()
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
    let (model, prompt) = (open(&dir(), DType::BF16), prompt());
    let gpu = emulated(Mode::Fast);
    let (cache, last) = prefilled(&model, &gpu, &prompt);
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

    // The same text on both paths.
    let cpu = Context::default();
    let want = logits(
        &model,
        &cpu,
        prefilled(&model, &cpu, &prompt),
        &spec.tokens,
        8,
    );
    let got = logits(&model, &gpu, (cache, last), &spec.tokens, 8);
    let (mut worst, mut sum, mut differing) = (0f32, 0f64, 0);
    for (r, (w, g)) in want.iter().zip(&got).enumerate() {
        let each = w.iter().zip(g).map(|(w, g)| (w - g).abs());
        sum += each.clone().map(f64::from).sum::<f64>() / w.len() as f64;
        worst = each.fold(worst, f32::max);
        let (on_cpu, on_gpu) = (best(w), best(g));
        if on_cpu != on_gpu {
            let gap = w[on_cpu] - w[on_gpu];
            println!("row {r}: token {on_cpu} on the CPU, {on_gpu} on launches, {gap} apart");
            assert!(gap < BOUND);
            differing += 1;
        }
        // The text is what launches alone made of it.
        if let Some(token) = spec.tokens.get(r) {
            assert_eq!(on_gpu as u32, *token, "row {r}");
        }
    }
    let (rows, mean) = (want.len(), sum / want.len() as f64);
    println!(
        "logits of {rows} rows: {mean:.4} apart, at most {worst:.3}; {differing} other tokens"
    );
    assert!(worst < BOUND && mean < 0.05 && 10 * differing <= rows);
    assert_all_emulated(&gpu);
}

/// A route of matmuls inside an expert counts reads of its weights, not a kernel.
fn assert_on_launches(cx: &Context) {
    let routes = cx.routes().snapshot();
    for route in routes.keys().filter(|r| !r.starts_with("moe/expert/")) {
        assert!(route.contains("/metal"), "{route} left the Metal path");
    }
    assert!(!cx.routes().fell_back());
}

/// Random models, dense and with experts: close to the CPU, and speculation changes no bit.
#[test]
fn small_models_with_and_without_experts_run_on_launches_alone() {
    needs_clang!();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for name in ["dense", "moe", "mlx/moe_q4g64"] {
        let model = open(&golden.join(name), DType::F32);
        let prompt: Vec<u32> = (0..19).map(|i| (i * 37 + 5) % 200).collect();
        let (gpu, cpu) = (emulated(Mode::Fast), Context::default());
        let (cache, last) = prefilled(&model, &gpu, &prompt);
        let plain = decode(&model, &gpu, (&cache, &last), Depth::Off, 9);
        if model.has_mtp() {
            let spec = decode(&model, &gpu, (&cache, &last), Depth::Fixed(3), 9);
            assert_eq!(spec.tokens, plain.tokens, "{name}");
            assert_eq!(spec.contents, plain.contents, "{name}");
        }
        let alone = (cache.fork().unwrap(), last.clone());
        let alone = logits(&model, &gpu, alone, &plain.tokens, 1);
        let got = logits(&model, &gpu, (cache, last), &plain.tokens, 8);
        assert!(alone == got, "{name}: rows depend on their company");
        let want = logits(
            &model,
            &cpu,
            prefilled(&model, &cpu, &prompt),
            &plain.tokens,
            8,
        );
        let pairs = got.iter().flatten().zip(want.iter().flatten());
        let worst = pairs.map(|(g, w)| (g - w).abs()).fold(0f32, f32::max);
        println!("{name}: logits at most {worst:.1e} apart");
        let routes = gpu.routes().snapshot();
        let stacked = "affine_matmul/experts/metal_lanes/f32";
        assert_eq!(routes.contains_key(stacked), name.contains("moe_q4"));
        assert!(worst < 1e-4, "{name}: {worst}");
        assert_on_launches(&gpu);
    }
}

/// Verified drafts of more sequences than the row-invariant kernels take at once, beside a prompt: every sequence as it is alone.
#[test]
fn many_sequences_share_passes_as_if_alone() {
    needs_clang!();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for name in ["dense", "moe", "mlx/moe_q4g64"] {
        let model = open(&golden.join(name), DType::F32);
        let gpu = emulated(Mode::Fast);
        let sizes = [4, 4, 3, 5, 4, 21, 4, 1, 9];
        assert!(sizes.iter().filter(|s| **s < 17).sum::<usize>() > 2 * 16);
        let tokens = |s: usize, n: usize| -> Vec<u32> {
            (0..n as u32)
                .map(|i| (i * 37 + s as u32 * 11 + 5) % 200)
                .collect()
        };
        let texts: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|(s, n)| tokens(s, *n))
            .collect();
        let start = |s: usize| prefilled(&model, &gpu, &tokens(s + 50, 3 + s)).0;
        let run = |which: &[usize]| {
            let mut caches: Vec<_> = which.iter().map(|s| start(*s)).collect();
            let places = caches.iter().map(|c| c.next_position().get());
            let places = places
                .zip(which)
                .map(|(p, s)| (p..p + sizes[*s] as u32).collect());
            let places: Vec<Vec<u32>> = places.collect();
            let rows = caches.iter_mut().zip(which).zip(&places);
            let mut batch: Vec<Rows> = rows
                .map(|((cache, s), positions)| Rows {
                    cache,
                    tokens: &texts[*s],
                    positions,
                    keep: Keep::Pending,
                })
                .collect();
            let hidden = model.forward(&gpu, &mut batch).unwrap();
            drop(batch);
            let logits = model.logits(&gpu, &hidden).unwrap();
            let logits: Vec<Vec<f32>> = logits.to_vec2().unwrap();
            for (cache, s) in caches.iter_mut().zip(which) {
                cache.accept(sizes[*s].min(3)).unwrap();
            }
            let kept: Vec<_> = caches.iter().map(contents).collect();
            (logits, kept)
        };
        let all: Vec<usize> = (0..sizes.len()).collect();
        let (logits, kept) = run(&all);
        let mut at = 0;
        for s in all {
            let (alone, own) = run(&[s]);
            assert!(logits[at..at + sizes[s]] == alone, "{name}: sequence {s}");
            assert!(kept[s] == own[0], "{name}: sequence {s}");
            at += sizes[s];
        }
        assert_on_launches(&gpu);
    }
}

/// SpecPrefill's scores on launches: the CPU's to within rounding, and the same look-ahead.
#[test]
fn a_draft_scores_a_prompt_on_launches_alone() {
    needs_clang!();
    let draft = open(&dir().with_file_name("draft"), DType::F32);
    let (prompt, gpu, cpu) = (prompt(), emulated(Mode::Fast), Context::default());
    let score = |cx| {
        let input = ScorerInput {
            draft: &draft,
            cx,
            tokens: &prompt,
            prefill_chunk: 512,
        };
        let scorer = AttentionScorer {
            lookahead: 3,
            ..AttentionScorer::default()
        };
        scorer.score(&input, &mut |_| {}).unwrap()
    };
    let (got, want) = (score(&gpu), score(&cpu));
    assert_on_launches(&gpu);
    assert_eq!(got.lookahead, want.lookahead);
    for (i, (g, w)) in got.importance.iter().zip(&want.importance).enumerate() {
        assert!((g - w).abs() <= 1e-5 + 1e-2 * w, "token {i}: {g} for {w}");
    }
}

fn best(logits: &[f32]) -> usize {
    let larger = |a, b| if logits[b] > logits[a] { b } else { a };
    (0..logits.len()).reduce(larger).unwrap()
}
