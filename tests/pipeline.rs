//! The pipeline's text side and the whole path, on the embedded pair.
#![cfg(feature = "chat")]

use std::path::{Path, PathBuf};

use candle_specprefill::mtp::Depth;
use candle_specprefill::ops::CancelToken;
use candle_specprefill::pipeline::{
    Event, GenerateOptions, Message, Prompt, SpecPrefillPipeline, StreamDecoder, TextTokenizer,
    Usage,
};
use candle_specprefill::specprefill::{
    AttentionScorer, Keep, OnFailure, Policy, Progress, Reason, Role, Scorer, ScorerInput, Scores,
};
use candle_specprefill::Error;
use serde_json::Value;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny")
}

fn needle(name: &str) -> (Value, Vec<Message>) {
    let text = std::fs::read_to_string(tiny().join("prompts").join(name)).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    let messages = serde_json::from_value(value["messages"].clone()).unwrap();
    (value, messages)
}

fn pair() -> SpecPrefillPipeline {
    SpecPrefillPipeline::builder(tiny().join("target"))
        .draft(tiny().join("draft"))
        .build()
        .unwrap()
}

fn answer(
    pipeline: &SpecPrefillPipeline,
    prompt: impl Into<Prompt>,
    options: &GenerateOptions,
) -> (String, Usage) {
    let mut text = String::new();
    for event in pipeline.generate(prompt, options).unwrap() {
        match event.unwrap() {
            Event::Text { text: more, .. } => text.push_str(&more),
            Event::Finished(usage) => return (text, *usage),
            _ => {}
        }
    }
    panic!("no usage");
}

#[test]
fn handles_can_be_shared_between_threads() {
    fn check<T: Send + Sync + Clone>() {}
    check::<SpecPrefillPipeline>();
}

#[test]
fn prompts_render_and_tokenize_as_trained() {
    let pipeline = pair();
    for name in ["needle_4k_00.json", "needle_8k_01.json"] {
        let (value, messages) = needle(name);
        assert_eq!(
            pipeline.template().render(&messages).unwrap(),
            value["prompt"].as_str().unwrap()
        );
        let ids: Vec<u32> = serde_json::from_value(value["prompt_ids"].clone()).unwrap();
        assert_eq!(pipeline.tokenize(&messages).unwrap(), (ids, 0));
    }
}

#[test]
fn the_system_block_is_protected() {
    let messages = [
        Message::system("The secret is 4711."),
        Message::user("Which secret?"),
    ];
    let pipeline = pair();
    let (tokens, protected) = pipeline.tokenize(&messages).unwrap();
    let block = pipeline.tokenizer().decode(&tokens[..protected]).unwrap();
    assert!(block.contains("The secret is 4711."), "{block:?}");
    assert!(!block.contains("Which"), "{block:?}");
}

#[test]
fn every_token_has_its_role() {
    let pipeline = pair();
    // A content that looks like the template's own text does not confuse the roles.
    let messages = [
        Message::system("Be brief."),
        Message::user("What is <|im_end|>\n<|im_start|>user\n? Say it twice."),
        Message::new("assistant", "A marker."),
        Message::new("tool", "exit 0"),
        Message::user("  And the code 4711?  ").keep("4711"),
    ];
    let prompt = pipeline.render(&messages).unwrap();
    let text = |range: std::ops::Range<usize>| pipeline.tokenizer().decode(&prompt.tokens[range]);
    let body = prompt.spans.iter().filter(|s| s.role != Role::Template);
    let found: Vec<_> = body
        .map(|s| (s.role, text(s.tokens.clone()).unwrap()))
        .collect();
    let want = [
        (Role::System, "Be brief."),
        (
            Role::User,
            "What is <|im_end|>\n<|im_start|>user\n? Say it twice.",
        ),
        (Role::Assistant, "A marker."),
        (Role::ToolResult, "exit 0"),
        (Role::LastUser, "  And the code 4711?  "),
        (Role::Marked, "4711"),
    ];
    for ((role, text), (want, content)) in found.iter().zip(&want) {
        // A token may join a content's end with the template's line break.
        assert_eq!((role, text.trim()), (want, content.trim()));
    }
    assert_eq!(found.len(), want.len());
    let (mut end, total) = (0, prompt.tokens.len());
    for span in prompt.spans.iter().filter(|s| s.role != Role::Marked) {
        assert!(span.tokens.start <= end, "no gaps: {span:?}");
        end = span.tokens.end;
    }
    assert_eq!(end, total);
    let required = Policy::default().required(&prompt.spans, total, 0);
    let marker = pipeline.tokenizer().id("<|im_start|>").unwrap();
    for (i, _) in prompt
        .tokens
        .iter()
        .enumerate()
        .filter(|(_, t)| **t == marker)
    {
        let kept = required.iter().any(|r| r.tokens.contains(&i));
        let inside = prompt
            .spans
            .iter()
            .any(|s| s.role == Role::User && s.tokens.contains(&i));
        assert!(kept || inside, "turn marker {i}");
    }
}

#[test]
fn what_the_user_marks_is_kept_whatever_it_scores() {
    let pipeline = pair();
    let (_, messages) = needle("needle_4k_01.json");
    let sentence = messages[0].content.lines().nth(6).unwrap().to_string();
    let messages = vec![messages[0].clone().keep(&sentence)];
    let prompt = pipeline.render(&messages).unwrap();
    let marked = prompt
        .spans
        .iter()
        .find(|s| s.role == Role::Marked)
        .unwrap();
    let mut options = GenerateOptions {
        max_tokens: 1,
        ..Default::default()
    };
    options.specprefill.threshold = 2000;
    options.specprefill.keep = Keep::Tokens(600);
    let (_, plain) = answer(&pipeline, prompt.tokens.clone(), &options);
    options.keep = vec![marked.tokens.clone()];
    let (_, more) = answer(&pipeline, prompt.tokens.clone(), &options);
    let (_, by_text) = answer(&pipeline, messages, &options);
    let grown = more.specprefill.required_tokens - plain.specprefill.required_tokens;
    assert!(grown > 0 && grown <= marked.tokens.len());
    assert!(by_text.specprefill.required_tokens >= more.specprefill.required_tokens);
}

#[test]
fn streaming_never_splits_a_character() {
    let tokenizer = TextTokenizer::read(tiny().join("target")).unwrap();
    let text = "naïve 漢字 🦀🦀 done";
    let mut decoder = StreamDecoder::new(&tokenizer);
    let mut out = String::new();
    for id in tokenizer.encode(text).unwrap() {
        let part = decoder.push(id).unwrap();
        assert!(!part.contains('\u{FFFD}'));
        out.push_str(&part);
    }
    out.push_str(&decoder.finish().unwrap());
    assert_eq!(out, text);
}

#[test]
fn needle_is_found_sparse_at_any_depth() {
    let pipeline = pair();
    let (value, messages) = needle("needle_4k_01.json");
    let mut options = GenerateOptions::default();
    options.specprefill.threshold = 2000;
    let (text, usage) = answer(&pipeline, messages.clone(), &options);
    assert_eq!(text, value["expected_answer"].as_str().unwrap());
    assert!(usage.specprefill.admitted && usage.kept_tokens < usage.prompt_tokens / 4);
    options.mtp_depth = candle_specprefill::mtp::Depth::Off;
    assert_eq!(answer(&pipeline, messages, &options).0, text);
}

#[test]
fn needle_is_found_with_every_token() {
    let (value, messages) = needle("needle_4k_01.json");
    let pipeline = pair();
    let (text, usage) = answer(&pipeline, messages, &GenerateOptions::default());
    assert_eq!(text, value["expected_answer"].as_str().unwrap());
    assert_eq!(usage.kept_tokens, usage.prompt_tokens);
    assert!(usage.specprefill.explanation.contains("threshold"));
}

#[test]
fn a_target_alone_works_and_bad_prompts_are_refused() {
    let pipeline = SpecPrefillPipeline::builder(tiny().join("draft"))
        .build()
        .unwrap();
    let options = GenerateOptions {
        max_tokens: 4,
        ..Default::default()
    };
    let (_, usage) = answer(&pipeline, "Tell me about tea.", &options);
    assert_eq!(usage.mtp.stats.depth, 0);
    assert!(usage.specprefill.explanation.contains("no draft"));
    for prompt in [
        Prompt::Tokens(vec![]),
        Prompt::Tokens(vec![1; 20_000]),
        Prompt::Tokens(vec![9999]),
        "".into(),
    ] {
        assert!(pipeline.generate(prompt, &options).is_err());
    }
}

/// A scorer that fails.
#[derive(Debug)]
struct Broken;

impl Scorer for Broken {
    fn id(&self) -> String {
        "broken".into()
    }

    fn score(
        &self,
        _: &ScorerInput,
        _: &mut dyn FnMut(Progress),
    ) -> candle_specprefill::Result<Scores> {
        Err(candle_specprefill::Error::Draft("it broke".into()))
    }
}

fn long_options() -> GenerateOptions {
    let mut options = GenerateOptions {
        max_tokens: 8,
        ..Default::default()
    };
    options.specprefill.threshold = 2000;
    options
}

#[test]
fn a_failing_draft_costs_sparsity_and_is_reported_or_refused_if_asked() {
    let pipeline = SpecPrefillPipeline::builder(tiny().join("target"))
        .draft(tiny().join("draft"))
        .scorer(std::sync::Arc::new(Broken))
        .build()
        .unwrap();
    let (value, messages) = needle("needle_4k_01.json");
    let mut options = long_options();
    let (text, usage) = answer(&pipeline, messages.clone(), &options);
    assert_eq!(text, value["expected_answer"].as_str().unwrap());
    assert_eq!(usage.specprefill.reason, Reason::ScoringFailed);
    assert!(usage.specprefill.explanation.contains("it broke"));
    assert_eq!(usage.kept_tokens, usage.prompt_tokens);
    options.specprefill.on_failure = OnFailure::Error;
    let mut events = pipeline.generate(messages, &options).unwrap();
    let error = events.find_map(|e| e.err()).unwrap();
    assert!(error.to_string().contains("it broke"));
}

#[test]
fn a_prompt_is_scored_once() {
    let pipeline = pair();
    let (_, messages) = needle("needle_4k_01.json");
    let mut options = long_options();
    let (text, first) = answer(&pipeline, messages.clone(), &options);
    assert!(!first.specprefill.memo && first.specprefill.scoring_s > 0.0);
    let (again, second) = answer(&pipeline, messages.clone(), &options);
    assert!(second.specprefill.memo && second.specprefill.scoring_s == 0.0);
    assert_eq!((again, second.kept_tokens), (text, first.kept_tokens));
    // Another selection of the same scores.
    options.specprefill.keep = Keep::Fraction(0.4);
    let (_, third) = answer(&pipeline, messages.clone(), &options);
    assert!(third.specprefill.memo && third.kept_tokens > second.kept_tokens);
    options.specprefill.scorer = "uniform".parse().unwrap();
    assert!(!answer(&pipeline, messages, &options).1.specprefill.memo);
}

#[test]
fn scores_made_together_are_found_by_later_requests_and_change_none() {
    let (alone, together) = (pair(), pair());
    let (_, messages) = needle("needle_4k_01.json");
    let options = long_options();
    let wide = AttentionScorer::look_ahead_wide();
    let scorers = [AttentionScorer::spec_pc(), wide];
    let scores = together
        .score_all(messages.clone(), &scorers, &options)
        .unwrap();
    assert!(scores.len() == 2 && scores[1].prefill_s > 0.0);
    let selected = |pipeline: &SpecPrefillPipeline, memo| {
        let selected = pipeline.select(messages.clone(), &options).unwrap();
        assert_eq!(selected.usage.memo, memo);
        selected.selection.unwrap()
    };
    let (a, b) = (selected(&alone, false), selected(&together, true));
    assert_eq!(
        (a.kept, a.chunks, a.lookahead),
        (b.kept, b.chunks, b.lookahead)
    );
    let target = SpecPrefillPipeline::builder(tiny().join("target"));
    let error = target
        .build()
        .unwrap()
        .score_all(messages, &scorers, &options);
    assert!(matches!(error, Err(candle_specprefill::Error::Draft(_))));
}

/// Sampled text at a seed shows a difference of a single bit in the logits sooner or later.
#[test]
fn a_stored_system_block_changes_no_bit() {
    let build = |bytes| {
        SpecPrefillPipeline::builder(tiny().join("target"))
            .draft(tiny().join("draft"))
            .prefix_cache_bytes(bytes)
            .build()
            .unwrap()
    };
    let (stored, plain) = (build(256 << 20), build(0));
    let (_, messages) = needle("needle_4k_02.json");
    let secret = "The badge number of the silver mill is 70416. ".repeat(3);
    let talk = |question: &str| vec![Message::system(&secret), Message::user(question)];
    let mut options = long_options();
    options.max_tokens = 20;
    options.sampling.temperature = 0.8;
    for depth in [Depth::Fixed(3), Depth::Off] {
        options.mtp_depth = depth;
        let prompts = [
            talk("Tell me about tea."),
            talk("Define a mill."),
            talk(&messages[0].content),
        ];
        for (i, prompt) in prompts.into_iter().enumerate() {
            let (text, usage) = answer(&stored, prompt.clone(), &options);
            assert_eq!(usage.specprefill.prefix_tokens > 0, i > 0, "{depth:?}, {i}");
            assert_eq!(usage.specprefill.admitted, i == 2);
            let (want, without) = answer(&plain, prompt, &options);
            assert_eq!(
                (text, without.specprefill.prefix_tokens),
                (want, 0),
                "{depth:?}, {i}"
            );
        }
    }
}

#[test]
fn a_draft_that_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(tiny().join("draft")).unwrap().flatten() {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let build = |limit| {
        SpecPrefillPipeline::builder(tiny().join("target"))
            .draft(dir.path())
            .draft_limit_bytes(limit)
            .build()
    };
    assert!(build(10 << 20).is_ok());
    let error = build(1000).err().unwrap().to_string();
    assert!(error.contains("limit of 1000"), "{error}");
    let file = dir.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("\"<|im_start|>\"", "\"<|begin|>\"")).unwrap();
    let error = build(10 << 20).err().unwrap().to_string();
    assert!(
        error.contains("<|begin|>") && error.contains("<|im_start|>"),
        "{error}"
    );
}

#[test]
fn a_time_budget_is_met_once_speeds_are_known() {
    let pipeline = pair();
    let (_, messages) = needle("needle_4k_01.json");
    let mut options = long_options();
    options.specprefill.keep = Keep::Budget { ttft_s: 1e-6 };
    // Nothing is known yet: the default share.
    let (_, first) = answer(&pipeline, messages.clone(), &options);
    let (_, second) = answer(&pipeline, messages.clone(), &options);
    assert!(second.kept_tokens < first.kept_tokens);
    assert!(
        second.specprefill.over_budget && second.kept_tokens >= second.specprefill.required_tokens
    );
    options.specprefill.keep = Keep::Budget { ttft_s: 1e6 };
    let (_, third) = answer(&pipeline, messages, &options);
    assert_eq!(third.kept_tokens, third.prompt_tokens);
}

/// Keeps what matters least, and looks ahead as the default does.
#[derive(Debug)]
struct Inverted;

impl Scorer for Inverted {
    fn id(&self) -> String {
        "inverted".into()
    }

    fn score(
        &self,
        input: &ScorerInput,
        progress: &mut dyn FnMut(Progress),
    ) -> candle_specprefill::Result<Scores> {
        let mut scores = AttentionScorer::look_ahead().score(input, progress)?;
        scores.importance.iter_mut().for_each(|s| *s = 1.0 - *s);
        Ok(scores)
    }
}

#[test]
fn a_bad_selection_is_doubted_and_a_good_one_is_not() {
    let build = |scorer: Option<std::sync::Arc<dyn Scorer>>| {
        let builder =
            SpecPrefillPipeline::builder(tiny().join("target")).draft(tiny().join("draft"));
        match scorer {
            Some(scorer) => builder.scorer(scorer).build().unwrap(),
            None => builder.build().unwrap(),
        }
    };
    let (value, messages) = needle("needle_4k_01.json");
    let right = value["expected_answer"].as_str().unwrap();
    let mut options = long_options();
    let bad = build(Some(std::sync::Arc::new(Inverted)));
    let (text, usage) = answer(&bad, messages.clone(), &options);
    assert!(text != right && !usage.specprefill.reread);
    let low = usage.specprefill.agreement.unwrap();
    options.specprefill.gate.min_probability = 0.5;
    let (text, usage) = answer(&bad, messages.clone(), &options);
    assert_eq!(
        (text.as_str(), usage.kept_tokens),
        (right, usage.prompt_tokens)
    );
    assert!(usage.specprefill.reread && usage.specprefill.agreement == Some(low));
    // Reading more, but not everything, of the same scores.
    options.specprefill.gate.reread = Some(Keep::Fraction(0.5));
    let (_, usage) = answer(&bad, messages.clone(), &options);
    let share = usage.kept_tokens as f64 / usage.prompt_tokens as f64;
    assert!(
        usage.specprefill.reread && (0.45..0.65).contains(&share),
        "{share}"
    );
    let (text, usage) = answer(&build(None), messages, &options);
    assert!(text == right && !usage.specprefill.reread);
    assert!(usage.specprefill.agreement.unwrap() > 0.5 && low < 0.5);
}

#[test]
fn several_answers_at_once_are_those_of_each_alone() {
    let pipeline = pair();
    let (_, long) = needle("needle_4k_01.json");
    let short = |max_tokens| GenerateOptions {
        max_tokens,
        ..Default::default()
    };
    let sparse = GenerateOptions {
        max_tokens: 20,
        ..long_options()
    };
    let mut sampled = short(30);
    sampled.sampling.temperature = 0.9;
    sampled.sampling.seed = 7;
    let mut stopped = short(60);
    stopped.stop = vec![" the".into()];
    let mut plain = short(25);
    plain.mtp_depth = Depth::Off;
    let requests: Vec<(Prompt, GenerateOptions)> = vec![
        (long.clone().into(), sparse.clone()),
        ("Tell me about tea.".into(), short(40)),
        ("".into(), short(5)),
        ("Tell me about the sea.".into(), sampled),
        ("Tell me about the garden.".into(), stopped),
        ("Define the word \"harbour\".".into(), plain),
        ("Hi".into(), short(1)),
        (long.into(), short(12)),
    ];
    let cancel = CancelToken::default();
    let all = pipeline.generate_all(requests.clone(), &cancel);
    assert_eq!(all.len(), requests.len());
    for (i, ((prompt, options), together)) in requests.into_iter().zip(all).enumerate() {
        let alone = pipeline
            .generate(prompt, &options)
            .and_then(|g| g.complete());
        match (alone, together) {
            (Ok(alone), Ok(together)) => {
                assert_eq!(together.token_ids, alone.token_ids, "{i}");
                assert_eq!(together.text, alone.text, "{i}");
                let (one, other) = (alone.usage, together.usage);
                assert_eq!(other.kept_tokens, one.kept_tokens, "{i}");
                assert_eq!(other.prompt_tokens, one.prompt_tokens, "{i}");
                assert_eq!(other.finish_reason, one.finish_reason, "{i}");
                assert_eq!(other.specprefill.admitted, i == 0, "{i}");
            }
            (Err(alone), Err(together)) => assert_eq!(alone.to_string(), together.to_string()),
            (alone, together) => panic!("{i}: {alone:?} alone, {together:?} together"),
        }
    }
    cancel.cancel();
    let none = pipeline.generate_all([("Hi".into(), sparse)], &cancel);
    assert!(matches!(none[..], [Err(Error::Cancelled)]), "{none:?}");
    assert!(pipeline
        .generate_all([], &CancelToken::default())
        .is_empty());
}
