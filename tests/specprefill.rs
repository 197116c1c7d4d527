//! SpecPrefill's scores, selections and sparse prefill against the paper's recipe and its test vectors.

mod support;

use std::ops::Range;

use candle_core::{DType, Tensor};
use candle_specprefill::mtp::{prefill, PrefillOptions};
use candle_specprefill::ops::attention::reference_probabilities;
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::{Capture, Keep, Model, Rows, Wanted};
use candle_specprefill::specprefill::{
    admit, kept_rows, select, select_chunks, union, AttentionScorer, Join, Keep as KeepRows, Kept,
    Policy, Reason, Report, Required, Role, Rule, ScoreMemo, Scorer, ScorerInput, Scores, Scoring,
    Settings, Span,
};
use proptest::prelude::*;
use support::{distance, feed, ids, load, logits, same_bits, same_contents, tensors, values};

fn selected(importance: &[f32], keep: f64, tail: usize) -> Vec<u32> {
    let settings = Settings {
        keep: keep.into(),
        tail,
        ..Default::default()
    };
    kept_rows(&select_chunks(importance, &[], &settings), &[])
}

/// Importance with a peak, elsewhere falling.
fn falling(n: usize) -> Vec<f32> {
    (0..n).map(|i| 1.0 / (1.0 + i as f32)).collect()
}

#[test]
fn published_test_vectors() {
    assert_eq!(selected(&falling(4096), 0.25, 512).len(), 1024);
    assert_eq!(selected(&falling(8192), 0.2, 512).len(), 1664);
    assert_eq!(selected(&falling(4100), 0.5, 512).len(), 2052);
    let kept = selected(&falling(1056), 0.1, 512);
    assert_eq!(kept, (544..1056).collect::<Vec<u32>>());
    let kept = selected(&falling(8193), 0.2, 512);
    assert!((7712..8193).all(|i| kept.contains(&i)));
    assert_eq!(selected(&falling(16), 0.5, 512).len(), 16);
    let kept = selected(&falling(4096), 0.25, 0);
    assert_eq!((kept.len(), kept.contains(&4095)), (1024, false));
}

#[test]
fn ties_go_to_the_earlier_chunk() {
    assert_eq!(selected(&[1.0; 320], 0.3, 0), (0..96).collect::<Vec<u32>>());
    let mut odd = vec![0.0; 320];
    odd[200] = f32::NAN;
    assert_eq!(selected(&odd, 0.1, 0), (0..32).collect::<Vec<u32>>());
}

fn keeps() -> impl Strategy<Value = KeepRows> {
    prop_oneof![
        (0.01f64..1.0).prop_map(KeepRows::Fraction),
        (1usize..3000).prop_map(KeepRows::Tokens),
        (0.01f64..1.0).prop_map(KeepRows::Mass),
        Just(KeepRows::Fraction(1.0)),
    ]
}

proptest! {
    #[test]
    fn selections_are_sorted_complete_and_within_budget(
        n in 1usize..3000, keep in keeps(), chunk in 1usize..70, tail in 0usize..600, neighbours in 0usize..3,
        marks in proptest::collection::vec((0usize..3000, 0usize..200), 0..4), seed in 0u32..1000,
    ) {
        let importance: Vec<f32> = (0..n as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_769) >> 16) as f32).collect();
        let settings = Settings { keep, chunk, tail, neighbours, ..Default::default() };
        let required: Vec<Range<usize>> = marks.iter().map(|(at, len)| *at..at + len).collect();
        let chunks = select_chunks(&importance, &required, &settings);
        let kept = kept_rows(&chunks, &required);
        prop_assert!(kept.windows(2).all(|w| w[0] < w[1]));
        prop_assert!(kept.iter().all(|k| (*k as usize) < n));
        let has = |i: usize| kept.binary_search(&(i as u32)).is_ok();
        prop_assert!(required.iter().flat_map(|r| r.clone()).filter(|i| *i < n).all(has));
        prop_assert!((n.saturating_sub(tail)..n).all(has));
        if keep.is_all(n) {
            prop_assert_eq!(kept.len(), n);
        }
        // Without the chunks that were chosen, only what must be kept is left.
        let chosen = |c: &&candle_specprefill::specprefill::Chunk| matches!(c.kept, Some(Kept::Score | Kept::Neighbour));
        let free: usize = chunks.iter().filter(chosen).map(|c| (c.end - c.start - c.required) as usize).sum();
        let must = kept.len() - free;
        let budget = match keep {
            KeepRows::Fraction(k) => {
                let before = chunks.iter().filter(|c| c.kept != Some(Kept::Tail));
                let free = before.map(|c| c.required as f64 / (c.end - c.start) as f64).sum::<f64>();
                (((chunks.len() as f64 - free) * k).ceil() + free) * chunk as f64
            }
            KeepRows::Tokens(t) => t as f64,
            _ => return Ok(()),
        };
        let most = (budget as usize).max(must);
        prop_assert!(kept.len() <= most + chunk, "{} rows, budget {budget}, must {must}", kept.len());
        // And the budget is used, to within a chunk (and the last chunk's missing tokens).
        let open = chunks.iter().any(|c| c.kept.is_none());
        prop_assert!(!open || kept.len() + 2 * chunk > budget as usize, "{} rows of {budget}", kept.len());
    }

    #[test]
    fn a_share_of_importance_is_held_by_the_fewest_chunks(n in 40usize..2000, share in 0.05f64..0.99, seed in 0u32..1000) {
        let importance: Vec<f32> = (0..n as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_769) >> 20) as f32).collect();
        let settings = Settings { keep: KeepRows::Mass(share), chunk: 8, tail: 0, ..Default::default() };
        let chunks = select_chunks(&importance, &[], &settings);
        let mass = |c: &candle_specprefill::specprefill::Chunk| c.score as f64 * (c.end - c.start) as f64;
        let all: f64 = chunks.iter().map(mass).sum();
        let mut ranked = chunks.clone();
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.start.cmp(&b.start)));
        let count = chunks.iter().filter(|c| c.kept.is_some()).count();
        prop_assert!(ranked[..count].iter().all(|c| c.kept.is_some()));
        let held = |n: usize| ranked[..n].iter().map(mass).sum::<f64>();
        prop_assert!(held(count) >= share * all * (1.0 - 1e-5));
        prop_assert!(held(count - 1) < share * all);
    }
}

#[test]
fn what_must_be_kept_is_kept_and_reported() {
    let spans = [
        (Role::Template, 0..3),
        (Role::System, 3..40),
        (Role::Template, 40..44),
        (Role::LastUser, 44..900),
        (Role::Template, 900..905),
        (Role::Marked, 500..510),
    ];
    let spans = spans.map(|(role, tokens)| Span { role, tokens });
    let policy = Policy {
        last_user: Rule::Ends {
            first: 10,
            last: 20,
        },
        first: 8,
        ..Default::default()
    };
    let required = policy.required(&spans, 905, 4);
    let found = union(required.iter().map(|r| r.tokens.clone()), 905);
    assert_eq!(found, [0..54, 500..510, 880..905]);
    assert!(required.contains(&Required {
        role: Role::Tail,
        tokens: 901..905
    }));
    let scores = Scores {
        importance: vec![0.0; 905],
        ..Default::default()
    };
    let settings = |keep: f64| Settings {
        keep: keep.into(),
        tail: 4,
        ..Default::default()
    };
    // A share of what competes: 905 tokens are 29 chunks, of which 85 tokens before the tail are required anyway.
    let tight = select(&scores, &required, &settings(0.05));
    assert_eq!((tight.required_tokens(), tight.over_budget()), (89, false));
    assert!(tight.kept.len() > 89 && tight.kept.len() < 89 + 2 * 32 + 9);
    let few = Settings {
        keep: KeepRows::Tokens(64),
        ..settings(1.0)
    };
    let tight = select(&scores, &required, &few);
    assert_eq!((tight.required_tokens(), tight.budget), (89, Some(64)));
    // The tail's chunk is kept whole, other required tokens alone.
    assert!(tight.over_budget() && tight.kept.len() <= 89 + 9);
    assert!((0..54).chain(500..510).all(|i| tight.kept.contains(&i)));
    assert!(!tight.kept.contains(&499));
    assert!(!select(&scores, &required, &settings(0.5)).over_budget());
    let all = Policy::score_everything().required(&spans, 905, 0);
    assert_eq!(
        union(all.into_iter().map(|r| r.tokens), 905),
        [500..510, 904..905]
    );
}

#[test]
fn keep_is_written_in_several_ways() {
    for (text, want) in [
        ("0.2", KeepRows::Fraction(0.2)),
        ("4000t", KeepRows::Tokens(4000)),
        ("mass:0.9", KeepRows::Mass(0.9)),
        ("1.5s", KeepRows::Budget { ttft_s: 1.5 }),
    ] {
        assert_eq!(text.parse::<KeepRows>().unwrap(), want);
    }
    for bad in ["", "2", "0", "0t", "mass:", "-1s", "NaN", "x"] {
        assert!(bad.parse::<KeepRows>().is_err(), "{bad}");
    }
}

#[test]
fn refusals_say_why() {
    let s = Settings::default();
    let off = Settings {
        enabled: false,
        ..s.clone()
    };
    let all = Settings {
        keep: 1.0.into(),
        ..s.clone()
    };
    assert_eq!(admit(&off, Some(16384), 9000, &[]), Reason::Disabled);
    assert_eq!(admit(&s, None, 9000, &[]), Reason::NoDraft);
    assert_eq!(admit(&s, Some(16384), 8192, &[]), Reason::TooShort);
    assert_eq!(admit(&s, Some(16384), 8193, &[]), Reason::Admitted);
    assert_eq!(admit(&all, Some(16384), 9000, &[]), Reason::KeepsAll);
    assert_eq!(admit(&s, Some(9007), 9000, &[]), Reason::DraftContext);
    let marked = |ranges: [Range<usize>; 2]| {
        ranges.map(|tokens| Required {
            role: Role::Marked,
            tokens,
        })
    };
    let most = marked([0..4000, 4000..9000]);
    assert_eq!(admit(&s, Some(16384), 9000, &most), Reason::AllMandatory);
    let overlapping = marked([0..5000, 0..5000]);
    assert_eq!(admit(&s, Some(16384), 9000, &overlapping), Reason::Admitted);
    for bad in [
        Settings {
            keep: 0.0.into(),
            ..s.clone()
        },
        Settings {
            chunk: 0,
            ..s.clone()
        },
    ] {
        assert!(bad.validate().is_err(), "{bad:?}");
    }
    assert!(serde_json::from_str::<Settings>(r#"{"kep": 0.1}"#).is_err());
}

/// The golden runs the paper's own code: the last prompt token's query comes first.
fn paper(pool: usize) -> AttentionScorer {
    AttentionScorer {
        window: 1,
        lookahead: 3,
        pool,
        ..Default::default()
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
        assert_eq!((cache.rows(), cache.next_position()), (70, 70));
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
fn the_memo_forgets_what_was_not_used_for_longest() {
    let memo = ScoreMemo::new(2);
    let scores = |v: f32| {
        std::sync::Arc::new(Scores {
            importance: vec![v],
            ..Default::default()
        })
    };
    memo.insert("a", &[1], scores(1.0));
    memo.insert("a", &[2], scores(2.0));
    assert_eq!(memo.get("a", &[1]).unwrap().importance, [1.0]);
    memo.insert("b", &[1], scores(3.0));
    assert!(memo.get("a", &[2]).is_none() && memo.len() == 2);
    assert_eq!(memo.get("b", &[1]).unwrap().importance, [3.0]);
    assert_eq!(memo.get("a", &[1]).unwrap().importance, [1.0]);
}

#[test]
fn seams_keep_the_tokens_before_every_run() {
    let mut importance = vec![0.0; 320];
    importance[100] = 1.0;
    let scores = Scores {
        importance,
        ..Default::default()
    };
    let settings = |seam| Settings {
        keep: KeepRows::Tokens(33),
        tail: 0,
        seam,
        ..Default::default()
    };
    let plain = select(&scores, &[], &settings(0)).kept;
    assert_eq!(plain, (96..128).chain(319..320).collect::<Vec<u32>>());
    let seamed = select(&scores, &[], &settings(3)).kept;
    assert_eq!(seamed, (93..128).chain(316..320).collect::<Vec<u32>>());
}

/// What a browser would show of the article, without what a rule drops.
fn shown(page: &str, only_kept: bool) -> String {
    let article = page.split("<article>").nth(1).unwrap();
    let article = article.split("</article>").next().unwrap();
    let mut out = String::new();
    for span in article.split("<span class=\"").skip(1) {
        let (head, rest) = span.split_once('>').unwrap();
        if !only_kept || head.starts_with('k') {
            out.push_str(rest.split("</span>").next().unwrap());
        }
    }
    let entities = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&amp;", "&"),
    ];
    entities
        .iter()
        .fold(out, |text, (from, to)| text.replace(from, to))
}

#[test]
fn the_page_shows_the_whole_prompt_and_what_was_kept() {
    let words: Vec<String> = (0..200).map(|i| format!("w{i}<&\">é ")).collect();
    let text = words.concat();
    let mut end = 0;
    let offsets: Vec<(usize, usize)> = words
        .iter()
        .map(|w| {
            end += w.len();
            (end - w.len(), end)
        })
        .collect();
    let spans = [Span {
        role: Role::System,
        tokens: 40..50,
    }];
    let scores = Scores {
        importance: (0..200).map(|i| i as f32).collect(),
        ..Default::default()
    };
    let settings = Settings {
        keep: 0.3.into(),
        tail: 0,
        ..Default::default()
    };
    let required = settings.policy.required(&spans, 200, 0);
    let selection = select(&scores, &required, &settings);
    let report = Report {
        title: "a <b> title",
        selection: &selection,
        spans: &spans,
        text: &text,
        offsets: &offsets,
        facts: &[],
    };
    let page = report.html();
    assert_eq!(shown(&page, false), text);
    let kept: String = selection
        .kept
        .iter()
        .map(|i| words[*i as usize].as_str())
        .collect();
    assert_eq!(shown(&page, true), kept);
    assert!(selection.kept.len() < 130 && (40..50).all(|i| selection.kept.contains(&i)));
    assert!(page.contains("a &lt;b&gt; title") && page.contains(">system</i>"));
    assert!(!page.contains("<script") && !page.contains("http"));
    let json = serde_json::to_string(&selection).unwrap();
    assert_eq!(
        serde_json::from_str::<candle_specprefill::specprefill::Selection>(&json).unwrap(),
        selection
    );
}
