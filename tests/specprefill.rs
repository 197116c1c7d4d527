//! SpecPrefill's scores, selections and sparse prefill against the paper's recipe and its test vectors.

mod support;

use std::ops::Range;

use candle_core::{DType, Tensor};
use candle_specprefill::mtp::{prefill, PrefillOptions};
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::Keep;
use candle_specprefill::specprefill::{
    admit, kept_rows, score, select_chunks, Kept, Reason, Settings,
};
use proptest::prelude::*;
use support::{distance, feed, ids, load, logits, same_bits, same_contents, tensors};

fn selected(importance: &[f32], keep: f64, tail: usize) -> Vec<u32> {
    let settings = Settings {
        keep,
        tail,
        ..Default::default()
    };
    kept_rows(&select_chunks(importance, &[], &settings))
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

proptest! {
    #[test]
    fn selections_are_sorted_complete_and_within_budget(
        n in 1usize..3000, keep in 0.01f64..1.2, chunk in 1usize..70, tail in 0usize..600, at in 0usize..3000, len in 0usize..400, seed in 0u32..1000,
    ) {
        let importance: Vec<f32> = (0..n as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_769) >> 16) as f32).collect();
        let mandatory: Vec<Range<usize>> = std::iter::once(at..at + len).collect();
        let settings = Settings { keep, chunk, tail, ..Default::default() };
        let chunks = select_chunks(&importance, &mandatory, &settings);
        let kept = kept_rows(&chunks);
        prop_assert!(kept.windows(2).all(|w| w[0] < w[1]));
        prop_assert!(kept.iter().all(|k| (*k as usize) < n));
        let has = |i: usize| kept.binary_search(&(i as u32)).is_ok();
        prop_assert!((at..at + len).filter(|i| *i < n).all(has));
        prop_assert!((n.saturating_sub(tail)..n).all(has));
        if keep >= 1.0 {
            prop_assert_eq!(kept.len(), n);
        }
        let must = chunks.iter().filter(|c| matches!(c.kept, Some(Kept::Tail | Kept::Mandatory))).count();
        let budget = ((chunks.len() as f64 * keep.min(1.0)).ceil() as usize).max(1).max(must);
        prop_assert_eq!(chunks.iter().filter(|c| c.kept.is_some()).count(), budget.min(chunks.len()));
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
        keep: 1.0,
        ..s.clone()
    };
    assert_eq!(admit(&off, true, 9000, &[]), Reason::Disabled);
    assert_eq!(admit(&s, false, 9000, &[]), Reason::NoDraft);
    assert_eq!(admit(&s, true, 8192, &[]), Reason::TooShort);
    assert_eq!(admit(&s, true, 8193, &[]), Reason::Admitted);
    assert_eq!(admit(&all, true, 9000, &[]), Reason::KeepsAll);
    let most = [0..4000, 4000..8500];
    assert_eq!(admit(&s, true, 9000, &most), Reason::AllMandatory);
    let overlapping = [0..5000, 0..5000];
    assert_eq!(admit(&s, true, 9000, &overlapping), Reason::Admitted);
    for bad in [
        Settings {
            pool: 12,
            ..s.clone()
        },
        Settings {
            keep: 0.0,
            ..s.clone()
        },
        Settings {
            chunk: 0,
            ..s.clone()
        },
        Settings {
            lookahead: 0,
            ..s.clone()
        },
    ] {
        assert!(bad.validate().is_err(), "{bad:?}");
    }
    assert!(serde_json::from_str::<Settings>(r#"{"kep": 0.1}"#).is_err());
}

/// The golden runs the paper's own code: the last prompt token's query comes first.
fn paper(pool: usize) -> Settings {
    Settings {
        lookahead: 4,
        pool,
        first_query_is_prompt_end: true,
        prefill_chunk: 16,
        ..Default::default()
    }
}

#[test]
fn scores_equal_the_papers_recipe() {
    let model = load("dense", DType::F32);
    let g = tensors("specprefill/dense.safetensors");
    let tokens = ids(&g["input_ids"]);
    for (pool, key) in [(1, "importance.pool0"), (13, "importance.pool13")] {
        let mut cache = model.new_cache().unwrap();
        let cx = Context::default();
        let scores = score(&model, &cx, &mut cache, &tokens, &paper(pool), &mut |_| {}).unwrap();
        let ours = Tensor::new(scores.importance.as_slice(), &candle_core::Device::Cpu).unwrap();
        let d = distance(&ours, &g[key]);
        assert!(d < 2e-6, "{key}: {d}");
        for (chunk, keep) in [(8, 0.3), (32, 0.1)] {
            let settings = Settings {
                keep,
                chunk,
                tail: 0,
                ..paper(pool)
            };
            let kept = kept_rows(&select_chunks(&scores.importance, &[], &settings));
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
