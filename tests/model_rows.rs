//! A row's result does not depend on its company: many-row passes against one-row passes, with `==` on bits.

mod support;

use candle_core::{DType, Tensor};
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::checkpoint::Checkpoint;
use candle_specprefill::qwen3_5::config::Config;
use candle_specprefill::qwen3_5::{
    Cache, Capture, DraftRows, Keep, LoadOptions, Model, Rows, Wanted,
};
use candle_specprefill::Error;
use support::{feed, golden, load, logits, same_bits, same_contents};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const MODELS: [&str; 3] = ["dense", "mlx/dense_q4g64", "mlx/dense_custom"];

fn tokens(n: usize, seed: u32) -> Vec<u32> {
    let next = |s: &u32| Some(s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let stream = std::iter::successors(Some(seed), next);
    stream.skip(1).take(n).map(|s| (s >> 16) % 256).collect()
}

/// Logits of `tokens` fed one at a time, and the cache they leave.
fn one_by_one(model: &Model, tokens: &[u32]) -> (Tensor, Cache) {
    let mut cache = model.new_cache().unwrap();
    let rows: Vec<Tensor> = tokens
        .iter()
        .map(|t| logits(model, &feed(model, &mut cache, &[*t], Keep::Commit)))
        .collect();
    (Tensor::cat(&rows, 0).unwrap(), cache)
}

#[test]
fn many_rows_equal_one_row_passes() {
    for (name, dtype) in MODELS.iter().flat_map(|m| DTYPES.map(|d| (m, d))) {
        let model = load(name, dtype);
        let all = tokens(5 + 16, 7);
        let (want, _) = one_by_one(&model, &all);
        for m in 1..=16 {
            let mut cache = model.new_cache().unwrap();
            feed(&model, &mut cache, &all[..5], Keep::Commit);
            let got = logits(
                &model,
                &feed(&model, &mut cache, &all[5..5 + m], Keep::Pending),
            );
            let want = want.narrow(0, 5, m).unwrap();
            assert_eq!(got.dtype(), dtype);
            assert!(same_bits(&got, &want), "{name} {dtype:?} m={m}");
            cache.accept(m).unwrap();
            let (_, alone) = one_by_one(&model, &all[..5 + m]);
            assert!(
                same_contents(&cache, &alone),
                "{name} {dtype:?} m={m} cache"
            );
        }
    }
}

#[test]
fn any_split_leaves_the_same_cache() {
    for (name, dtype) in MODELS.iter().flat_map(|m| DTYPES.map(|d| (m, d))) {
        let model = load(name, dtype);
        let all = tokens(24, 3);
        let (_, want) = one_by_one(&model, &all);
        for split in 1..24 {
            let mut cache = model.new_cache().unwrap();
            feed(&model, &mut cache, &all[..split], Keep::Commit);
            feed(&model, &mut cache, &all[split..], Keep::Commit);
            assert!(same_contents(&cache, &want), "{name} {dtype:?} at {split}");
        }
    }
}

#[test]
fn accepting_some_rows_forgets_the_rest() {
    for (name, dtype) in MODELS.iter().flat_map(|m| DTYPES.map(|d| (m, d))) {
        let model = load(name, dtype);
        let all = tokens(20, 11);
        for n in 0..=8 {
            let mut cache = model.new_cache().unwrap();
            feed(&model, &mut cache, &all[..4], Keep::Commit);
            feed(&model, &mut cache, &all[4..12], Keep::Pending);
            cache.accept(n).unwrap();
            assert_eq!(cache.length(), 4 + n);
            assert_eq!(cache.next_position(), 4 + n as u32);
            // Different rows follow the accepted ones, twice over pending passes.
            feed(&model, &mut cache, &all[15..18], Keep::Pending);
            cache.accept(2).unwrap();
            let got = logits(
                &model,
                &feed(&model, &mut cache, &all[18..20], Keep::Commit),
            );
            let line = [&all[..4 + n], &all[15..17], &all[18..20]].concat();
            let (want, alone) = one_by_one(&model, &line);
            let want = want.narrow(0, line.len() - 2, 2).unwrap();
            assert!(same_bits(&got, &want), "{name} {dtype:?} n={n}");
            assert!(
                same_contents(&cache, &alone),
                "{name} {dtype:?} n={n} cache"
            );
        }
    }
}

#[test]
fn two_sequences_share_passes_as_if_alone() {
    for dtype in DTYPES {
        let model = load("mlx/dense_q4g64", dtype);
        let (a, b) = (tokens(30, 1), tokens(17, 2));
        let (want_a, cache_a) = one_by_one(&model, &a);
        let (want_b, cache_b) = one_by_one(&model, &b);
        let mut caches = [model.new_cache().unwrap(), model.new_cache().unwrap()];
        let cx = Context::default();
        let mut at = [0, 0];
        for take in [(7, 1), (1, 9), (16, 2), (6, 5)] {
            let parts = [&a[at[0]..at[0] + take.0], &b[at[1]..at[1] + take.1]];
            let places = [take.0, take.1].map(|n| n as u32);
            let positions: Vec<Vec<u32>> = (0..2)
                .map(|s| (at[s] as u32..at[s] as u32 + places[s]).collect())
                .collect();
            let mut batch: Vec<Rows> = caches
                .iter_mut()
                .enumerate()
                .map(|(s, cache)| Rows {
                    cache,
                    tokens: parts[s],
                    positions: &positions[s],
                    keep: Keep::Commit,
                })
                .collect();
            let got = logits(&model, &model.forward(&cx, &mut batch).unwrap());
            let first = got.narrow(0, 0, take.0).unwrap();
            let second = got.narrow(0, take.0, take.1).unwrap();
            assert!(same_bits(&first, &want_a.narrow(0, at[0], take.0).unwrap()));
            assert!(same_bits(
                &second,
                &want_b.narrow(0, at[1], take.1).unwrap()
            ));
            at = [at[0] + take.0, at[1] + take.1];
        }
        assert!(same_contents(&caches[0], &cache_a));
        assert!(same_contents(&caches[1], &cache_b));
    }
}

#[test]
fn a_mark_undoes_what_came_after_it() {
    let model = load("mlx/dense_q4g64", DType::BF16);
    let all = tokens(30, 5);
    let mut cache = model.new_cache().unwrap();
    feed(&model, &mut cache, &all[..10], Keep::Commit);
    let mark = cache.mark().unwrap();
    let clean = cache.fork().unwrap();
    feed(&model, &mut cache, &all[10..14], Keep::Commit);
    feed(&model, &mut cache, &all[14..18], Keep::Pending);
    cache.restore(&mark).unwrap();
    assert_eq!(cache.length(), 10);
    assert_eq!(cache.next_position(), 10);
    assert!(same_contents(&cache, &clean));
    let got = feed(&model, &mut cache, &all[20..25], Keep::Commit);
    let mut fork = clean;
    assert!(same_bits(
        &got,
        &feed(&model, &mut fork, &all[20..25], Keep::Commit)
    ));
}

/// Every order of appends, marks and restores: a mark is taken back exactly while its rows are untouched, and then gives the bits of
/// a cache that never went astray.
#[test]
fn a_mark_is_good_until_the_cache_goes_back_before_it() {
    let model = load("dense", DType::F32);
    let mut seed = 1u32;
    let mut draw = |n: usize| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) as usize % n
    };
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..20 {
        let mut cache = model.new_cache().unwrap();
        let mut held: Vec<u32> = vec![];
        // Each mark with the rows that it stands for, and whether they are still there.
        let mut marks: Vec<(_, Vec<u32>, bool)> = vec![];
        for step in 0..25 {
            match draw(3) {
                0 => marks.push((cache.mark().unwrap(), held.clone(), true)),
                1 => {
                    let more = tokens(1 + draw(4), step * 31 + held.len() as u32);
                    feed(&model, &mut cache, &more, Keep::Commit);
                    held.extend(more);
                }
                _ if marks.is_empty() => {}
                _ => {
                    let (mark, rows, good) = marks[draw(marks.len())].clone();
                    assert_eq!(cache.restore(&mark).is_ok(), good, "{step}");
                    taken += u32::from(good);
                    refused += u32::from(!good);
                    if good {
                        held = rows;
                        let left = held.len();
                        let lost = |m: &&mut (_, Vec<u32>, bool)| m.1.len() > left;
                        marks.iter_mut().filter(lost).for_each(|m| m.2 = false);
                    }
                }
            }
            assert_eq!(cache.length(), held.len());
        }
        let next = tokens(3, 99);
        let mut clean = model.new_cache().unwrap();
        if !held.is_empty() {
            feed(&model, &mut clean, &held, Keep::Commit);
        }
        let want = feed(&model, &mut clean, &next, Keep::Commit);
        let got = feed(&model, &mut cache, &next, Keep::Commit);
        assert!(same_bits(&got, &want));
        assert!(same_contents(&cache, &clean));
    }
    assert!(taken > 5 && refused > 5, "{taken} {refused}");
}

#[test]
fn marks_of_other_caches_are_refused_and_change_nothing() {
    let model = load("dense", DType::F32);
    let filled = || {
        let mut cache = model.new_cache().unwrap();
        feed(&model, &mut cache, &tokens(6, 3), Keep::Commit);
        cache
    };
    let cache = filled();
    let mark = cache.mark().unwrap();
    for mut other in [filled(), cache.fork().unwrap()] {
        feed(&model, &mut other, &tokens(2, 4), Keep::Commit);
        let before = other.fork().unwrap();
        let error = other.restore(&mark).unwrap_err().to_string();
        assert!(error.contains("not of this cache"), "{error}");
        assert!(same_contents(&other, &before));
    }
}

#[test]
fn bad_rows_are_refused_and_change_nothing() {
    let model = load("dense", DType::F32);
    let mut cache = model.new_cache().unwrap();
    feed(&model, &mut cache, &[1, 2, 3], Keep::Commit);
    let before = cache.fork().unwrap();
    let cx = Context::default();
    let mut refused = |tokens: &[u32], positions: &[u32]| {
        let rows = Rows {
            cache: &mut cache,
            tokens,
            positions,
            keep: Keep::Commit,
        };
        model.forward(&cx, &mut [rows]).unwrap_err().to_string()
    };
    assert!(refused(&[], &[]).contains("empty"));
    assert!(refused(&[1, 2], &[3]).contains("2 tokens, but 1 positions"));
    assert!(refused(&[256], &[3]).contains("token id 256 is outside the vocabulary of 256"));
    assert!(refused(&[1], &[u32::MAX]).contains("max_position_embeddings"));
    assert!(same_contents(&cache, &before));
    feed(&model, &mut cache, &[4, 5], Keep::Pending);
    let rows = Rows {
        cache: &mut cache,
        tokens: &[1],
        positions: &[5],
        keep: Keep::Commit,
    };
    assert!(matches!(
        model.forward(&cx, &mut [rows]),
        Err(Error::Cache(_))
    ));
    assert!(matches!(cache.accept(3), Err(Error::Cache(_))));
    cache.accept(2).unwrap();
    assert_eq!(cache.length(), 5);
}

#[test]
fn draft_rows_do_not_depend_on_company() {
    for dtype in DTYPES {
        let model = load("dense", dtype);
        let all = tokens(12, 9);
        let mut cache = model.new_cache().unwrap();
        let hidden = feed(&model, &mut cache, &all[..11], Keep::Commit);
        let cx = Context::default();
        let positions: Vec<u32> = (0..11).collect();
        let run = |cache: &mut Cache, from: usize, to: usize| {
            let rows = DraftRows {
                cache,
                tokens: &all[from + 1..to + 1],
                hidden: &hidden.narrow(0, from, to - from).unwrap(),
                positions: &positions[from..to],
            };
            model.draft(&cx, &mut [rows]).unwrap()
        };
        let together = run(&mut cache, 0, 11);
        cache.truncate_draft(0).unwrap();
        let alone: Vec<Tensor> = (0..11).map(|r| run(&mut cache, r, r + 1)).collect();
        assert!(
            same_bits(&together, &Tensor::cat(&alone, 0).unwrap()),
            "{dtype:?}"
        );
    }
}

/// The dense model's first `layers` layers.
fn cut(layers: usize) -> Model {
    let mut config = Config::read(golden("dense")).unwrap();
    config.text.layer_types.truncate(layers);
    config.text.num_hidden_layers = layers;
    let checkpoint = Checkpoint::open(golden("dense")).unwrap();
    Model::from_checkpoint(&config, &checkpoint, &LoadOptions::default()).unwrap()
}

fn pass(
    model: &Model,
    cache: &mut Cache,
    tokens: &[u32],
    wanted: Wanted,
) -> (
    Option<Tensor>,
    Vec<Tensor>,
    candle_specprefill::ops::routes::RouteCounts,
) {
    let start = cache.next_position().get();
    let positions: Vec<u32> = (start..start + tokens.len() as u32).collect();
    let (cx, mut capture) = (Context::default(), Capture::default());
    let rows = Rows {
        cache,
        tokens,
        positions: &positions,
        keep: Keep::Commit,
    };
    let hidden = model.forward_capturing(&cx, rows, wanted, &mut capture);
    (hidden.unwrap(), capture.queries, cx.routes().snapshot())
}

/// Whether the last layer is attention (8 layers) or a delta net (7), what is computed has the bits of the whole pass.
#[test]
fn wanting_less_computes_less_and_the_same() {
    for model in [cut(8), cut(7)] {
        let all = tokens(23, 9);
        let mut whole = model.new_cache().unwrap();
        let (hidden, queries, full) = pass(&model, &mut whole, &all, Wanted::All);
        let hidden = hidden.unwrap();
        let mut cache = model.new_cache().unwrap();
        let (none, _, less) = pass(&model, &mut cache, &all[..10], Wanted::Nothing);
        assert!(none.is_none());
        assert!(less["attention/cpu/f32"] <= full["attention/cpu/f32"]);
        assert!(less.values().sum::<u64>() < full.values().sum());
        let (last, _, _) = pass(&model, &mut cache, &all[10..], Wanted::Last);
        assert!(same_bits(&last.unwrap(), &hidden.narrow(0, 22, 1).unwrap()));
        assert!(same_contents(&cache, &whole));
        // Through the first attention layer only.
        let mut keys = model.new_cache().unwrap();
        let (none, first, routes) = pass(&model, &mut keys, &all, Wanted::Keys(0));
        assert!(none.is_none() && !routes.contains_key("attention/cpu/f32"));
        assert!(first.len() == 1 && same_bits(&first[0], &queries[0]));
        let filled = |c: &Cache| {
            c.keys(0)
                .map(|(k, n)| k.narrow(1, 0, n).unwrap().copy().unwrap())
        };
        assert!(same_bits(&filled(&keys).unwrap(), &filled(&whole).unwrap()));
        // A cache of some layers cannot be continued by all of them.
        let rows = Rows {
            cache: &mut keys,
            tokens: &[1],
            positions: &[23],
            keep: Keep::Commit,
        };
        let error = model.forward(&Context::default(), &mut [rows]).unwrap_err();
        assert!(error.to_string().contains("4 layers"), "{error}");
    }
}

#[test]
fn several_sequences_want_their_own_last_rows() {
    let model = load("mlx/dense_q4g64", DType::BF16);
    let (a, b) = (tokens(9, 1), tokens(4, 2));
    let alone = |tokens: &[u32]| {
        let mut cache = model.new_cache().unwrap();
        pass(&model, &mut cache, tokens, Wanted::Last).0.unwrap()
    };
    let want = Tensor::cat(&[alone(&a), alone(&b)], 0).unwrap();
    let (mut cache_a, mut cache_b) = (model.new_cache().unwrap(), model.new_cache().unwrap());
    let positions: Vec<u32> = (0..9).collect();
    let mut rows = [
        Rows {
            cache: &mut cache_a,
            tokens: &a,
            positions: &positions,
            keep: Keep::Commit,
        },
        Rows {
            cache: &mut cache_b,
            tokens: &b,
            positions: &positions[..4],
            keep: Keep::Commit,
        },
    ];
    let got = model.forward_wanted(&Context::default(), &mut rows, Wanted::Last);
    assert!(same_bits(&got.unwrap().unwrap(), &want));
}
