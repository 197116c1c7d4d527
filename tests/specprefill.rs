//! Scores and sparse prefill against the paper's recipe and its goldens; every scorer by its definition.

mod support;

use std::ops::Range;

use candle_core::{DType, Tensor};
use candle_specprefill::mtp::{prefill, PrefillOptions};
use candle_specprefill::ops::attention::reference_probabilities;
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::{Capture, Keep, Model, Rows, Wanted};
use candle_specprefill::specprefill::{
    kept_rows, select, select_chunks, AttentionScorer, Join, Keep as KeepRows, Scorer, ScorerInput,
    Scores, Scoring, Settings,
};
use support::{distance, feed, ids, load, logits, same_bits, same_contents, tensors, values};

/// The golden runs the paper's own code: the last prompt token's query comes first.
fn paper(pool: usize) -> AttentionScorer {
    AttentionScorer {
        window: 1,
        lookahead: 3,
        pool,
        ..AttentionScorer::look_ahead()
    }
}

fn scored(model: &Model, tokens: &[u32], scorer: &dyn Scorer) -> Scores {
    let input = ScorerInput {
        draft: model,
        cx: &Context::default(),
        tokens,
        prefill_chunk: 16,
    };
    scorer.score(&input, &mut |_| {}).unwrap()
}

#[test]
fn scores_equal_the_papers_recipe() {
    let model = load("dense", DType::F32);
    let g = tensors("specprefill/dense.safetensors");
    let tokens = ids(&g["input_ids"]);
    for (pool, key) in [(1, "importance.pool0"), (13, "importance.pool13")] {
        let mut cache = model.new_cache().unwrap();
        let input = ScorerInput {
            draft: &model,
            cx: &Context::default(),
            tokens: &tokens,
            prefill_chunk: 16,
        };
        let scores = paper(pool)
            .score_into(&input, &mut cache, &mut |_| {})
            .unwrap();
        let ours = Tensor::new(scores.importance.as_slice(), &candle_core::Device::Cpu).unwrap();
        let d = distance(&ours, &g[key]);
        assert!(d < 2e-6, "{key}: {d}");
        for (chunk, keep) in [(8, 0.3), (32, 0.1)] {
            let settings = Settings {
                keep: KeepRows::Fraction(keep),
                chunk,
                tail: 0,
                ..Default::default()
            };
            let kept = kept_rows(&select_chunks(&scores.importance, &[], &settings), &[]);
            let name = if pool == 1 { 0 } else { pool };
            assert_eq!(
                kept,
                ids(&g[&format!("kept.pool{name}.chunk{chunk}.p{keep}")])
            );
        }
        // The look-ahead leaves no trace.
        let mut clean = model.new_cache().unwrap();
        feed(&model, &mut clean, &tokens, Keep::Commit);
        assert!(same_contents(&cache, &clean));
        assert_eq!(cache.length(), 70);
        assert_eq!(cache.next_position(), 70);
    }
}

/// Window queries by definition: each row's attention over the keys up to its own, layer by layer, head by head.
fn by_definition(
    model: &Model,
    tokens: &[u32],
    s: &AttentionScorer,
    layers: Range<usize>,
) -> Vec<f32> {
    let (mut cache, mut capture) = (model.new_cache().unwrap(), Capture::default());
    let n = tokens.len();
    let positions: Vec<u32> = (0..n as u32).collect();
    let rows = Rows {
        cache: &mut cache,
        tokens,
        positions: &positions,
        keep: Keep::Commit,
    };
    let cx = Context::default();
    model
        .forward_capturing(&cx, rows, Wanted::All, &mut capture)
        .unwrap();
    let mut out = vec![0f32; n];
    for (i, row) in (n - s.window..n).enumerate() {
        let mut best = vec![0f32; n];
        for layer in layers.clone() {
            let q = capture.queries[layer].narrow(0, row, 1).unwrap();
            let (k, _) = cache.keys(layer).unwrap();
            let scale = (q.dims()[2] as f32).powf(-0.5);
            let p = reference_probabilities(&q, k, row + 1, scale).unwrap();
            for head in values(&p).chunks_exact(row + 1) {
                for (at, best) in best.iter_mut().enumerate() {
                    let around = at.saturating_sub(s.pool / 2)..at + s.pool / 2 + 1;
                    let around = around.map(|j| head.get(j).copied().unwrap_or(0.0));
                    *best = best.max(match s.pooling {
                        Join::Mean => around.sum::<f32>() / s.pool as f32,
                        Join::Max => around.fold(0.0, f32::max),
                    });
                }
            }
        }
        for (out, b) in out.iter_mut().zip(best) {
            let b = if s.late_queries_weigh_more {
                b * (i + 1) as f32 / s.window as f32
            } else {
                b
            };
            *out = if s.queries == Join::Max {
                out.max(b)
            } else {
                *out + b / s.window as f32
            };
        }
    }
    out
}

#[test]
fn windows_score_as_defined_and_early_stops_run_no_later_layer() {
    let model = load("dense", DType::F32);
    let tokens: Vec<u32> = (0..90).map(|i| (i * i * 7 + i) % 256).collect();
    let window = AttentionScorer {
        window: 11,
        ..AttentionScorer::tail_window()
    };
    let maxima = AttentionScorer {
        lookahead: 0,
        window: 20,
        pool: 9,
        skip_layers: 0.5,
        ..AttentionScorer::spec_pc()
    };
    let first = AttentionScorer {
        layers: Some(1),
        ..window.clone()
    };
    for (scorer, layers) in [(window, 0..2), (maxima, 1..2), (first.clone(), 0..1)] {
        let got = scored(&model, &tokens, &scorer).importance;
        let want = by_definition(&model, &tokens, &scorer, layers);
        let d = got
            .iter()
            .zip(&want)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(d < 2e-6, "{scorer:?}: {d}");
    }
    let cx = Context::default();
    let input = ScorerInput {
        draft: &model,
        cx: &cx,
        tokens: &tokens,
        prefill_chunk: 16,
    };
    first.score(&input, &mut |_| {}).unwrap();
    let routes = cx.routes().snapshot();
    assert!(!routes.contains_key("attention/cpu/f32"), "{routes:?}");
}

#[test]
fn every_scorer_is_reproducible_and_names_itself() {
    let model = load("dense", DType::F32);
    let tokens: Vec<u32> = (0..100).map(|i| (i * 31) % 256).collect();
    let mut names = std::collections::HashSet::new();
    for name in [
        "look-ahead-wide",
        "look-ahead",
        "tail-window",
        "spec-pc",
        "random",
        "random:7",
        "uniform",
    ] {
        let scoring: Scoring = name.parse().unwrap();
        let scores = scored(&model, &tokens, scoring.scorer());
        assert_eq!(scores.importance.len(), 100);
        assert_eq!(
            scores.importance,
            scored(&model, &tokens, &scoring).importance
        );
        assert!(names.insert(Scorer::id(&scoring)), "{name}");
        let json = serde_json::to_string(&scoring).unwrap();
        assert_eq!(serde_json::from_str::<Scoring>(&json).unwrap(), scoring);
        // Keeping everything is dense, whoever scores.
        let settings = Settings {
            keep: 1.0.into(),
            scorer: scoring,
            ..Default::default()
        };
        let kept = select(&scores, &[], &settings).kept;
        assert_eq!(kept, (0..100).collect::<Vec<u32>>());
    }
    assert!("best".parse::<Scoring>().is_err());
    let bad = [
        AttentionScorer {
            pool: 12,
            ..Default::default()
        },
        AttentionScorer {
            lookahead: 0,
            ..Default::default()
        },
        AttentionScorer {
            layers: Some(1),
            ..Default::default()
        },
        AttentionScorer {
            skip_layers: 1.0,
            ..Default::default()
        },
    ];
    for scorer in bad {
        assert!(scorer.validate().is_err(), "{scorer:?}");
    }
    assert!(serde_json::from_str::<Scoring>(r#"{"attention": {"pol": 1}}"#).is_err());
}

#[test]
fn uniform_chunks_are_spread() {
    let model = load("dense", DType::F32);
    let tokens = vec![1; 32 * 64];
    let scores = scored(&model, &tokens, &Scoring::Uniform);
    let settings = Settings {
        keep: 0.25.into(),
        tail: 0,
        ..Default::default()
    };
    let chunks = select_chunks(&scores.importance, &[], &settings);
    let kept: Vec<usize> = (0..64).filter(|i| chunks[*i].kept.is_some()).collect();
    assert_eq!(kept, (0..64).step_by(4).collect::<Vec<_>>());
}

#[test]
fn sparse_prefill_keeps_true_positions() {
    let model = load("dense", DType::F32);
    let g = tensors("specprefill/dense.safetensors");
    let tokens = ids(&g["input_ids"]);
    for key in g.keys().filter_map(|k| k.strip_prefix("kept.")) {
        let kept = ids(&g[&format!("kept.{key}")]);
        if kept.last() != Some(&69) {
            continue;
        }
        let mut cache = model.new_cache().unwrap();
        let options = PrefillOptions {
            chunk: 7,
            ..Default::default()
        };
        let cx = Context::default();
        let last = prefill(
            &model,
            &cx,
            &mut cache,
            &tokens,
            Some(&kept),
            &options,
            &mut |_| {},
        )
        .unwrap();
        let d = distance(
            &logits(&model, &last),
            &g[&format!("target_logits_last.{key}")],
        );
        assert!(d < 5e-4, "{key}: {d}");
        assert_eq!(cache.next_position(), 70);
        assert_eq!(cache.draft_rows() + 1, kept.len());
    }
}

#[test]
fn keeping_every_row_is_dense_to_the_bit() {
    let model = load("dense", DType::BF16);
    let g = tensors("specprefill/dense.safetensors");
    let tokens = ids(&g["input_ids"]);
    let all: Vec<u32> = (0..70).collect();
    let run = |kept: Option<&[u32]>, chunk| {
        let mut cache = model.new_cache().unwrap();
        let options = PrefillOptions {
            chunk,
            ..Default::default()
        };
        let cx = Context::default();
        let last = prefill(
            &model,
            &cx,
            &mut cache,
            &tokens,
            kept,
            &options,
            &mut |_| {},
        )
        .unwrap();
        (last, cache)
    };
    let (a, cache_a) = run(None, 64);
    let (b, cache_b) = run(Some(&all), 9);
    assert!(same_bits(&a, &b) && same_contents(&cache_a, &cache_b));
}

#[test]
fn rows_that_cannot_be_kept_are_refused() {
    let model = load("dense", DType::F32);
    let cx = Context::default();
    let mut cache = model.new_cache().unwrap();
    let options = PrefillOptions::default();
    let mut refuse = |tokens: &[u32], kept: Option<&[u32]>| {
        prefill(&model, &cx, &mut cache, tokens, kept, &options, &mut |_| {})
            .unwrap_err()
            .to_string()
    };
    assert!(refuse(&[], None).contains("empty"));
    assert!(refuse(&[1, 2, 3], Some(&[0, 1])).contains("end with the prompt's last row"));
    assert!(refuse(&[1, 2, 3], Some(&[2, 1])).contains("sorted"));
    assert!(refuse(&vec![1; 5000], None).contains("max_position_embeddings"));
}

#[test]
fn a_draft_that_cannot_score_is_refused() {
    use candle_specprefill::qwen3_5::config::{Config, LayerType};
    use candle_specprefill::specprefill::check_draft;
    let config = Config::read(support::golden("dense")).unwrap().text;
    check_draft(&config, &config, 256).unwrap();
    let mut small = config.clone();
    small.vocab_size = 200;
    let error = check_draft(&config, &small, 256).unwrap_err().to_string();
    assert!(error.contains("200") && error.contains("256"), "{error}");
    let mut blind = config.clone();
    blind.layer_types.fill(LayerType::LinearAttention);
    assert!(check_draft(&config, &blind, 256).is_err());
}

#[test]
fn scorers_that_share_a_pass_score_as_alone() {
    for dtype in [DType::F32, DType::BF16] {
        let model = load("dense", dtype);
        let tokens: Vec<u32> = (0..150).map(|i| (i * i * 5 + i) % 256).collect();
        let scorers = [
            AttentionScorer::look_ahead_wide(),
            AttentionScorer::look_ahead(),
            AttentionScorer::tail_window(),
            AttentionScorer::spec_pc(),
            paper(13),
            AttentionScorer {
                layers: Some(1),
                ..AttentionScorer::tail_window()
            },
        ];
        let input = ScorerInput {
            draft: &model,
            cx: &Context::default(),
            tokens: &tokens,
            prefill_chunk: 16,
        };
        let shared = AttentionScorer::score_all(&scorers, &input, &mut |_| {}).unwrap();
        for (scorer, shared) in scorers.iter().zip(&shared) {
            let alone = scored(&model, &tokens, scorer);
            assert_eq!(shared.importance, alone.importance, "{scorer:?}");
            assert_eq!(shared.lookahead, alone.lookahead, "{scorer:?}");
        }
        let none = AttentionScorer::score_all(&[], &input, &mut |_| {}).unwrap();
        assert!(none.is_empty());
    }
}
