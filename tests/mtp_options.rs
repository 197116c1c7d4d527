//! What may be asked of decoding besides depth: penalties, constraints, copies, stop texts, block verification, several sequences.

mod support;

use candle_core::{DType, Tensor};
use candle_specprefill::mtp::{
    check_head, prefill, step_all, Acceptance, Depth, Drafter, FinishReason, LogitsProcessor,
    NGram, PrefillOptions, Sampling, Session, SessionOptions, Step,
};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::TextTokenizer;
use candle_specprefill::qwen3_5::{Cache, Model};
use support::{load, same_contents, tiny, tiny_dir};

fn chat(text: &str) -> Vec<u32> {
    let tokenizer = TextTokenizer::read(tiny_dir()).unwrap();
    let text = format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    tokenizer.encode(&text).unwrap()
}

fn read(model: &Model, prompt: &[u32]) -> (Cache, Tensor) {
    let cx = Context::default();
    let mut cache = model.new_cache().unwrap();
    let o = PrefillOptions::default();
    let last = prefill(model, &cx, &mut cache, prompt, None, &o, &mut |_| {}).unwrap();
    (cache, last)
}

fn begin(model: &Model, prompt: &[u32], options: SessionOptions) -> Session {
    let (cache, last) = read(model, prompt);
    Session::new(model, &Context::default(), cache, &last, options).unwrap()
}

fn decode(model: &Model, prompt: &[u32], options: SessionOptions) -> (Vec<u32>, Session) {
    let cx = Context::default();
    let mut session = begin(model, prompt, options);
    let mut tokens = vec![];
    while session.finished().is_none() {
        tokens.extend(session.step(model, &cx).unwrap());
    }
    (tokens, session)
}

fn options(depth: Depth, max_tokens: usize) -> SessionOptions {
    SessionOptions {
        depth,
        max_tokens,
        ..Default::default()
    }
}

fn sampled(seed: u64) -> Sampling {
    Sampling {
        temperature: 0.9,
        top_k: 50,
        top_p: 0.95,
        seed,
        ..Default::default()
    }
}

const DEPTHS: [Depth; 4] = [
    Depth::Fixed(1),
    Depth::Fixed(3),
    Depth::Fixed(8),
    Depth::Adaptive { max: 5 },
];

#[test]
fn penalties_biases_and_constraints_see_the_history_of_plain_decoding() {
    let model = tiny(DType::BF16);
    let prompt = chat("Tell me about garbage collection.");
    // Every token must differ from the two before it, and in parity from the one before.
    let constrained = LogitsProcessor::new(|tokens, logits| {
        for token in tokens.iter().rev().take(2) {
            logits[*token as usize] = f32::NEG_INFINITY;
        }
        if let Some(last) = tokens.last() {
            let same = (0..logits.len()).filter(|t| *t as u32 % 2 == last % 2);
            same.for_each(|t| logits[t] = f32::NEG_INFINITY);
        }
    });
    let penalised = |base: Sampling| Sampling {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.2,
        logit_bias: vec![(17, 2.0), (30, f32::NEG_INFINITY), (100_000, 1.0)],
        ..base
    };
    for base in [Sampling::default(), sampled(3)] {
        for (sampling, processor) in [
            (penalised(base.clone()), None),
            (base.clone(), Some(constrained.clone())),
            (penalised(base.clone()), Some(constrained.clone())),
        ] {
            let options = |depth| SessionOptions {
                sampling: sampling.clone(),
                processor: processor.clone(),
                prompt: prompt.clone(),
                ..options(depth, 40)
            };
            let (plain, session) = decode(&model, &prompt, options(Depth::Off));
            let free = decode(
                &model,
                &prompt,
                SessionOptions {
                    sampling: base.clone(),
                    ..self::options(Depth::Off, 40)
                },
            )
            .0;
            assert_ne!(plain, free, "the filters must change something");
            for depth in DEPTHS {
                let (tokens, spec) = decode(&model, &prompt, options(depth));
                assert_eq!(tokens, plain, "{depth:?}");
                assert!(same_contents(spec.cache(), session.cache()));
            }
            if processor.is_some() {
                assert!(plain.windows(2).all(|w| w[0] % 2 != w[1] % 2));
            }
        }
    }
}

#[test]
fn copies_are_verified_like_drafts() {
    let model = tiny(DType::BF16);
    let text = "The lock is held until the end of the transaction, and the log is written before the data pages are.";
    let prompt = chat(&format!("Copy this paragraph exactly:\n\n{text}"));
    let (plain, _) = decode(&model, &prompt, options(Depth::Off, 40));
    for depth in [Depth::Off, Depth::Fixed(2), Depth::Adaptive { max: 4 }] {
        let mut copying = options(depth, 40);
        copying.drafter = Some(Box::new(NGram::default()));
        copying.prompt = prompt.clone();
        let (tokens, session) = decode(&model, &prompt, copying);
        assert_eq!(tokens, plain, "{depth:?}");
        let stats = session.stats();
        assert!(stats.copied > 0 && stats.sources.copy > 0, "{stats:?}");
        let s = &stats.sources;
        let sum = s.first + s.draft + s.copy + s.correction + s.bonus;
        assert_eq!(sum as usize, tokens.len(), "{stats:?}");
    }
    // A drafter of any kind, however bad, changes nothing.
    struct Wild(u32);
    impl Drafter for Wild {
        fn propose(&mut self, tokens: &[u32], max: usize) -> Vec<u32> {
            self.0 += 1;
            (0..max as u32)
                .map(|i| (tokens.len() as u32 * 31 + i * self.0) % 4096)
                .collect()
        }
        fn observe(&mut self, proposed: usize, accepted: usize) {
            assert!(accepted <= proposed);
        }
    }
    let mut wild = options(Depth::Fixed(2), 40);
    wild.drafter = Some(Box::new(Wild(0)));
    assert_eq!(decode(&model, &prompt, wild).0, plain);
}

#[test]
fn nothing_after_a_stop_is_committed() {
    let model = tiny(DType::BF16);
    let cx = Context::default();
    let prompt =
        chat("Repeat the following text:\n\none two three four five six seven eight nine ten");
    let (line, _) = decode(&model, &prompt, options(Depth::Off, 20));
    for depth in DEPTHS {
        for stop in 1..12 {
            let mut session = begin(&model, &prompt, options(depth, 20));
            let mut tokens: Vec<u32> = vec![];
            while session.finished().is_none() {
                let seen = tokens.len();
                let mut ends = |t: &[u32]| (stop <= seen + t.len()).then(|| stop - seen);
                let more = session.step_until(&model, &cx, &mut ends).unwrap();
                tokens.extend(more);
            }
            assert_eq!(tokens, line[..stop]);
            assert_eq!(session.finished(), Some(FinishReason::Stop));
            // The last token is in no cache, and nothing after it.
            assert_eq!(session.cache().length(), prompt.len() + stop - 1);
            let (cache, next) = session.into_parts(&model, &cx).unwrap();
            assert_eq!(next, line[stop - 1]);
            assert_eq!(cache.length(), cache.draft_rows());
        }
    }
}

#[test]
fn block_verification_is_greedy_decoding_at_temperature_0_and_sampling_above() {
    let model = tiny(DType::BF16);
    let prompt = chat("Tell me about the sea.");
    let block = |depth, sampling| SessionOptions {
        acceptance: Acceptance::Block,
        sampling,
        ..options(depth, 30)
    };
    let plain = decode(&model, &prompt, options(Depth::Off, 30)).0;
    assert_eq!(
        decode(&model, &prompt, block(Depth::Fixed(4), Sampling::default())).0,
        plain
    );
    let run = |seed| decode(&model, &prompt, block(Depth::Fixed(4), sampled(seed)));
    let (a, session) = run(1);
    assert_eq!(a, run(1).0, "the same seed gives the same text");
    assert_ne!(a, run(2).0);
    let stats = session.stats();
    assert!(stats.sources.draft > 0, "{stats:?}");
}

/// The first two tokens that block verification gives, over many seeds, against the model's own joint distribution.
#[test]
fn block_verification_follows_the_models_distribution() {
    let model = load("dense", DType::F32);
    let cx = Context::default();
    let prompt = [3, 1, 4, 1, 5];
    let (cache, last) = read(&model, &prompt);
    // A hot top-2 makes a small alphabet of the large one.
    let sampling = |seed| Sampling {
        temperature: 4.0,
        top_k: 2,
        seed,
        ..Default::default()
    };
    let draws = 1500;
    let count = |acceptance, depth| {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..draws {
            let options = SessionOptions {
                depth,
                acceptance,
                sampling: sampling(seed),
                max_tokens: 3,
                ..Default::default()
            };
            let mut session =
                Session::new(&model, &cx, cache.fork().unwrap(), &last, options).unwrap();
            let mut tokens = vec![];
            while session.finished().is_none() {
                tokens.extend(session.step(&model, &cx).unwrap());
            }
            *counts.entry(tokens).or_insert(0f64) += 1.0;
        }
        counts
    };
    let plain = count(Acceptance::Coupled, Depth::Off);
    let block = count(Acceptance::Block, Depth::Fixed(2));
    // Two samples of the same distribution: chi-squared with as many degrees as there are texts but one.
    let texts: std::collections::BTreeSet<_> = plain.keys().chain(block.keys()).collect();
    let mut chi = 0.0;
    for text in &texts {
        let (a, b) = (
            plain.get(*text).unwrap_or(&0.0),
            block.get(*text).unwrap_or(&0.0),
        );
        chi += (a - b).powi(2) / (a + b);
    }
    let freedom = texts.len() as f64 - 1.0;
    assert!(texts.len() >= 6, "{texts:?}");
    assert!(
        chi < freedom + 3.5 * (2.0 * freedom).sqrt(),
        "{chi} of {freedom}"
    );
}

#[test]
fn sequences_share_passes_and_get_what_they_get_alone() {
    let model = tiny(DType::BF16);
    let cx = Context::default();
    let prompts = [
        chat("Define the word \"harbour\"."),
        chat("Repeat the following text:\n\na b c d e f g h"),
        vec![7],
        chat("Tell me about sorting."),
    ];
    let depths = [
        Depth::Fixed(3),
        Depth::Adaptive { max: 6 },
        Depth::Off,
        Depth::Fixed(8),
    ];
    let make = |i: usize| SessionOptions {
        sampling: if i == 3 {
            sampled(9)
        } else {
            Sampling::default()
        },
        stop_tokens: vec![4095],
        drafter: (i == 1).then(|| Box::new(NGram::default()) as Box<dyn Drafter>),
        prompt: prompts[i].clone(),
        ..options(depths[i], 12 + 7 * i)
    };
    let alone: Vec<(Vec<u32>, Session)> = (0..4)
        .map(|i| decode(&model, &prompts[i], make(i)))
        .collect();
    let mut sessions: Vec<Session> = (0..4)
        .map(|i| begin(&model, &prompts[i], make(i)))
        .collect();
    let mut texts = vec![vec![]; 4];
    while sessions.iter().any(|s| s.finished().is_none()) {
        let mut steps: Vec<Step> = sessions
            .iter_mut()
            .map(|session| Step {
                session,
                ends: None,
            })
            .collect();
        let tokens = step_all(&model, &cx, &mut steps).unwrap();
        for (text, tokens) in texts.iter_mut().zip(tokens) {
            text.extend(tokens.unwrap());
        }
    }
    for (i, ((tokens, session), text)) in alone.iter().zip(&texts).enumerate() {
        assert_eq!(tokens, text, "sequence {i}");
        assert!(
            same_contents(session.cache(), sessions[i].cache()),
            "sequence {i}"
        );
        assert_eq!(session.finished(), sessions[i].finished());
    }
    // It shared: the last sequence alone needed as many passes as all together at most.
    assert!(sessions[3].stats().accepted.iter().sum::<u64>() > 0);
}

#[test]
fn one_sequences_failure_is_its_own() {
    let model = tiny(DType::BF16);
    let cx = Context::default();
    let prompt = chat("Tell me about the sea.");
    let nothing = LogitsProcessor::new(|tokens, logits| {
        if tokens.len() == 5 {
            logits.fill(f32::NEG_INFINITY);
        }
    });
    let mut good = begin(&model, &prompt, options(Depth::Fixed(3), 20));
    let mut bad = begin(
        &model,
        &prompt,
        SessionOptions {
            processor: Some(nothing),
            ..options(Depth::Fixed(3), 20)
        },
    );
    let (mut text, mut failures) = (vec![], 0);
    while good.finished().is_none() {
        let mut steps = [&mut good, &mut bad].map(|session| Step {
            session,
            ends: None,
        });
        let mut out = step_all(&model, &cx, &mut steps).unwrap();
        failures += out[1].is_err() as u32;
        text.extend(out.swap_remove(0).unwrap());
    }
    assert!(failures > 0);
    assert_eq!(text, decode(&model, &prompt, options(Depth::Off, 20)).0);
    // It may be given up at any time.
    let (cache, _) = bad.into_parts(&model, &cx).unwrap();
    assert_eq!(cache.length(), cache.draft_rows());
}

#[test]
fn a_parked_head_stays_complete() {
    // Random weights: no draft is ever right, so adaptive decoding goes to rest.
    let model = load("dense", DType::F32);
    let cx = Context::default();
    let prompt = [5, 9, 2];
    let (tokens, session) = decode(&model, &prompt, options(Depth::Adaptive { max: 4 }, 400));
    assert_eq!(tokens, decode(&model, &prompt, options(Depth::Off, 400)).0);
    let stats = session.stats().clone();
    assert!(stats.parks > 0 && stats.parked_tokens > 50, "{stats:?}");
    assert_eq!(stats.depths.iter().sum::<u64>(), stats.cycles);
    let (cache, _) = session.into_parts(&model, &cx).unwrap();
    assert_eq!(cache.length(), cache.draft_rows());
}

#[test]
fn a_head_that_knows_nothing_is_found_out() {
    let cx = Context::default();
    let tokens = chat("The water cycle describes how water moves between the sea, the air and the land, and back again.");
    let check = check_head(&tiny(DType::BF16), &cx, &tokens)
        .unwrap()
        .unwrap();
    assert!(check.passed(), "{check:?}");
    let random = load("dense", DType::F32);
    let tokens: Vec<u32> = tokens.iter().map(|t| t % 256).collect();
    let check = check_head(&random, &cx, &tokens).unwrap().unwrap();
    assert!(!check.passed(), "{check:?}");
    assert!(check.advice().contains("norms"));
}

#[test]
fn a_smaller_draft_vocabulary_changes_no_token() {
    let model = tiny(DType::BF16);
    let cx = Context::default();
    let prompt = chat("Define the word \"harbour\".");
    let (plain, _) = decode(&model, &prompt, options(Depth::Off, 30));
    let vocabulary = std::sync::Arc::new(
        model
            .draft_vocabulary(&(0..4096).step_by(2).collect::<Vec<_>>())
            .unwrap(),
    );
    // The logits are those of the whole head.
    let (_, last) = read(&model, &prompt);
    let whole: Vec<f32> = model
        .logits(&cx, &last)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .to_vec2()
        .unwrap()
        .remove(0);
    let some = model
        .draft_logits(&cx, &last, &vocabulary)
        .unwrap()
        .remove(0);
    for (i, (a, b)) in whole.iter().zip(&some).enumerate() {
        assert_eq!(*b, if i % 2 == 0 { *a } else { f32::NEG_INFINITY });
    }
    for sampling in [Sampling::default(), sampled(4)] {
        let run = |depth, draft_vocabulary| {
            let o = SessionOptions {
                draft_vocabulary,
                sampling: sampling.clone(),
                ..options(depth, 30)
            };
            decode(&model, &prompt, o)
        };
        let (want, _) = run(Depth::Off, None);
        let (tokens, session) = run(Depth::Fixed(3), Some(vocabulary.clone()));
        assert_eq!(tokens, want);
        assert!(session.stats().sources.draft > 0);
    }
    assert!(
        !plain.is_empty()
            && model.draft_vocabulary(&[4096]).is_err()
            && model.draft_vocabulary(&[]).is_err()
    );
}

#[test]
fn greedy_tokens_are_those_of_the_logits_without_reading_them() {
    let model = tiny(DType::BF16);
    let (prompt, cx) = (chat("Define the word \"harbour\"."), Context::default());
    let half: Vec<u32> = (0..4096).step_by(2).collect();
    let vocabulary = std::sync::Arc::new(model.draft_vocabulary(&half).unwrap());
    for draft_vocabulary in [None, Some(vocabulary)] {
        let run = |processor: Option<LogitsProcessor>, sampling: Sampling| {
            let (cache, last) = read(&model, &prompt);
            let (cx, options) = (
                Context::default(),
                SessionOptions {
                    processor,
                    sampling,
                    draft_vocabulary: draft_vocabulary.clone(),
                    ..options(Depth::Fixed(3), 40)
                },
            );
            let mut session = Session::new(&model, &cx, cache, &last, options).unwrap();
            let mut tokens = vec![];
            while session.finished().is_none() {
                tokens.extend(session.step(&model, &cx).unwrap());
            }
            let routes = cx.routes().snapshot();
            let found = routes.get("argmax/cpu/bf16").copied().unwrap_or_default();
            (tokens, session.stats().cycles, found)
        };
        let (tokens, cycles, found) = run(None, Sampling::default());
        // The first token, and in each cycle the pass and its drafts.
        assert!(found > cycles && cycles > 0, "{found} of {cycles}");
        let top_1 = Sampling {
            top_k: 1,
            ..sampled(3)
        };
        assert_eq!(run(None, top_1), (tokens.clone(), cycles, found));
        // A processor wants to see the logits, even if it changes none.
        let looks = LogitsProcessor::new(|_, logits| assert_eq!(logits.len(), 4096));
        assert_eq!(
            run(Some(looks), Sampling::default()),
            (tokens, cycles, 0),
            "the tokens of the logits are others"
        );
        assert_eq!(run(None, sampled(3)).2, 0);
    }
    // Useless logits are an error, as they are on the host.
    let (cache, last) = read(&model, &prompt);
    let nan = (last * f64::NAN).unwrap();
    let failed = Session::new(&model, &cx, cache, &nan, options(Depth::Off, 3));
    assert!(failed.err().unwrap().to_string().contains("is NaN"));
}
