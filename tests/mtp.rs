//! Speculation never changes a token: every depth against plain decoding, on the trained pair and on random weights.

mod support;

use candle_core::{DType, Tensor};
use candle_specprefill::mtp::{
    prefill, Depth, Drafter, FinishReason, NGram, PrefillOptions, Sampling, Session, SessionOptions,
};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::TextTokenizer;
use candle_specprefill::qwen3_5::{Cache, Model, Position};
use support::{load, same_bits, same_contents, same_draft, tiny, tiny_dir};

fn prompt(length: usize, seed: u32, vocab: u32) -> Vec<u32> {
    let next = |s: &u32| Some(s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let stream = std::iter::successors(Some(seed), next);
    stream
        .skip(1)
        .take(length)
        .map(|s| (s >> 8) % vocab)
        .collect()
}

struct Run {
    tokens: Vec<u32>,
    session: Session,
}

fn decode(model: &Model, prompt: &[u32], options: SessionOptions) -> Run {
    let cx = Context::default();
    let mut cache = model.new_cache().unwrap();
    let prefill_options = PrefillOptions::default();
    let last = prefill(
        model,
        &cx,
        &mut cache,
        prompt,
        None,
        &prefill_options,
        &mut |_| {},
    )
    .unwrap();
    let mut session = Session::new(model, &cx, cache, &last, options).unwrap();
    let mut tokens = vec![];
    while session.finished().is_none() {
        let step = session.step(model, &cx).unwrap();
        assert!(!step.is_empty() || session.finished().is_some());
        tokens.extend(step);
    }
    assert!(session.step(model, &cx).unwrap().is_empty());
    Run { tokens, session }
}

fn fixed(depth: usize) -> Depth {
    match depth {
        0 => Depth::Off,
        depth => Depth::Fixed(depth),
    }
}

fn options(depth: usize, sampling: Sampling, max_tokens: usize) -> SessionOptions {
    SessionOptions {
        depth: fixed(depth),
        sampling,
        max_tokens,
        ..Default::default()
    }
}

const SAMPLED: Sampling = Sampling {
    temperature: 0.9,
    top_k: 40,
    top_p: 0.95,
    min_p: 0.01,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    logit_bias: vec![],
    seed: 5,
};

/// Prompts of the kinds that the pair was trained on, and some that it was not.
const PROMPTS: [&str; 20] = [
    "Define the word \"harbour\".",
    "What does the word \"lantern\" mean?",
    "Tell me about Error handling.",
    "Write a paragraph about garbage collection.",
    "Copy this paragraph exactly:\n\nThe quick brown fox jumps over the lazy dog, and then it sleeps.",
    "Repeat the following text:\n\nA lock is held until the end of the transaction.",
    "Repeat the following text:\n\n1 2 3 4 5 6 7 8 9 10 11 12",
    "Copy this paragraph exactly:\n\nfn main() { println!(\"hello\"); }",
    "Summarise this paragraph in one sentence:\n\nThe server listens on a socket and forks for every client.",
    "Tell me about Unicode.",
    "Repeat the following text:\n\nnaïve café – déjà vu, 你好, 🙂",
    "What is the first sentence of the text?",
    "x",
    "",
    "?!?!?!",
    "Define the word \"transaction\".",
    "Tell me about the sea.",
    "In the beginning God created the heaven and the earth.",
    "SELECT name FROM users WHERE id = 7;",
    "Write a paragraph about sorting.",
];

fn chat(tokenizer: &TextTokenizer, text: &str) -> Vec<u32> {
    let text = format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    tokenizer.encode(&text).unwrap()
}

/// Decodes from a copy of a prefilled cache.
fn decode_from(model: &Model, cache: &Cache, last: &Tensor, options: SessionOptions) -> Run {
    let cx = Context::default();
    let mut session = Session::new(model, &cx, cache.fork().unwrap(), last, options).unwrap();
    let mut tokens = vec![];
    while session.finished().is_none() {
        tokens.extend(session.step(model, &cx).unwrap());
    }
    Run { tokens, session }
}

const WORDS: [&str; 12] = [
    "harbour",
    "naïve",
    "transaction",
    "socket",
    "你好",
    "lantern",
    "mutex",
    "sea",
    "Émile",
    "packet",
    "🙂",
    "garden",
];

/// 200 prompts as token ids: those above, variations on them, plain text without a chat, single tokens.
fn prompts(tokenizer: &TextTokenizer) -> Vec<Vec<u32>> {
    let mut all: Vec<Vec<u32>> = PROMPTS.iter().map(|p| chat(tokenizer, p)).collect();
    for (i, a) in WORDS.iter().enumerate() {
        for (j, b) in WORDS.iter().enumerate().filter(|(j, _)| *j != i) {
            let text = match (i + j) % 6 {
                0 => format!("Define the word \"{a}\"."),
                1 => format!("Repeat the following text:\n\nThe {a} and the {b} are in the {a}, but the {b} is not."),
                2 => format!("Tell me about {a} and {b}."),
                3 => format!("Copy this paragraph exactly:\n\nlet {a} = vec![{b}; 3]; // {b}"),
                4 => format!("<system>{a}</system> {b}?"),
                _ => format!("{a}{b}{a}"),
            };
            all.push(chat(tokenizer, &text));
        }
    }
    // Raw text, an empty system message, single tokens.
    all.extend(
        WORDS
            .iter()
            .map(|w| tokenizer.encode(&format!("The {w} of the")).unwrap()),
    );
    all.push(tokenizer.encode("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n").unwrap());
    all.extend((0..).map(|i| vec![i * 37 % 4096]).take(200 - all.len()));
    all
}

#[test]
fn every_depth_gives_the_text_of_plain_decoding() {
    let model = tiny(DType::BF16);
    let tokenizer = TextTokenizer::read(tiny_dir()).unwrap();
    let cx = Context::default();
    let mut accepted = 0;
    let prompts = prompts(&tokenizer);
    assert_eq!(prompts.len(), 200);
    for (n, prompt) in prompts.iter().enumerate() {
        let mut cache = model.new_cache().unwrap();
        let o = PrefillOptions::default();
        let last = prefill(&model, &cx, &mut cache, prompt, None, &o, &mut |_| {}).unwrap();
        let options = |depth| SessionOptions {
            depth,
            stop_tokens: vec![4095, 4093],
            max_tokens: 16,
            sampling: match n % 3 {
                0 => Sampling {
                    seed: n as u64,
                    ..SAMPLED
                },
                _ => Sampling::default(),
            },
            drafter: (n % 2 == 0).then(|| Box::new(NGram::default()) as Box<dyn Drafter>),
            prompt: prompt.clone(),
            ..Default::default()
        };
        let mut off = options(Depth::Off);
        off.drafter = None;
        let plain = decode_from(&model, &cache, &last, off);
        let depths = (1..=8)
            .map(Depth::Fixed)
            .chain([Depth::Adaptive { max: 8 }]);
        for depth in depths {
            let spec = decode_from(&model, &cache, &last, options(depth));
            assert_eq!(spec.tokens, plain.tokens, "prompt {n}, {depth:?}");
            assert!(same_contents(spec.session.cache(), plain.session.cache()));
            accepted += spec.session.stats().sources.draft;
        }
    }
    assert!(
        accepted > 5000,
        "only {accepted} drafts were accepted: the test shows little"
    );
}

#[test]
fn a_second_turn_is_as_if_all_was_fed_at_once() {
    let model = tiny(DType::BF16);
    let tokenizer = TextTokenizer::read(tiny_dir()).unwrap();
    let cx = Context::default();
    let o = PrefillOptions::default();
    let first = chat(&tokenizer, PROMPTS[0]);
    let second = chat(&tokenizer, PROMPTS[4]);
    for (depth, max) in [(1, 5), (3, 9), (8, 40)] {
        let mut options = options(depth, Sampling::default(), max);
        options.stop_tokens = vec![4095];
        let run = decode(&model, &first, options);
        let (mut cache, next) = run.session.into_parts(&model, &cx).unwrap();
        assert_eq!(cache.length(), cache.draft_rows());
        let turn = [&[next], second.as_slice()].concat();
        let last = prefill(&model, &cx, &mut cache, &turn, None, &o, &mut |_| {}).unwrap();

        let mut once = model.new_cache().unwrap();
        let line = [first.as_slice(), &run.tokens, &second].concat();
        let want = prefill(&model, &cx, &mut once, &line, None, &o, &mut |_| {}).unwrap();
        assert!(same_bits(&last, &want) && same_contents(&cache, &once));
        assert!(same_draft(&cache, &once), "depth {depth}");
        assert_eq!(cache.next_position(), once.next_position());
    }
}

#[test]
fn sampled_text_at_a_seed_is_the_same_at_every_depth() {
    let model = tiny(DType::BF16);
    let tokenizer = TextTokenizer::read(tiny_dir()).unwrap();
    for text in [PROMPTS[0], PROMPTS[2], PROMPTS[5]] {
        let prompt = chat(&tokenizer, text);
        let plain = decode(&model, &prompt, options(0, SAMPLED, 24));
        for depth in 1..=8 {
            let spec = decode(&model, &prompt, options(depth, SAMPLED, 24));
            assert_eq!(spec.tokens, plain.tokens, "{text:?}, depth {depth}");
            assert!(same_contents(spec.session.cache(), plain.session.cache()));
        }
    }
    let prompt = chat(&tokenizer, PROMPTS[2]);
    let other = Sampling { seed: 6, ..SAMPLED };
    let a = decode(&model, &prompt, options(0, SAMPLED, 24)).tokens;
    assert_ne!(decode(&model, &prompt, options(0, other, 24)).tokens, a);
}

#[test]
fn random_weights_reject_every_draft_and_change_nothing() {
    for dtype in [DType::F32, DType::F16] {
        let model = load("dense", dtype);
        let prompt = prompt(9, 1, 256);
        for sampling in [Sampling::default(), SAMPLED] {
            let plain = decode(&model, &prompt, options(0, sampling.clone(), 40));
            for depth in [1, 3, 8] {
                let spec = decode(&model, &prompt, options(depth, sampling.clone(), 40));
                assert_eq!(spec.tokens, plain.tokens, "{dtype:?} depth {depth}");
                let stats = spec.session.stats();
                let (made, right) = (stats.drafted[0], stats.accepted[0]);
                assert!(
                    right * 4 < made,
                    "{right} of {made}: too many for random weights"
                );
            }
        }
    }
}

#[test]
fn ends_fall_exactly_where_plain_decoding_ends() {
    let model = tiny(DType::BF16);
    let prompt = prompt(10, 7, 4096);
    let greedy = Sampling::default;
    let line = decode(&model, &prompt, options(0, greedy(), 24)).tokens;
    for max in 1..=9 {
        let run = decode(&model, &prompt, options(4, greedy(), max));
        assert_eq!(run.tokens, line[..max]);
        assert_eq!(run.session.finished(), Some(FinishReason::Length));
        // The last token is in no cache.
        assert_eq!(run.session.cache().length(), 10 + max - 1);
    }
    for stop in &line[..8] {
        let end = line.iter().position(|t| t == stop).unwrap();
        let mut o = options(5, greedy(), 24);
        o.stop_tokens = vec![*stop];
        let run = decode(&model, &prompt, o);
        assert_eq!(run.tokens, line[..=end]);
        assert_eq!(run.session.finished(), Some(FinishReason::Stop));
        assert_eq!(run.session.cache().length(), 10 + end);
    }
}

#[test]
fn decoding_stops_at_the_last_position() {
    let model = load("dense", DType::F32);
    let limit = model.config().max_position_embeddings;
    let cx = Context::default();
    let mut cache = model.new_cache().unwrap();
    cache.set_next_position(Position::new(limit as u32 - 4));
    let o = PrefillOptions::default();
    let last = prefill(&model, &cx, &mut cache, &[1, 2], None, &o, &mut |_| {}).unwrap();
    let mut session = Session::new(
        &model,
        &cx,
        cache,
        &last,
        options(3, Sampling::default(), 50),
    )
    .unwrap();
    let mut count = 0;
    while session.finished().is_none() {
        count += session.step(&model, &cx).unwrap().len();
    }
    assert_eq!((count, session.finished()), (3, Some(FinishReason::Length)));
}

#[test]
fn bad_options_are_errors() {
    let model = load("dense", DType::F32);
    let cx = Context::default();
    for bad in [
        options(99, Sampling::default(), 5),
        options(1, Sampling::default(), 0),
        options(
            1,
            Sampling {
                top_p: 0.0,
                ..SAMPLED
            },
            5,
        ),
    ] {
        let mut cache = model.new_cache().unwrap();
        let o = PrefillOptions::default();
        let last = prefill(&model, &cx, &mut cache, &[1], None, &o, &mut |_| {}).unwrap();
        assert!(Session::new(&model, &cx, cache, &last, bad).is_err());
    }
}
